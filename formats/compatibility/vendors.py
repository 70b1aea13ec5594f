"""Loading rules for NVIDIA's Model Optimizer, AMD's Quark and MX formats, one row each.

Versions as in rules.py.
"""

from formats.compatibility.loads_in import Facts, Rule
from formats.compatibility.terms import (
    OURS,
    OWN_SOURCE,
    SERVERS,
    SGLANG,
    SGLANG_SOURCE,
    TRANSFORMERS,
    VLLM,
    VLLM_SOURCE,
    any_scheme,
    row,
    when,
)
from formats.other_tools.modelopt_config import METHODS as MODELOPT
from formats.scheme import MXFP8

VLLM_ALGORITHMS = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8"),
)
SGLANG_ALGORITHMS = ("FP8", "NVFP4")


def _beyond(known: tuple[str, ...]):
    """Make a reason about the first algorithm that a program does not know; "" if it knows all."""

    def reason(facts: Facts) -> str:
        other = next((name for name in facts.algorithms if name not in known), "")
        return other and f"takes {', '.join(known)} of modelopt, not {other}"

    return reason


VENDOR_RULES: tuple[Rule, ...] = (
    row(
        "modelopt-transformers",
        TRANSFORMERS,
        "no",
        lambda f: "does not know modelopt: reads the codes as float weights, without their scales",
        "transformers/quantizers/auto.py AUTO_QUANTIZER_MAPPING of 5.23.0",
        *MODELOPT,
    ),
    row(
        "modelopt-vllm",
        VLLM,
        "no",
        _beyond(VLLM_ALGORITHMS),
        f"{VLLM_SOURCE}/modelopt.py QUANT_ALGOS",
        *MODELOPT,
    ),
    row(
        "modelopt-sglang",
        SGLANG,
        "not judged",
        _beyond(SGLANG_ALGORITHMS),
        f"{SGLANG_SOURCE}/modelopt_quant.py",
        *MODELOPT,
    ),
    row(
        "modelopt-int8-kv",
        VLLM,
        "no",
        when(
            lambda f: f.config.kv_cache == "int8",
            "refuses the KV cache: it takes FP8 and NVFP4 of modelopt",
        ),
        f"{VLLM_SOURCE}/modelopt.py KV_CACHE_QUANT_ALGOS",
        *MODELOPT,
    ),
    row(
        "quark-transformers",
        TRANSFORMERS,
        "yes",
        lambda f: "with amd-quark installed",
        "transformers/quantizers/quantizer_quark.py of 5.23.0",
        "quark",
    ),
    row(
        "quark-int4",
        SERVERS,
        "no",
        any_scheme(
            lambda s: s.weight.type == "int" and s.weight.bits == 4,
            "takes float8, int8 and MX formats of Quark, not 4-bit integers in groups",
        ),
        f"{VLLM_SOURCE}/quark/quark.py _get_scheme_from_config; SGLang's is alike",
        "quark",
    ),
    row(
        "auto-round-float",
        VLLM,
        "no",
        when(
            lambda f: f.packing in ("auto_round:fp8_static", "auto_round:llm_compressor"),
            "takes auto_gptq, auto_awq and blocks of float8 (auto_round:fp8) of AutoRound",
        ),
        f"{VLLM_SOURCE}/inc/inc.py SUPPORTED_FORMATS",
        "auto-round",
    ),
    row(
        "auto-round-float-sglang",
        SGLANG,
        "no",
        when(
            lambda f: (
                f.packing
                in ("auto_round:fp8_static", "auto_round:fp8", "auto_round:llm_compressor")
            ),
            "takes the packings auto_gptq and auto_awq of AutoRound",
        ),
        f"{SGLANG_SOURCE}/auto_round.py SUPPORTED_FORMATS",
        "auto-round",
    ),
    row(
        "own-mxfp8",
        OURS,
        "slow",
        any_scheme(lambda s: s.weight == MXFP8, "there is no dedicated kernel for MXFP8"),
        OWN_SOURCE,
    ),
    row(
        "mxfp8-sglang",
        SGLANG,
        "not judged",
        any_scheme(lambda s: s.weight == MXFP8, "no rule was read for MXFP8 in compressed-tensors"),
        "no source was read for it",
        "compressed-tensors",
    ),
    row(
        "w4a4-servers",
        SERVERS,
        "not judged",
        when(
            lambda f: bool(f.config.narrow_inputs),
            "no rule was read for 4-bit integer activations",
        ),
        "no source was read for it",
        "compressed-tensors",
    ),
)
