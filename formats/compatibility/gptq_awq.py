"""Rules on GPTQ and AWQ files. Versions as in rules.py."""

from formats.compatibility.loads_in import Rule
from formats.compatibility.terms import (
    OPTIMUM,
    OTHERS,
    SERVERS,
    SGLANG,
    SGLANG_SOURCE,
    TRANSFORMERS,
    VLLM,
    VLLM_SOURCE,
    any_scheme,
    gptq_bits,
    groups,
    has_quantized_head,
    row,
    small_shape,
    trait,
    when,
)
from formats.scheme import CHANNEL

GPTQ_AWQ_RULES: tuple[Rule, ...] = (
    # GPTQ
    row(
        "gptq-without-desc-act",
        VLLM,
        "no",
        when(lambda f: f.desc_act is None, "refuses a quantization_config without desc_act"),
        f"{VLLM_SOURCE}/auto_gptq.py from_config",
        "gptq",
    ),
    row("gptq-bits", VLLM, "no", gptq_bits, f"{VLLM_SOURCE}/auto_gptq.py TYPE_MAP", "gptq"),
    row(
        "gptq-groups",
        VLLM,
        "no",
        groups("takes groups of 32, 64, 128 or -1, not {}"),
        f"{VLLM_SOURCE}/auto_gptq.py verify_marlin_supported",
        "gptq",
    ),
    row(
        "gptq-desc-act",
        VLLM,
        "no",
        when(
            lambda f: f.desc_act and any(s.weight.group_size != CHANNEL for s in f.schemes),
            "refuses desc_act with groups",
        ),
        f"{VLLM_SOURCE}/utils/gptq_utils.py normalize_and_validate_gptq_desc_act",
        "gptq",
    ),
    row(
        "gptq-mislabelled",
        SGLANG,
        "no",
        trait("mislabelled", "its fallback kernel follows checkpoint_format, which is wrong"),
        f"{SGLANG_SOURCE}/gptq/schemes/gptq_linear.py use_v2_format",
        "gptq",
    ),
    row(
        "gptq-plain-kernel",
        SGLANG,
        "slow",
        when(gptq_bits, "only its fallback float16 kernel takes this"),
        f"{SGLANG_SOURCE}/gptq TYPE_MAP",
        "gptq",
    ),
    row(
        "gptq-groups-sglang",
        SGLANG,
        "slow",
        groups("the fast kernel takes groups of 32, 64, 128 or -1"),
        f"{SGLANG_SOURCE}/marlin_utils.py",
        "gptq",
    ),
    row(
        "gptq-act-order-sglang",
        SGLANG,
        "slow",
        trait("act-order", "reorders the inputs on every call (act-order)"),
        f"{SGLANG_SOURCE}/gptq/schemes/gptq_linear.py",
        "gptq",
    ),
    row(
        "gptq-shapes",
        SGLANG,
        "slow",
        small_shape,
        f"{SGLANG_SOURCE}/marlin_utils.py check_marlin_supports_layer",
        "gptq",
    ),
    row(
        "gptq-dynamic",
        TRANSFORMERS,
        "no",
        when(
            lambda f: f.exceptions,
            "ignores dynamic, which sets the schemes of some linears, and fails or computes garbage"
            " (convert to compressed-tensors)",
        ),
        f"{OPTIMUM}, run",
        "gptq",
    ),
    row(
        "gptq-mislabelled-transformers",
        TRANSFORMERS,
        "no",
        trait("mislabelled", "follows checkpoint_format, which is wrong"),
        OPTIMUM,
        "gptq",
    ),
    row(
        "gptq-v1-asymmetric",
        TRANSFORMERS,
        "no",
        when(
            lambda f: (
                f.config.zeros == "v1"
                and not f.config.scheme.weight.symmetric
                and not f.written_by_gptqmodel
            ),
            "refuses asymmetric GPTQ with v1 zeros of unknown writers",
        ),
        "gptqmodel/models/loader.py of 7.7.0",
        "gptq",
    ),
    row(
        "gptq-head-transformers",
        TRANSFORMERS,
        "no",
        when(
            has_quantized_head,
            "replaces the linears of layers only, not a quantized head (convert to"
            " compressed-tensors)",
        ),
        f"{OPTIMUM} get_layers",
        "gptq",
        "awq",
    ),
    row(
        "gptq-transformers",
        TRANSFORMERS,
        "yes",
        lambda f: "with optimum and gptqmodel installed",
        OPTIMUM,
        "gptq",
    ),
    row(
        "gptq-activations",
        OTHERS,
        "yes",
        any_scheme(
            lambda s: s.activation is not None,
            "as W8A16: only this project knows the 8-bit activation key",
        ),
        "none of their sources has the key",
        "gptq",
    ),
    # AWQ
    row(
        "awq-no-zeros",
        OTHERS,
        "no",
        trait("no zeros", "needs qzeros, also of symmetric weights"),
        f"{VLLM_SOURCE}/auto_awq.py, {SGLANG_SOURCE}/awq",
        "awq",
    ),
    row(
        "awq-symmetric",
        SERVERS,
        "slow",
        any_scheme(
            lambda s: s.weight.symmetric,
            "zero_point false is refused by the fast kernel; convert writes true",
        ),
        f"{VLLM_SOURCE}/auto_awq.py query_marlin_supported_quant_types",
        "awq",
    ),
    row(
        "awq-groups",
        SERVERS,
        "slow",
        groups("the fast kernel takes groups of 32, 64, 128 or -1, not {}"),
        f"{VLLM_SOURCE}/auto_awq.py",
        "awq",
    ),
    row(
        "awq-transformers",
        TRANSFORMERS,
        "yes",
        lambda f: "with gptqmodel installed",
        "transformers/quantizers/quantizer_awq.py of 5.23.0",
        "awq",
    ),
)
