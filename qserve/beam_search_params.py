"""BeamSearchParams: what a beam search is told. Loads no torch; field names follow vLLM's."""

import math
from dataclasses import dataclass
from typing import Literal

from qserve.errors import ParameterError

MAX_BEAMS = 16
NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How wide to search, when to end, what to return. Raises ParameterError.

    A beam's score is the log probability of its tokens divided by their number to the power
    `length_penalty`; its end token counts. A search ends as transformers' does: at `max_tokens`, or
    once `beam_width` beams have ended and no running one can do better. `early_stopping` says what
    can do better: False, one whose score is better now; "never", one that could be better at any
    later length; True, none.
    """

    beam_width: int
    max_tokens: int | None = 16  # None: up to the model's limit
    ignore_eos: bool = False
    temperature: float = 0.0  # vLLM's field; probabilities are the model's own, whatever it is
    length_penalty: float = 1.0  # more than 0 favours long beams, less than 0 short ones
    include_stop_str_in_output: bool = False  # the end token of a beam in its tokens and text
    early_stopping: bool | Literal["never"] = False
    n: int | None = None  # beams to return, the best first; None: all
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # alternatives to report for each token

    def __post_init__(self) -> None:
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
            raise ParameterError(name, f"expected {expected}, found {getattr(self, name)!r}")
