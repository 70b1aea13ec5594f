"""A caller's choice of kernels: "triton" requests one, "-sm90_small_m,triton" also forbids one."""

import functools
from dataclasses import dataclass

# Requests the batch-invariant kernel of every operation that has one: it adds in a fixed order, so
# the bits of a row do not depend on the other rows of the batch.
FIXED_ORDER = "fixed_order"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """A caller's choice of kernels.

    `only` is the requested kernel; None: no request. `never` are the forbidden kernels.
    """

    only: str | None = None
    never: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        return self.never if self.only is None else self.never | {self.only}

    def refuses(self, name: str, variants: tuple[str, ...] = ()) -> str | None:
        """Return why the choice excludes a kernel with these variants; None: it may run."""
        if self.only is not None and self.only not in (name, *variants):
            return f"{self.only} was requested"
        if name in self.never or (variants and self.never.issuperset(variants)):
            return "forbidden by name"
        return None

    def explained(self, name: str, refusal: str | None, takes: str) -> str:
        """Say why a variant cannot run or is forbidden, or else which problems it takes."""
        if refusal is not None:
            return refusal
        if name in self.never:
            return "forbidden by name"
        return f"{takes}; requested, so used wherever it can run" if name == self.only else takes


@functools.cache
def parse_choice(text: str | None) -> KernelChoice:
    """Parse a comma-separated choice: at most one requested name; a leading minus forbids a name.

    Raises ValueError if several kernels are requested.
    """
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    never = frozenset(name[1:] for name in names if name.startswith("-"))
    only = [name for name in names if not name.startswith("-")]
    if len(only) > 1:
        raise ValueError(f"expected at most one requested kernel, found {', '.join(only)}")
    return KernelChoice(only=only[0] if only else None, never=never)
