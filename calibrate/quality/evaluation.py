"""Held-out windows on which `quantize` compares the quantized model with the float one."""

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from calibrate.float_model import FloatModel
from calibrate.quality.agreement import Agreement
from calibrate.results.report import public_name
from calibrate.texts.documents import read_texts
from calibrate.texts.evaluate import make_windows, text_opening
from formats.errors import InputError

HELD_OUT = Path(__file__).parent / "held_out.jsonl"  # has no calibration texts
HELD_OUT_NAME = "held-out texts of the package"
HELD_OUT_LENGTH = 512
EVAL_WINDOWS, EVAL_LENGTH = 48, 1024  # for --eval-text
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Evaluation windows of token ids, and their source."""

    ids_WS: torch.Tensor
    text: str  # public name of the source
    given: tuple[int, ...] = ()  # token ids that are not counted

    def record(self, found: Agreement) -> dict[str, Any]:
        """Return the measured values and a description of the data."""
        digest = hashlib.sha256(self.ids_WS.contiguous().numpy().astype("<i8").tobytes())
        return {
            "text": self.text,
            "sha256": digest.hexdigest(),  # of the token ids
            "windows": found.windows,
            "sequence_length": found.sequence_length,
            "tokens": found.tokens,
            "float_perplexity": found.reference_perplexity,
            "perplexity": found.perplexity,
            "divergence": found.divergence,
            "largest_divergence": found.largest_divergence,
            "same_top_token": found.same_top_token,
        }


def read_evaluation(
    model: FloatModel, eval_text: str | None, quality_windows: int, bos: bool
) -> Evaluation | None:
    """Read windows of `eval_text`, or else `quality_windows` windows of the package's texts.

    Returns None if neither is requested, or if the model's tokenizer cannot be used on the
    package's texts. Raises InputError if `eval_text` does not fill a window.
    """
    if eval_text is not None:
        return _read(model, eval_text, public_name(eval_text), EVAL_WINDOWS, EVAL_LENGTH, bos)
    if not quality_windows:
        return None
    try:
        return _read(model, str(HELD_OUT), HELD_OUT_NAME, quality_windows, HELD_OUT_LENGTH, bos)
    except InputError as error:
        log.warning("quality is not measured: %s", error)
        return None


def _read(
    model: FloatModel, source: str, name: str, windows: int, length: int, bos: bool
) -> Evaluation:
    tokenizer = model.tokenizer()
    opening = text_opening(tokenizer) if bos else ()
    ids_WS = make_windows(
        read_texts(source),
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        tokenizer.bos_token_id,
        min(length, model.num_positions or length),
        windows,
        opening=opening,
        source=source,
        remedy="use a longer `eval_text`; the window length is fixed",
    )
    return Evaluation(ids_WS=ids_WS, text=name, given=opening)
