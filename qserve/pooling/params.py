"""PoolingParams: vectors or scores that a request asks for. Loads no torch."""

from dataclasses import dataclass

from qserve.errors import ParameterError

# Rows of the prompt's hidden states, after the last norm, that make the vector.
LAST, CLS, MEAN = "last", "cls", "mean"
ALL = "all"  # one vector per row
TOKENS = "tokens"  # logits of `token_ids` after the prompt, instead of hidden states
LABELS = "labels"  # logits of a classifier's labels
KINDS = (LAST, CLS, MEAN, ALL, TOKENS, LABELS)
# These need only the last row of a prompt; the others need rows that the prefix cache would skip.
KINDS_OF_LAST_ROW = (LAST, TOKENS, LABELS)
KINDS_OF_LOGITS = (TOKENS, LABELS)
MAX_TOKEN_IDS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How to make vectors of a prompt. The prompt runs, but no token is generated.

    A vector is cut to its first `dimensions`, then normalized. Raises ParameterError.
    """

    kind: str | None = None  # one of KINDS; None: the model's
    normalize: bool | None = None  # None: the model's choice
    dimensions: int | None = None  # None: all
    token_ids: tuple[int, ...] = ()  # for the kind "tokens"

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in KINDS:
            raise ParameterError("kind", f"expected one of {', '.join(KINDS)}, found {self.kind!r}")
        if self.dimensions is not None and (
            type(self.dimensions) is not int or self.dimensions < 1
        ):
            raise ParameterError(
                "dimensions", f"expected a whole number from 1, found {self.dimensions!r}"
            )
        object.__setattr__(self, "token_ids", tuple(self.token_ids))
        if (self.kind == TOKENS) != bool(self.token_ids):
            raise ParameterError("token_ids", f"requires the kind {TOKENS!r}, which requires it")
        if len(self.token_ids) > MAX_TOKEN_IDS:
            raise ParameterError(
                "token_ids", f"expected at most {MAX_TOKEN_IDS}, found {len(self.token_ids)}"
            )
