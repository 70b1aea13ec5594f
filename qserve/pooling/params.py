"""PoolingParams: the pooling that a request asks for. Loads no torch."""

from dataclasses import dataclass

from qserve.errors import LEAVE_OUT, ParameterError
from qserve.params.known_fields import names_unknown_fields

# Kinds of pooling. The vector is the hidden state (after the last norm) of the last or first token,
# or the mean over all tokens.
LAST, CLS, MEAN = "last", "cls", "mean"
ALL = "all"  # one vector per token
TOKENS = "tokens"  # logits of `token_ids` after the prompt, instead of hidden states
LABELS = "labels"  # logits of a classifier's labels
KINDS = (LAST, CLS, MEAN, ALL, TOKENS, LABELS)
# Kinds that need only the last row of a prompt. The others need all rows, so they cannot use cached
# prefixes.
KINDS_OF_LAST_ROW = (LAST, TOKENS, LABELS)
KINDS_OF_LOGITS = (TOKENS, LABELS)
MAX_TOKEN_IDS = 64


@names_unknown_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How to compute vectors or logits of a prompt, without generating tokens.

    A vector is cut to its first `dimensions`, then normalized. Raises ParameterError.
    """

    kind: str | None = None  # one of KINDS; None: the model's default
    normalize: bool | None = None  # None: the model's default
    dimensions: int | None = None  # None: all
    token_ids: tuple[int, ...] = ()  # for the kind "tokens"

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in KINDS:
            raise ParameterError(
                "kind", f"expected one of {', '.join(KINDS)}, found {self.kind!r}", LEAVE_OUT
            )
        if self.dimensions is not None and (
            type(self.dimensions) is not int or self.dimensions < 1
        ):
            raise ParameterError(
                "dimensions",
                f"expected an integer of 1 or more, found {self.dimensions!r}",
                LEAVE_OUT,
            )
        object.__setattr__(self, "token_ids", tuple(self.token_ids))
        if (self.kind == TOKENS) != bool(self.token_ids):
            raise ParameterError(
                "token_ids",
                f"are required by the kind {TOKENS!r}, and only by it",
                "give both, or neither",
            )
        if len(self.token_ids) > MAX_TOKEN_IDS:
            raise ParameterError(
                "token_ids",
                f"expected at most {MAX_TOKEN_IDS}, found {len(self.token_ids)}",
                "send fewer",
            )
