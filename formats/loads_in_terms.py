"""What the rules of who loads what are made of: programs, sources, conditions. Knows no rule."""

from formats.linear_summary import LinearSummary
from formats.loads_in import Facts, Rule
from formats.scheme import CHANNEL, Scheme

OURS, VLLM, SGLANG, TRANSFORMERS = PROGRAMS = ("this project", "vLLM", "SGLang", "transformers")
OTHERS = (VLLM, SGLANG, TRANSFORMERS)
SERVERS = (VLLM, SGLANG)
MARLIN_GROUPS = (CHANNEL, 32, 64, 128)
SERVED_GPTQ = ((4, True), (8, True))
# folders of each program's source, for the evidence
VLLM_SOURCE = "vllm/model_executor/layers/quantization"
VLLM_COMPRESSED = f"{VLLM_SOURCE}/compressed_tensors/compressed_tensors.py"
SGLANG_SOURCE = "sglang/srt/layers/quantization"
OWN_SOURCE = "this project's own source"


def row(
    name: str, programs: tuple[str, ...] | str, answer: str, reason, evidence: str, *methods: str
) -> Rule:
    """A rule of one or more programs; `reason` takes Facts and gives "" where it does not hold."""
    programs = (programs,) if isinstance(programs, str) else programs
    return Rule(
        name=name,
        programs=programs,
        answer=answer,
        reason=reason,
        evidence=evidence,
        methods=methods,
    )


def when(condition, reason: str):
    """The reason, where the condition of the facts holds."""
    return lambda facts: reason if condition(facts) else ""


def trait(name: str, reason: str):
    """The reason, where a linear has the trait (LinearSummary)."""
    return when(lambda facts: name in facts.traits, reason)


def any_scheme(condition, reason: str):
    """A rule about any scheme of the file."""
    return when(lambda facts: any(condition(scheme) for scheme in facts.schemes), reason)


def gptq_bits(facts: Facts) -> str:
    """Why GPTQ kernels of servers do not take the bits; "": they do."""
    for spec in (scheme.weight for scheme in facts.schemes):
        if (spec.bits, spec.symmetric) not in SERVED_GPTQ:
            kind = "symmetric" if spec.symmetric else "asymmetric"
            return f"takes symmetric 4- and 8-bit GPTQ, not {spec.bits}-bit {kind}"
    return ""


def groups(text: str):
    """The text, with the size in it, where Marlin's kernels do not take a group."""

    def reason(facts: Facts) -> str:
        for spec in (scheme.weight for scheme in facts.schemes):
            if spec.type == "int" and spec.group_size not in MARLIN_GROUPS:
                return text.format(spec.group_size)
        return ""

    return reason


def _fits_marlin(linear: LinearSummary) -> bool:
    N, K = linear.out_features, linear.in_features
    return (N % 64 == 0 and K % 128 == 0) or (N % 128 == 0 and K % 64 == 0)


def small_shape(facts: Facts) -> str:
    """Which linear is too small for Marlin's tiles; "": none."""
    for linear in facts.linears:
        if "float" not in linear.traits and not _fits_marlin(linear):
            return f"the shape of {linear.name} does not fit the fast kernel"
    return ""


def _is_packed_asymmetric(scheme: Scheme) -> bool:
    return not scheme.weight.symmetric and scheme.activation is None


def packed_asymmetric(facts: Facts) -> bool:
    """Whether some codes with zero points are packed, for 16-bit inputs."""
    return any(_is_packed_asymmetric(scheme) for scheme in facts.schemes)


def is_w4a8(scheme: Scheme, kind: str) -> bool:
    """Whether weights of fewer than 8 bits meet 8-bit inputs of a kind, "int" or "float"."""
    activation = scheme.activation
    return scheme.weight.bits < 8 and activation is not None and activation.type == kind


SHAPE_OF_ZEROS = "expects weight_zero_point in another shape than the library writes"
LIBRARY = "compressed-tensors 0.20.0, run"
OPTIMUM = "optimum/gptq/quantizer.py of 2.3.0, transformers/quantizers/quantizer_gptq.py"
