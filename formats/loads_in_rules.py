"""The rules of who loads what, one row each, with where each was read or seen.

Versions: vLLM 0.33.0 (and 0.25.1 and 0.29.0 where it says so), SGLang 0.5.23, transformers 5.23.0
with optimum 2.3.0, gptqmodel 7.7.0 and compressed-tensors 0.20.0.
"""

from formats.families import served_architectures
from formats.inspect_config import SILU
from formats.linear_summary import LinearSummary
from formats.loads_in import Facts, Rule, Verdict, judge
from formats.rope_types import SERVED_ROPE_TYPES
from formats.scheme import CHANNEL, Scheme

OURS, VLLM, SGLANG, TRANSFORMERS = PROGRAMS = ("this project", "vLLM", "SGLang", "transformers")
OTHERS = (VLLM, SGLANG, TRANSFORMERS)
SERVERS = (VLLM, SGLANG)
MARLIN_GROUPS = (CHANNEL, 32, 64, 128)
SERVED_GPTQ = ((4, True), (8, True))
# folders of each program's source, for the evidence
_VLLM = "vllm/model_executor/layers/quantization"
_CT = f"{_VLLM}/compressed_tensors/compressed_tensors.py"
_SGLANG = "sglang/srt/layers/quantization"
_HERE = "this project's own source"


def loads_in(facts: Facts) -> list[Verdict]:
    """One verdict for each program."""
    return judge(facts, RULES, PROGRAMS)


def _row(
    name: str, programs: tuple[str, ...] | str, answer: str, reason, evidence: str, *methods: str
) -> Rule:
    programs = (programs,) if isinstance(programs, str) else programs
    return Rule(
        name=name,
        programs=programs,
        answer=answer,
        reason=reason,
        evidence=evidence,
        methods=methods,
    )


def _when(condition, reason: str):
    return lambda facts: reason if condition(facts) else ""


def _trait(name: str, reason: str):
    return _when(lambda facts: name in facts.traits, reason)


def _any(condition, reason: str):
    """A rule about any scheme of the file."""
    return _when(lambda facts: any(condition(scheme) for scheme in facts.schemes), reason)


def _gptq_bits(facts: Facts) -> str:
    for spec in (scheme.weight for scheme in facts.schemes):
        if (spec.bits, spec.symmetric) not in SERVED_GPTQ:
            kind = "symmetric" if spec.symmetric else "asymmetric"
            return f"takes symmetric 4- and 8-bit GPTQ, not {spec.bits}-bit {kind}"
    return ""


def _groups(text: str):
    def reason(facts: Facts) -> str:
        for spec in (scheme.weight for scheme in facts.schemes):
            if spec.type == "int" and spec.group_size not in MARLIN_GROUPS:
                return text.format(spec.group_size)
        return ""

    return reason


def _fits_marlin(linear: LinearSummary) -> bool:
    N, K = linear.out_features, linear.in_features
    return (N % 64 == 0 and K % 128 == 0) or (N % 128 == 0 and K % 64 == 0)


def _small(facts: Facts) -> str:
    for linear in facts.linears:
        if "float" not in linear.traits and not _fits_marlin(linear):
            return f"the shape of {linear.name} does not fit the fast kernel"
    return ""


def _is_packed_asymmetric(scheme: Scheme) -> bool:
    return not scheme.weight.symmetric and scheme.activation is None


def _packed_asymmetric(facts: Facts) -> bool:
    return any(_is_packed_asymmetric(scheme) for scheme in facts.schemes)


def _is_w4a8(scheme: Scheme, kind: str) -> bool:
    activation = scheme.activation
    return scheme.weight.bits < 8 and activation is not None and activation.type == kind


_SHAPE_OF_ZEROS = "expects weight_zero_point in another shape than the library writes"
_LIBRARY = "compressed-tensors 0.20.0, run"
_OPTIMUM = "optimum/gptq/quantizer.py of 2.3.0, transformers/quantizers/quantizer_gptq.py"

RULES: tuple[Rule, ...] = (
    # of the folder, whatever its format
    _row("own-error", OURS, "no", lambda f: f.config_error or f.first_error, _HERE),
    _row("damaged", OTHERS, "no", lambda f: f.first_error, "what inspection found"),
    _row(
        "unreadable",
        OTHERS,
        "not judged",
        lambda f: f.config_error and f"this project cannot read it: {f.config_error}",
        "no rule looks at what is not read",
    ),
    _row(
        "family",
        OURS,
        "no",
        _when(
            lambda f: f.architecture not in served_architectures(),
            f"serves {', '.join(served_architectures())}",
        ),
        _HERE,
    ),
    _row(
        "activation",
        (OURS, *SERVERS),
        "no",
        lambda f: (
            "" if f.choices.activation == SILU else f"computes {SILU}, not {f.choices.activation}"
        ),
        "vllm/model_executor/models/llama.py LlamaMLP; SGLang's is alike",
    ),
    _row(
        "rope",
        OURS,
        "no",
        lambda f: (
            ""
            if f.choices.rope in SERVED_ROPE_TYPES
            else f"computes no rotary embedding of type {f.choices.rope}"
        ),
        _HERE,
    ),
    _row("unplaced", OURS, "no", lambda f: f.unplaced and f"has no place for {f.unplaced}", _HERE),
    _row(
        "second-file-transformers",
        TRANSFORMERS,
        "no",
        lambda f: (
            f.second_file
            and f"reads no {f.second_file}: takes the model for float, with random weights"
        ),
        "transformers/quantizers/auto.py of 5.23.0, run",
    ),
    _row(
        "second-file-servers",
        SERVERS,
        "no",
        lambda f: (
            f.second_file
            and f"reads {f.second_file} only with --quantization: copy it into config.json"
        ),
        "vllm/model_executor/model_loader/weight_utils.py get_quant_config; SGLang's is alike",
    ),
    _row(
        "fused-mixed",
        SERVERS,
        "no",
        lambda f: f.fused_mixed and f"loads {f.fused_mixed} as one matrix, in one scheme",
        f"{_VLLM}/utils/quant_utils.py is_layer_skipped, {_VLLM}/utils/gptq_utils.py",
        "gptq",
        "awq",
        "compressed-tensors",
        "auto-round",
        "fp8",
    ),
    # what this project runs without a kernel of its own
    _row(
        "own-act-order",
        OURS,
        "slow",
        _trait("act-order", "inputs are put in order on every call"),
        _HERE,
    ),
    _row(
        "own-bits",
        OURS,
        "slow",
        _any(
            lambda s: s.weight.type == "int" and s.weight.bits not in (4, 8),
            "bits other than 4 and 8 have no kernel of their own",
        ),
        _HERE,
    ),
    # GPTQ
    _row(
        "gptq-without-desc-act",
        VLLM,
        "no",
        _when(lambda f: f.desc_act is None, "refuses a quantization_config without desc_act"),
        f"{_VLLM}/auto_gptq.py from_config",
        "gptq",
    ),
    _row("gptq-bits", VLLM, "no", _gptq_bits, f"{_VLLM}/auto_gptq.py TYPE_MAP", "gptq"),
    _row(
        "gptq-groups",
        VLLM,
        "no",
        _groups("takes groups of 32, 64, 128 or -1, not {}"),
        f"{_VLLM}/auto_gptq.py verify_marlin_supported",
        "gptq",
    ),
    _row(
        "gptq-desc-act",
        VLLM,
        "no",
        _when(
            lambda f: f.desc_act and any(s.weight.group_size != CHANNEL for s in f.schemes),
            "refuses desc_act with groups",
        ),
        f"{_VLLM}/utils/gptq_utils.py normalize_and_validate_gptq_desc_act",
        "gptq",
    ),
    _row(
        "gptq-mislabelled",
        SGLANG,
        "no",
        _trait("mislabelled", "its plain kernel believes checkpoint_format, which is wrong"),
        f"{_SGLANG}/gptq/schemes/gptq_linear.py use_v2_format",
        "gptq",
    ),
    _row(
        "gptq-plain-kernel",
        SGLANG,
        "slow",
        _when(_gptq_bits, "only its plain float16 kernel takes this"),
        f"{_SGLANG}/gptq TYPE_MAP",
        "gptq",
    ),
    _row(
        "gptq-groups-sglang",
        SGLANG,
        "slow",
        _groups("the fast kernel takes groups of 32, 64, 128 or -1"),
        f"{_SGLANG}/marlin_utils.py",
        "gptq",
    ),
    _row(
        "gptq-act-order-sglang",
        SGLANG,
        "slow",
        _trait("act-order", "orders the inputs on every call"),
        f"{_SGLANG}/gptq/schemes/gptq_linear.py",
        "gptq",
    ),
    _row(
        "gptq-shapes",
        SGLANG,
        "slow",
        _small,
        f"{_SGLANG}/marlin_utils.py check_marlin_supports_layer",
        "gptq",
    ),
    _row(
        "gptq-dynamic",
        TRANSFORMERS,
        "no",
        _when(
            lambda f: f.exceptions,
            "ignores dynamic, by which linears differ here, and fails or computes garbage"
            " (convert to compressed-tensors)",
        ),
        f"{_OPTIMUM}, run",
        "gptq",
    ),
    _row(
        "gptq-mislabelled-transformers",
        TRANSFORMERS,
        "no",
        _trait("mislabelled", "believes checkpoint_format, which is wrong"),
        _OPTIMUM,
        "gptq",
    ),
    _row(
        "gptq-v1-asymmetric",
        TRANSFORMERS,
        "no",
        _when(
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
    _row(
        "gptq-transformers",
        TRANSFORMERS,
        "yes",
        lambda f: "with optimum and gptqmodel installed",
        _OPTIMUM,
        "gptq",
    ),
    _row(
        "gptq-activations",
        OTHERS,
        "yes",
        _any(lambda s: s.activation is not None, "as W8A16: the key for 8-bit activations is ours"),
        "none of their sources has the key",
        "gptq",
    ),
    # AWQ
    _row(
        "awq-no-zeros",
        OTHERS,
        "no",
        _trait("no zeros", "needs qzeros, also of symmetric weights"),
        f"{_VLLM}/auto_awq.py, {_SGLANG}/awq",
        "awq",
    ),
    _row(
        "awq-symmetric",
        SERVERS,
        "slow",
        _any(
            lambda s: s.weight.symmetric,
            "zero_point false is refused by the fast kernel; convert writes true",
        ),
        f"{_VLLM}/auto_awq.py query_marlin_supported_quant_types",
        "awq",
    ),
    _row(
        "awq-groups",
        SERVERS,
        "slow",
        _groups("the fast kernel takes groups of 32, 64, 128 or -1, not {}"),
        f"{_VLLM}/auto_awq.py",
        "awq",
    ),
    _row(
        "awq-transformers",
        TRANSFORMERS,
        "yes",
        lambda f: "with gptqmodel installed",
        "transformers/quantizers/quantizer_awq.py of 5.23.0",
        "awq",
    ),
    # compressed-tensors
    _row(
        "ct-actorder",
        OTHERS,
        "no",
        _when(lambda f: f.config.act_order, "refuses an actorder that regroups inputs"),
        f"{_CT} _quantization_scheme_map_from_config; {_LIBRARY}: removed since 0.19",
        "compressed-tensors",
    ),
    _row(
        "ct-weight-zeros",
        SERVERS,
        "no",
        _trait("weight zeros", "has no place for the zeros of symmetric weights"),
        f"{_VLLM}/compressed_tensors/schemes/compressed_tensors_wNa16.py",
        "compressed-tensors",
    ),
    _row(
        "ct-int8-kv-vllm",
        VLLM,
        "no",
        _when(
            lambda f: f.config.kv_cache == "int8",
            "refuses the kv_cache_scheme: its 8-bit KV cache is float8",
        ),
        f"{_CT} validate_kv_cache_scheme, 0.25.1 to 0.33.0",
        "compressed-tensors",
    ),
    _row(
        "ct-int8-kv-sglang",
        SGLANG,
        "yes",
        _when(
            lambda f: f.config.kv_cache == "int8",
            "ignores the scales: its 8-bit KV cache is float8",
        ),
        f"{_SGLANG}/compressed_tensors/compressed_tensors.py is_supported_scheme",
        "compressed-tensors",
    ),
    _row(
        "ct-humming",
        VLLM,
        "yes",
        _when(
            lambda f: any(
                s.weight.type == "int"
                and (s.weight.bits not in (4, 8) or s.weight.group_size not in MARLIN_GROUPS)
                and s.activation is None
                for s in f.schemes
            ),
            "by its Humming kernel (CUDA, from sm75 on), which the wheel brings",
        ),
        f"{_VLLM}/compressed_tensors/schemes/compressed_tensors_wNa16.py WNA16_SUPPORTED_TYPES_MAP,"
        " vllm/model_executor/kernels/linear/mixed_precision/humming.py",
        "compressed-tensors",
    ),
    _row(
        "ct-bits-sglang",
        SGLANG,
        "no",
        _any(
            lambda s: s.weight.type == "int" and s.weight.bits not in (4, 8),
            "takes 4 and 8 bits",
        ),
        f"{_SGLANG}/compressed_tensors/schemes/compressed_tensors_wNa16.py",
        "compressed-tensors",
    ),
    _row(
        "ct-groups-sglang",
        SGLANG,
        "no",
        _groups("takes groups of 32, 64, 128 or -1, not {}"),
        f"{_SGLANG}/marlin_utils.py",
        "compressed-tensors",
    ),
    _row(
        "ct-w4a8-int",
        VLLM,
        "yes",
        _any(
            lambda s: _is_w4a8(s, "int"),
            "pack-quantized from 0.29 on (not in 0.25), by its Humming kernel",
        ),
        f"{_CT} _is_wNaM_int, CompressedTensorsWNA8Int of 0.29.0 and 0.33.0",
        "compressed-tensors",
    ),
    _row(
        "ct-w4a8-fp8",
        VLLM,
        "yes",
        _any(
            lambda s: _is_w4a8(s, "float"),
            "on Hopper (sm_90) alone, in groups of 128, from 0.25 on",
        ),
        f"{_CT} _is_fp8_w4a8_sm90, CompressedTensorsW4A8Fp8 of 0.25.1 to 0.33.0",
        "compressed-tensors",
    ),
    _row(
        "ct-w4a8-fp8-groups",
        VLLM,
        "no",
        _any(
            lambda s: _is_w4a8(s, "float") and s.weight.group_size != 128,
            "takes 4-bit weights beside float8 activations in groups of 128 only",
        ),
        f"{_VLLM}/compressed_tensors/schemes/compressed_tensors_w4a8_fp8.py",
        "compressed-tensors",
    ),
    _row(
        "ct-w4a8-sglang",
        SGLANG,
        "no",
        _any(
            lambda s: _is_w4a8(s, "int") or _is_w4a8(s, "float"),
            "takes 8-bit activations beside 4-bit weights in experts only",
        ),
        f"{_SGLANG}/compressed_tensors/compressed_tensors.py _get_scheme_from_parts",
        "compressed-tensors",
    ),
    _row(
        "ct-fp8",
        SERVERS,
        "yes",
        _any(
            lambda s: s.weight.type == "float" and s.activation is not None,
            "8-bit products from sm89 on, below that 16-bit activations",
        ),
        f"{_CT} CompressedTensorsW8A8Fp8.get_min_capability",
        "compressed-tensors",
    ),
    _row(
        "ct-packed-asymmetric-mixed",
        TRANSFORMERS,
        "no",
        _when(
            lambda f: _packed_asymmetric(f) and len(set(f.schemes)) > 1,
            _SHAPE_OF_ZEROS,
        ),
        _LIBRARY,
        "compressed-tensors",
    ),
    _row(
        "ct-packed-asymmetric",
        TRANSFORMERS,
        "slow",
        _when(
            _packed_asymmetric,
            f"as float, with CompressedTensorsConfig(dequantize=True): else {_SHAPE_OF_ZEROS}",
        ),
        _LIBRARY,
        "compressed-tensors",
    ),
    _row(
        "ct-transformers",
        TRANSFORMERS,
        "yes",
        lambda f: "with compressed-tensors installed",
        _LIBRARY,
        "compressed-tensors",
    ),
)
