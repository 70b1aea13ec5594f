"""Findings of the checks of a checkpoint."""

from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Literal

from formats.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One finding. An error means that a reader fails or computes wrong results."""

    severity: Literal["error", "warning"]
    subject: str
    text: str
    remedy: str = ""
    read_here: bool = False  # an error for other readers; this project reads it correctly
    unread: bool = False  # an error for this project only; other readers may read it

    def __str__(self) -> str:
        remedy = f" ({self.remedy})" if self.remedy else ""
        return f"{self.severity}: {self.subject}: {self.text}{remedy}"


def how_many(problems: Sized) -> str:
    """Return the last line of a report: the number of problems."""
    count = len(problems)
    return f"{count or 'no'} problem{'' if count == 1 else 's'} found"


@dataclass(slots=True)
class Findings:
    """List of findings, in the order in which they were made."""

    problems: list[Problem] = field(default_factory=list)

    def error(self, subject: str, text: str, remedy: str = "", *, read_here: bool = False) -> None:
        self.problems.append(
            Problem(
                severity="error", subject=subject, text=text, remedy=remedy, read_here=read_here
            )
        )

    def warning(self, subject: str, text: str, remedy: str = "") -> None:
        self.problems.append(Problem(severity="warning", subject=subject, text=text, remedy=remedy))

    def caught(self, error: InputError, *, unread: bool = False) -> None:
        self.problems.append(
            Problem(
                severity="error",
                subject=error.subject,
                text=error.problem,
                remedy=error.remedy,
                unread=unread,
            )
        )
