"""BeamSearchParams: settings of a beam search. Loads no torch; field names follow vLLM's."""

import math
from dataclasses import dataclass
from typing import Literal

from qserve.errors import LEAVE_OUT, ParameterError
from qserve.params.known_fields import names_unknown_fields
from qserve.params.parameter_types import integer, number

MAX_BEAMS = 16
NEVER = "never"
TYPES = {
    **dict.fromkeys(("beam_width", "max_tokens", "n", "min_tokens", "logprobs"), integer),
    **dict.fromkeys(("temperature", "length_penalty"), number),
}


@names_unknown_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Width, stopping rule and outputs of a beam search. Raises ParameterError.

    The score of a beam is the sum of its tokens' log probabilities divided by
    (number of tokens) ** length_penalty. The end token counts as a token. As in transformers, a
    search ends at `max_tokens`, or once `beam_width` beams have ended and no running beam can beat
    the worst of them. `early_stopping` says when a running beam can still beat an ended one:

    - False: if the running beam's score is better now
    - "never": if the running beam's score could be better at any later length
    - True: never; the search ends as soon as `beam_width` beams have ended
    """

    beam_width: int
    max_tokens: int | None = 16  # None: up to the model's limit
    ignore_eos: bool = False
    # accepted for compatibility with vLLM, and ignored: scores use the unscaled probabilities
    temperature: float = 0.0
    length_penalty: float = 1.0  # above 0 favours long beams, below 0 short ones
    include_stop_str_in_output: bool = False  # include the end token in tokens and text
    early_stopping: bool | Literal["never"] = False
    n: int | None = None  # number of beams to return, best first; None: all
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # number of alternatives to report per token

    def __post_init__(self) -> None:
        for name, check in TYPES.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check(name, value))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        self._require("beam_width", 1 <= self.beam_width <= MAX_BEAMS, f"1 to {MAX_BEAMS}")
        self._require(
            "n",
            self.n is None or 1 <= self.n <= self.beam_width,
            f"1 to the beam width, {self.beam_width}",
        )
        self._require("length_penalty", abs(self.length_penalty) <= 100, "-100 to 100")
        self._require("temperature", math.isfinite(self.temperature), "a number")
        is_known = isinstance(self.early_stopping, bool) or self.early_stopping == NEVER
        self._require("early_stopping", is_known, f'true, false or "{NEVER}"')

    @property
    def num_returned(self) -> int:
        return self.beam_width if self.n is None else self.n

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ParameterError(
                name, f"expected {expected}, found {getattr(self, name)!r}", LEAVE_OUT
            )
