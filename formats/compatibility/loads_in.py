"""Verdicts on which programs load a checkpoint, computed from a table of rules.

The rules are in rules.py, one row each. They read the results of `inspect`, not files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from formats.architecture.expert_names import ExpertNames
from formats.inspection.config import Choices
from formats.inspection.linear_summary import LinearSummary
from formats.quant_config import QuantConfig
from formats.scheme import Scheme

Answer = Literal["yes", "slow", "not judged", "no"]
# Answers by strength; the strongest answer of all rules is the verdict.
STRENGTH: tuple[Answer, ...] = ("yes", "slow", "not judged", "no")


class Verdict(NamedTuple):
    """Answer for one program, with the reason. "not judged": this project cannot read the file."""

    program: str
    answer: Answer
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts that the rules read."""

    architecture: str  # from config.json; empty: it states none, or several
    method: str  # "float" or a quant_method
    config: QuantConfig | None  # None: float or unreadable
    config_error: str  # why the config cannot be read; empty: readable
    linears: Sequence[LinearSummary]
    choices: Choices  # from config.json
    first_error: str  # first error of the checkpoint itself; empty: none
    fused_mixed: str  # a fused matrix whose members differ; empty: none
    unplaced: str  # a tensor that is not part of the model; empty: none
    desc_act: bool | None  # as a GPTQ config states it; None: not stated
    written_by_gptqmodel: bool
    second_file: str = ""  # the only file with the quantization block; empty: config.json has it
    exceptions: bool = False  # a GPTQ block has `dynamic` entries
    packing: str = ""  # from an auto-round block; else empty
    algorithms: tuple[str, ...] = ()  # from a modelopt block; else empty
    stacked: str = ""  # experts in one tensor of other codes than float8; empty: none
    renamed: ExpertNames | None = None  # an expert whose name is not the family's; None: none
    is_tied: bool = False  # config.json states that the embedding is also the head
    whole: str = ""  # architecture as stored: of the whole vision-language model

    @property
    def traits(self) -> set[str]:
        return {trait for linear in self.linears for trait in linear.traits}

    @property
    def has_quantized_experts(self) -> bool:
        return any(".experts." in each.name and "float" not in each.traits for each in self.linears)

    def mixed_experts(self, *, in_all_layers: bool = False) -> str:
        """Return a module with experts whose schemes differ, such as model.layers.0.mlp; or "".

        `in_all_layers`: experts of all layers must agree, and be quantized.
        """
        found: dict[str, set[str]] = {}
        for linear in self.linears:
            module, is_expert, _ = linear.name.partition(".experts.")
            if not is_expert:
                continue
            schemes = found.setdefault("" if in_all_layers else module, set())
            schemes.add("float" if "float" in linear.traits else linear.scheme)
            if len(schemes) > 1 or (in_all_layers and "float" in schemes):
                return module
        return ""

    @property
    def schemes(self) -> list[Scheme]:
        return [] if self.config is None else self.config.schemes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Behavior of one or more programs for some files."""

    name: str
    programs: tuple[str, ...]
    answer: Answer
    reason: Callable[[Facts], str]  # (facts) -> reason; empty: the rule does not apply
    evidence: str  # version and source file, or "run"
    methods: tuple[str, ...] = ()  # quant_methods that the rule covers; empty: all, and float

    def applies(self, program: str, facts: Facts) -> str:
        """Return the reason if the rule applies, else ""."""
        if program not in self.programs or (self.methods and facts.method not in self.methods):
            return ""
        needs_config = bool(self.methods)
        return "" if needs_config and facts.config is None else self.reason(facts)


def judge(facts: Facts, rules: Sequence[Rule], programs: Sequence[str]) -> list[Verdict]:
    """Return a verdict for each program: the strongest answer of its rules, with its first reason.

    If all answers are "yes", every remark is given.
    """
    verdicts = []
    for program in programs:
        found = [(rule.answer, rule.applies(program, facts)) for rule in rules]
        found = [(answer, reason) for answer, reason in found if reason]
        strongest = max((answer for answer, _ in found), key=STRENGTH.index, default="yes")
        reasons = [reason for answer, reason in found if answer == strongest]
        if strongest in ("no", "not judged"):
            reasons = reasons[:1]
        elif strongest == "slow":
            reasons = [*reasons[:1], *(reason for answer, reason in found if answer == "yes")]
        verdicts.append(Verdict(program, strongest, "; ".join(reasons)))
    return verdicts
