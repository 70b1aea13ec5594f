"""Which programs load a checkpoint: rules read from their sources, as one table of functions.

Versions: vLLM 0.33, SGLang 0.5.23, transformers 5.23. Knows what the doctor found, no files.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from formats.families import served_architectures
from formats.inspect_config import Choices
from formats.linear_summary import LinearSummary
from formats.quant_config import QuantConfig
from formats.rope_types import SERVED_ROPE_TYPES
from formats.scheme import CHANNEL, Scheme

MARLIN_GROUPS = (CHANNEL, 32, 64, 128)
SERVED_GPTQ = ((4, True), (8, True))


class Verdict(NamedTuple):
    """`answer` for one program, and why."""

    program: str
    answer: Literal["yes", "no", "slow"]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the rules look at."""

    architecture: str  # of config.json; empty: it states none, or several
    method: str  # "float", or a quant_method
    config: QuantConfig | None  # None: float, or it cannot be read
    config_error: str  # why it cannot be read
    linears: Sequence[LinearSummary]
    choices: Choices  # of config.json
    first_error: str  # of the checkpoint itself; empty: none
    fused_mixed: str  # a fused matrix whose members differ; empty: none
    unplaced: str  # a tensor that the model has no place for; empty: none
    desc_act: bool | None  # what a GPTQ config says; None: nothing
    written_by_gptqmodel: bool

    @property
    def traits(self) -> set[str]:
        return {trait for linear in self.linears for trait in linear.traits}

    @property
    def schemes(self) -> list[Scheme]:
        return self.config.schemes


def loads_in(facts: Facts) -> list[Verdict]:
    """One verdict for each program."""
    return [Verdict(program, *rule(facts)) for program, rule in PROGRAMS.items()]


Answer = tuple[str, str]


def _gptq(rule: Callable[[Facts], Answer]) -> Callable[[Facts], Answer]:
    """A rule of another program, which reads no activations out of a GPTQ config."""

    @functools.wraps(rule)
    def judged(facts: Facts) -> Answer:
        answer, reason = rule(facts)
        if answer != "no" and any(scheme.activation is not None for scheme in facts.schemes):
            kept = f"{reason}; " if reason else ""
            reason = f"{kept}as W8A16: the key for 8-bit activations is ours"
        return answer, reason

    return judged


def _ours(facts: Facts) -> Answer:
    if facts.config_error:
        return "no", facts.config_error
    if facts.first_error:
        return "no", facts.first_error
    if facts.architecture not in served_architectures():
        return "no", f"serves {', '.join(served_architectures())}"
    problem = _without_activation(facts)
    if problem:
        return problem
    if facts.choices.rope not in SERVED_ROPE_TYPES:
        return "no", f"computes no rotary embedding of type {facts.choices.rope}"
    if facts.unplaced:
        return "no", f"has no place for {facts.unplaced}"
    if "act-order" in facts.traits:
        return "slow", "inputs are put in order on every call"
    if facts.config is not None and any(s.weight.bits in (2, 3) for s in facts.schemes):
        return "slow", "2 and 3 bits have no kernel of their own"
    return "yes", ""


def _vllm(facts: Facts) -> Answer:
    problem = _broken(facts) or _without_activation(facts)
    if facts.method == "float":
        return problem or ("yes", "")
    problem = problem or _mixed(facts)
    if problem:
        return problem
    rule = {"gptq": _vllm_gptq, "awq": _awq_server, "compressed-tensors": _vllm_compressed}
    return rule[facts.method](facts)


@_gptq
def _vllm_gptq(facts: Facts) -> Answer:
    if facts.desc_act is None:
        return "no", "refuses a quantization_config without desc_act"
    for scheme in facts.schemes:
        spec = scheme.weight
        if (spec.bits, spec.symmetric) not in SERVED_GPTQ:
            kind = "symmetric" if spec.symmetric else "asymmetric"
            return "no", f"takes symmetric 4- and 8-bit GPTQ, not {spec.bits}-bit {kind}"
        if spec.group_size not in MARLIN_GROUPS:
            return "no", f"takes groups of 32, 64, 128 or -1, not {spec.group_size}"
        if facts.desc_act and spec.group_size != CHANNEL:
            return "no", "refuses desc_act with groups"
    if "act-order" in facts.traits:
        return "no", "drops g_idx without a word and computes garbage"
    return "yes", ""


def _awq_server(facts: Facts) -> Answer:
    """vLLM and SGLang."""
    spec = facts.config.scheme.weight
    if "no zeros" in facts.traits:
        return "no", "needs qzeros, also of symmetric weights"
    if spec.symmetric:
        return "slow", "zero_point false is refused by the fast kernel; convert writes true"
    if spec.group_size not in MARLIN_GROUPS:
        return "slow", f"the fast kernel takes groups of 32, 64, 128 or -1, not {spec.group_size}"
    return "yes", ""


def _vllm_compressed(facts: Facts) -> Answer:
    if facts.config.act_order:
        return "no", "refuses an actorder that regroups inputs"
    return _compressed_server(facts)


def _compressed_server(facts: Facts) -> Answer:
    """vLLM and SGLang."""
    if "act-order" in facts.traits:
        return "no", "refuses act-order in groups"
    if "weight zeros" in facts.traits:
        return "no", "has no place for the zeros of symmetric weights"
    for spec in (scheme.weight for scheme in facts.schemes):
        if spec.type == "int" and spec.group_size not in MARLIN_GROUPS:
            return "no", f"takes groups of 32, 64, 128 or -1, not {spec.group_size}"
    reasons = []
    if any(s.weight.type == "float" and s.activation is not None for s in facts.schemes):
        reasons.append("8-bit products from sm89 on, below that 16-bit activations")
    if facts.config.kv_cache == "int8":
        # its check of the scheme lets 8 bits of any type pass
        reasons.append("its 8-bit KV cache is float8: it would take int8 scales for float8 ones")
    return "yes", "; ".join(reasons)


def _sglang(facts: Facts) -> Answer:
    problem = _broken(facts) or _without_activation(facts)
    if facts.method == "float":
        return problem or ("yes", "")
    problem = problem or _mixed(facts)
    if problem:
        return problem
    if facts.method == "awq":
        return _awq_server(facts)
    if facts.method == "compressed-tensors":
        return _compressed_server(facts)
    return _sglang_gptq(facts)


@_gptq
def _sglang_gptq(facts: Facts) -> Answer:
    if "mislabelled" in facts.traits:
        return "no", "its plain kernel believes checkpoint_format, which is wrong"
    for scheme in facts.schemes:
        spec = scheme.weight
        if (spec.bits, spec.symmetric) not in SERVED_GPTQ:
            return "slow", "only its plain float16 kernel takes this"
        if spec.group_size not in MARLIN_GROUPS:
            return "slow", "the fast kernel takes groups of 32, 64, 128 or -1"
    if "act-order" in facts.traits:
        if facts.desc_act:
            return "slow", "orders the inputs on every call"
        return "no", "desc_act is false, but g_idx is not in order"
    small = [x.name for x in facts.linears if "float" not in x.traits and not _fits_marlin(x)]
    if small:
        return "slow", f"the shape of {small[0]} does not fit the fast kernel"
    return "yes", ""


def _transformers(facts: Facts) -> Answer:
    problem = _broken(facts)
    if problem:
        return problem
    if facts.method == "gptq":
        return _transformers_gptq(facts)
    if facts.method == "awq":
        if "no zeros" in facts.traits:
            return "no", "needs qzeros, also of symmetric weights"
        return "yes", "with gptqmodel installed"
    if facts.method == "compressed-tensors":
        if facts.config.act_order:
            return "no", "compressed-tensors refuses an actorder that regroups inputs, since 0.19"
        if "act-order" in facts.traits:
            return "no", "compressed-tensors drops weight_g_idx, since 0.19, and computes garbage"
        if any(_is_packed_asymmetric(scheme) for scheme in facts.schemes):
            # compressed-tensors 0.20 makes the parameter unpacked, [N, G], whoever wrote the file;
            # dequantize=True decodes all linears by one scheme. Seen by running and reading it.
            problem = "expects weight_zero_point in another shape than the library writes"
            if len(set(facts.schemes)) > 1:
                return "no", problem
            return (
                "slow",
                f"as float, with CompressedTensorsConfig(dequantize=True): else {problem}",
            )
        return "yes", "with compressed-tensors installed"
    return "yes", ""


@_gptq
def _transformers_gptq(facts: Facts) -> Answer:
    if "mislabelled" in facts.traits:
        return "no", "believes checkpoint_format, which is wrong"
    v1 = facts.config.zeros == "v1"
    if v1 and not facts.config.scheme.weight.symmetric and not facts.written_by_gptqmodel:
        return "no", "refuses asymmetric GPTQ with v1 zeros of unknown writers"
    return "yes", "with optimum and gptqmodel installed"


PROGRAMS: dict[str, Callable[[Facts], Answer]] = {
    "this project": _ours,
    "vLLM": _vllm,
    "SGLang": _sglang,
    "transformers": _transformers,
}


def _is_packed_asymmetric(scheme: Scheme) -> bool:
    return not scheme.weight.symmetric and scheme.activation is None


def _broken(facts: Facts) -> Answer | None:
    """Nobody loads it right; or nobody knows, since we cannot read the config."""
    if facts.first_error:
        return "no", facts.first_error
    if facts.config_error:
        return "no", f"not judged: {facts.config_error}"
    return None


def _without_activation(facts: Facts) -> Answer | None:
    """This project, vLLM and SGLang have one activation for these families."""
    found, usual = facts.choices.activation, facts.choices.usual_activation
    if found != usual:
        return "no", f"computes {usual}, not {found}"
    return None


def _mixed(facts: Facts) -> Answer | None:
    if facts.fused_mixed:
        return "no", f"loads {facts.fused_mixed} as one matrix, in one scheme"
    return None


def _fits_marlin(linear: LinearSummary) -> bool:
    N, K = linear.out_features, linear.in_features
    return (N % 64 == 0 and K % 128 == 0) or (N % 128 == 0 and K % 64 == 0)
