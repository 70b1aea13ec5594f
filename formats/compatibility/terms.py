"""Building blocks of the loading rules: programs, sources, conditions."""

from formats.codecs.config_fields import EMBEDDING
from formats.compatibility.loads_in import Facts, Rule
from formats.inspection.linear_summary import LinearSummary
from formats.quant_config import HEAD
from formats.scheme import CHANNEL, Scheme

OURS, VLLM, SGLANG, TRANSFORMERS = PROGRAMS = ("this project", "vLLM", "SGLang", "transformers")
OTHERS = (VLLM, SGLANG, TRANSFORMERS)
SERVERS = (VLLM, SGLANG)
MARLIN_GROUPS = (CHANNEL, 32, 64, 128)
SERVED_GPTQ = ((4, True), (8, True))
# folders in each program's source, for the evidence
VLLM_SOURCE = "vllm/model_executor/layers/quantization"
VLLM_COMPRESSED = f"{VLLM_SOURCE}/compressed_tensors/compressed_tensors.py"
SGLANG_SOURCE = "sglang/srt/layers/quantization"
OWN_SOURCE = "this project's own source"


def row(
    name: str, programs: tuple[str, ...] | str, answer: str, reason, evidence: str, *methods: str
) -> Rule:
    """Make a rule of one or more programs.

    `reason` takes Facts and returns "" if the rule does not apply.
    """
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
    """Make a reason that applies if a condition on the facts holds."""
    return lambda facts: reason if condition(facts) else ""


def trait(name: str, reason: str):
    """Make a reason that applies if any linear has the trait (LinearSummary)."""
    return when(lambda facts: name in facts.traits, reason)


def any_scheme(condition, reason: str):
    """Make a reason that applies if the condition holds for any scheme of the file."""
    return when(lambda facts: any(condition(scheme) for scheme in facts.schemes), reason)


def any_expert(condition, reason: str):
    """Make a reason that applies if the condition holds for any quantized linear of an expert."""

    def applies(facts: Facts) -> bool:
        names = (linear.name for linear in facts.linears if "float" not in linear.traits)
        experts = (facts.config.scheme_for(name) for name in names if ".experts." in name)
        return any(scheme is not None and condition(scheme) for scheme in experts)

    return when(applies, reason)


def gptq_bits(facts: Facts) -> str:
    """Return why servers' GPTQ kernels do not support the bits; "" if they do."""
    for spec in (scheme.weight for scheme in facts.schemes):
        if (spec.bits, spec.symmetric) not in SERVED_GPTQ:
            kind = "symmetric" if spec.symmetric else "asymmetric"
            return f"takes symmetric 4- and 8-bit GPTQ, not {spec.bits}-bit {kind}"
    return ""


def groups(text: str):
    """Make a reason that applies if Marlin kernels do not support a group size.

    The size is inserted into the text.
    """

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
    """Return a linear that is too small for Marlin's tiles; "": none."""
    for linear in facts.linears:
        if "float" not in linear.traits and not _fits_marlin(linear):
            return f"the shape of {linear.name} does not fit the fast kernel"
    return ""


def _is_packed_asymmetric(scheme: Scheme) -> bool:
    return not scheme.weight.symmetric and scheme.activation is None


def packed_asymmetric(facts: Facts) -> bool:
    """Return True if some weights are packed codes with zero points and 16-bit inputs."""
    return any(_is_packed_asymmetric(scheme) for scheme in facts.schemes)


def has_packed_embedding(facts: Facts) -> bool:
    """Return True if the input embedding is quantized."""
    return any(linear.name == EMBEDDING for linear in facts.linears)


def has_quantized_head(facts: Facts) -> bool:
    """Return True if the output head has its own codes."""
    return any(linear.name == HEAD and "float" not in linear.traits for linear in facts.linears)


def shares_packed_table(facts: Facts) -> bool:
    """Return True if one quantized matrix is both embedding and head."""
    return has_packed_embedding(facts) and facts.is_tied and not has_quantized_head(facts)


def is_w4a8(scheme: Scheme, kind: str) -> bool:
    """Return True for weights under 8 bits with 8-bit inputs of a kind, "int" or "float"."""
    activation = scheme.activation
    is_wide = activation is not None and activation.bits == 8
    return scheme.weight.bits < 8 and is_wide and activation.type == kind


SHAPE_OF_ZEROS = "expects weight_zero_point in another shape than the library writes"
LIBRARY = "compressed-tensors 0.20.0, run"
OPTIMUM = "optimum/gptq/quantizer.py of 2.3.0, transformers/quantizers/quantizer_gptq.py"


def has_other_input_groups(scheme: Scheme) -> bool:
    """Return True for float8 blocks whose inputs are rounded in groups of another length."""
    weight, inputs = scheme.weight, scheme.activation
    is_grouped = weight.rows > 1 and inputs is not None and inputs.per == "group"
    return is_grouped and inputs.group_size != weight.group_size
