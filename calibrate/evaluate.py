"""Perplexity: how well a model predicts a text. Knows token ids and logits, not models.

Texts are each preceded by BOS and concatenated; the stream is cut into windows that do not overlap.
Each window is predicted on its own: its first token is given, the others count.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from formats.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """exp(mean negative log likelihood, in nats) over all predicted tokens."""

    value: float
    windows: int
    tokens: int  # predicted ones: windows * (sequence length - 1)
    mean_nll: float


def read_file(path: Path) -> str:
    """A text file's content, without the mark that some editors put first. Raises InputError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(str(path), error.strerror or "cannot be read") from None
    except UnicodeDecodeError as error:
        raise InputError(str(path), f"is not UTF-8 text: {error.reason}") from None


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Each line of a .jsonl file that is not blank: where it is, and its object; None: no JSON.

    Raises InputError.
    """
    # JSON may hold U+2028 and the like inside a string, which splitlines() would cut at
    for number, line in enumerate(read_file(path).split("\n"), 1):
        if line.strip():
            try:
                yield f"{path} line {number}", json.loads(line)
            except (ValueError, RecursionError):
                yield f"{path} line {number}", None


def check_text(text: str, where: str) -> str:
    """The text. Raises InputError where it holds half a character, which JSON can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(where, "has half a character, which no tokenizer takes") from None
    return text


def read_texts(path: str | Path) -> list[str]:
    """The "text" fields of a .jsonl file; any other file is one text. Raises InputError."""
    path = Path(path)
    if path.suffix != ".jsonl":
        return [read_file(path)]
    texts = []
    for where, row in read_rows(path):
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise InputError(where, 'expected a JSON object with a string "text"')
        texts.append(check_text(text, where))
    return texts


def make_windows(
    texts: Iterable[str],
    encode: Callable[[str], list[int]],
    bos_token_id: int | None,
    sequence_length: int,
    max_windows: int | None = None,
    *,
    source: str = "text",
    remedy: str = "give a longer text or a smaller --sequence-length",
) -> torch.Tensor:
    """Token ids, int64 [W, S]; what does not fill a window is dropped. Reads no text too many.

    `encode` adds no special tokens. `bos_token_id` None: the model has none. Raises InputError,
    with `source` and `remedy`, where there is not one full window.
    """
    if sequence_length < 2 or (max_windows is not None and max_windows < 1):
        raise InputError(
            "windows",
            f"expected a sequence length of 2 or more and a window or more, found length"
            f" {sequence_length} and {max_windows} windows",
        )
    ids: list[int] = []
    for text in texts:
        if bos_token_id is not None:
            ids.append(bos_token_id)
        ids.extend(encode(text))
        if max_windows is not None and len(ids) >= max_windows * sequence_length:
            break
    count = len(ids) // sequence_length
    if max_windows is not None:
        count = min(count, max_windows)
    if count == 0:
        raise InputError(
            source, f"its {len(ids)} tokens do not fill one window of {sequence_length}", remedy
        )
    return torch.tensor(ids[: count * sequence_length]).view(count, sequence_length)


def perplexity(
    windows_WS: torch.Tensor,
    logits: Callable[[torch.Tensor], torch.Tensor],
    progress: bool = True,
) -> Perplexity:
    """Predict each window. `logits`: ids [S] -> logits [S, V] for the token after each.

    Log-softmax in float32, sums in float64. Raises InputError where a likelihood is not finite.
    """
    total = 0.0
    with tqdm(windows_WS, unit="window", disable=not progress) as bar:
        for number, window_S in enumerate(bar, 1):
            logits_SV = logits(window_S)[:-1].float()
            targets_S = window_S[1:].to(logits_SV.device)
            nll_S = torch.nn.functional.cross_entropy(logits_SV, targets_S, reduction="none")
            nll = float(nll_S.double().sum())
            if not math.isfinite(nll):
                raise InputError(
                    f"window {number}",
                    "the model's logits contain NaN or infinity",
                    "look for NaN weights, or evaluate in float32",
                )
            total += nll
    tokens = windows_WS.shape[0] * (windows_WS.shape[1] - 1)
    mean = total / tokens
    return Perplexity(
        value=math.exp(mean) if mean < 700 else math.inf,
        windows=windows_WS.shape[0],
        tokens=tokens,
        mean_nll=mean,
    )
