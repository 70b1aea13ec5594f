"""Which programs load a checkpoint: the verdicts that the rules of other programs add up to.

The rules stand in loads_in_rules.py, one row each. Knows what the doctor found, no files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from formats.inspect_config import Choices
from formats.linear_summary import LinearSummary
from formats.quant_config import QuantConfig
from formats.scheme import Scheme

Answer = Literal["yes", "slow", "not judged", "no"]
# The strongest that a rule gives is the verdict: a file that nobody can read is not judged further.
STRENGTH: tuple[Answer, ...] = ("yes", "slow", "not judged", "no")


class Verdict(NamedTuple):
    """`answer` for one program, and why. "not judged": this project cannot read the file."""

    program: str
    answer: Answer
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
    second_file: str = ""  # the only file that has the quantization block; empty: config.json has
    exceptions: bool = False  # a GPTQ block has `dynamic` entries
    packing: str = ""  # of an auto-round block; empty elsewhere

    @property
    def traits(self) -> set[str]:
        return {trait for linear in self.linears for trait in linear.traits}

    @property
    def schemes(self) -> list[Scheme]:
        return [] if self.config is None else self.config.schemes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What one or more programs do with some files."""

    name: str
    programs: tuple[str, ...]
    answer: Answer
    reason: Callable[[Facts], str]  # empty: the rule says nothing of this file
    evidence: str  # where it was read or seen: version, file
    methods: tuple[str, ...] = ()  # quant_methods that it is about; empty: all, and float

    def applies(self, program: str, facts: Facts) -> str:
        """The reason, where the rule says something."""
        if program not in self.programs or (self.methods and facts.method not in self.methods):
            return ""
        needs_config = bool(self.methods)
        return "" if needs_config and facts.config is None else self.reason(facts)


def judge(facts: Facts, rules: Sequence[Rule], programs: Sequence[str]) -> list[Verdict]:
    """One verdict for each program: the strongest answer of its rules, and the first such reason.

    Where all that rules say is "yes", every remark is given.
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
