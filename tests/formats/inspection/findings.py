"""Findings of an inspection, in the form that tests compare."""

from formats.inspection.findings import Problem
from formats.inspection.inspect import Inspection


def problem_of(inspection: Inspection, severity: str, subject: str, text: str) -> None:
    """Exactly one finding, and this one."""
    assert len(inspection.problems) == 1, "\n".join(map(str, inspection.problems))
    (problem,) = inspection.problems
    assert problem.severity == severity
    assert subject in problem.subject
    assert text in problem.text
    assert inspection.ok == (severity == "warning")
    assert str(problem) in inspection.to_text()


def of_weights(inspection: Inspection) -> tuple[Problem, ...]:
    """Return the problems, except the missing tokenizer of folders with random weights."""
    return tuple(each for each in inspection.problems if "has no tokenizer" not in each.text)
