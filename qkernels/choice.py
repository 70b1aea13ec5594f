"""Kernels that a caller requests or forbids: "triton", or "-sm90_small_m,-sm90_gemv_imma"."""

import functools
from dataclasses import dataclass

# Requests kernels that add in a fixed order, in every operation that has them: a row's bits do not
# depend on other rows.
FIXED_ORDER = "fixed_order"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """`only`: the requested kernel. `never`: forbidden kernels."""

    only: str | None = None
    never: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        return self.never if self.only is None else self.never | {self.only}

    def refuses(self, name: str, variants: tuple[str, ...] = ()) -> str | None:
        """Reason to skip a kernel, which may have variants; None: it may be chosen."""
        if self.only is not None and self.only not in (name, *variants):
            return f"{self.only} was asked for"
        if name in self.never or (variants and self.never.issuperset(variants)):
            return "forbidden by name"
        return None

    def explained(self, name: str, refusal: str | None, takes: str) -> str:
        """Explain a variant: why it refuses or is forbidden, or else which problems it takes."""
        if refusal is not None:
            return refusal
        if name in self.never:
            return "forbidden by name"
        return f"{takes}, and wherever it runs: it was asked for" if name == self.only else takes


@functools.cache
def parse_choice(text: str | None) -> KernelChoice:
    """Parse a requested name, or forbidden names with a leading minus, separated by commas."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    never = frozenset(name[1:] for name in names if name.startswith("-"))
    only = [name for name in names if not name.startswith("-")]
    if len(only) > 1:
        raise ValueError(f"expected one kernel to be asked for, found {', '.join(only)}")
    return KernelChoice(only=only[0] if only else None, never=never)
