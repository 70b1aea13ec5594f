"""HubName: ORG/NAME, with an optional revision and GGUF file, as users type it."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from formats.errors import InputError

# the hub's rule for both halves of a name
_HALF = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?P<repo>{_HALF}/{_HALF})(?::(?P<gguf>[^@:]+))?(?:@(?P<revision>[^@:\s]+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")
EXAMPLE = "a hub name has the form ORG/NAME, ORG/NAME@REVISION or ORG/NAME:FILE.gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A repository on the hub, its revision and its GGUF file."""

    repo: str  # ORG/NAME
    revision: str | None = None  # branch, tag or commit; None: main
    gguf: str | None = None  # a file of the repository, or a type such as Q4_K_M

    def __str__(self) -> str:
        gguf = f":{self.gguf}" if self.gguf else ""
        return self.repo + gguf + (f"@{self.revision}" if self.revision else "")

    @property
    def is_pinned(self) -> bool:
        """True if the revision is a commit, whose files never change."""
        return self.revision is not None and COMMIT.fullmatch(self.revision) is not None

    @classmethod
    def parse(cls, text: str) -> "HubName | None":
        """Parse a name; None if the text can only be a path."""
        found = _NAME.fullmatch(text)
        if found is None or "--" in found["repo"] or ".." in text:
            return None
        return cls(**found.groupdict())

    def at(self, revision: str | None) -> "HubName":
        """Return the name at a revision given by a flag.

        Raises InputError if the name has another one.
        """
        if revision is None:
            return self
        if self.revision not in (None, revision):
            raise InputError(
                "--revision", f"{revision} conflicts with {self}", "name one revision only"
            )
        return replace(self, revision=revision)


def is_local(text: str) -> bool:
    """Return True if a local path exists; it takes precedence over a hub name."""
    return Path(text).exists()


def served_name(text: str) -> str:
    """Return the name of a model for clients: ORG/NAME for a hub name, other texts unchanged."""
    name = None if is_local(text) else HubName.parse(text)
    return text if name is None else name.repo
