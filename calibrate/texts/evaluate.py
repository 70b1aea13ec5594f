"""Perplexity of a model on a text, from token ids and logits.

Each text is preceded by BOS; texts are concatenated and cut into windows without overlap. A window
begins as the model's tokenizer begins a text: with BOS, if it adds one. Windows are predicted
independently. The first token of a window, and tokens that the tokenizer adds, are not counted; all
others are. A chat with images is a separate window.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from formats.errors import InputError
from formats.table import count_text

# Characters per token that are needed: a first guess, because only the beginning of a long text is
# encoded.
CHARS_PER_TOKEN = 4
IGNORED = -100  # target of a token that is not counted; the default of cross_entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """exp(mean negative log likelihood, in nats) over all predicted tokens."""

    value: float
    windows: int
    tokens: int  # predicted tokens: at most windows * (sequence length - 1)
    mean_nll: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """Part of a text. `begins`: it is the beginning of the text."""

    text: str
    begins: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MediaWindow:
    """A window with images. Image tokens are not counted."""

    ids_S: torch.Tensor
    is_image_S: torch.Tensor  # bool
    num_images: int
    media: tuple[Any, ...]  # media items of the images, for the model


Window = torch.Tensor | MediaWindow  # token ids [S], or a window with images


def ids_of(window: Window) -> torch.Tensor:
    """Return the token ids [S] of a window."""
    return window.ids_S if isinstance(window, MediaWindow) else window


def targets_of(window: Window, given_G: torch.Tensor) -> torch.Tensor:
    """Return the tokens [S - 1] to predict, with IGNORED for those that are not counted.

    `given_G`: token ids that are not counted.
    """
    ids_S = ids_of(window)
    targets_S = ids_S[1:].masked_fill(torch.isin(ids_S[1:], given_G), IGNORED)
    if isinstance(window, MediaWindow):
        targets_S = targets_S.masked_fill(window.is_image_S[1:], IGNORED)
    return targets_S


def text_opening(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that a tokenizer adds before a text: BOS for most models, none for some."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a", add_special_tokens=True)
    starts = range(len(whole) - len(plain) + 1)
    begin = next((i for i in starts if whole[i : i + len(plain)] == plain), 0)
    return tuple(whole[:begin])


def make_windows(
    texts: Iterable[str | Excerpt],
    encode: Callable[[str], list[int]],
    bos_token_id: int | None,
    sequence_length: int,
    max_windows: int | None = None,
    *,
    opening: Sequence[int] = (),
    source: str = "text",
    remedy: str = "use a longer text or a smaller `sequence_length`",
) -> torch.Tensor:
    """Cut texts into windows of token ids, int64 [W, S]; an incomplete window is dropped.

    Only as many texts are read as needed. `encode` must not add special tokens. A text begins with
    `opening`, or with `bos_token_id` if `opening` is empty. A window in the middle of a text also
    begins with `opening`. Raises InputError, with `source` and `remedy`, if the texts do not fill
    one window.
    """
    shortest = max(2, len(opening) + 1)
    if sequence_length < shortest or (max_windows is not None and max_windows < 1):
        raise InputError(
            "windows",
            f"expected a sequence length of {shortest} or more and a window or more, found length"
            f" {sequence_length} and {max_windows} windows",
            "use larger numbers",
        )
    before = list(opening) or ([] if bos_token_id is None else [bos_token_id])
    ids: list[int] = []
    starts: list[int] = []  # positions in `ids` where a text begins
    for text in texts:
        if isinstance(text, str):
            text = Excerpt(text=text, begins=True)
        if text.begins:
            starts.append(len(ids))
            ids.extend(before)
        most = None if max_windows is None else max_windows * sequence_length - len(ids)
        ids.extend(_encode(text.text, encode, most))
        if max_windows is not None and len(ids) >= max_windows * sequence_length:
            break
    rows = _cut(ids, frozenset(starts), list(opening), sequence_length)[:max_windows]
    if not rows:
        raise InputError(
            source,
            f"has {count_text(len(ids), 'token')}, too few for one window of {sequence_length}",
            remedy,
        )
    return torch.tensor(rows)


def _cut(
    ids: list[int], starts: frozenset[int], opening: list[int], length: int
) -> list[list[int]]:
    """Cut the ids into full windows. A window that begins inside a text begins with `opening`."""
    rows, position = [], 0
    while True:
        for back in range(1, len(opening)):
            if position - back in starts:  # between two ids of an opening: skip the rest of it
                position += len(opening) - back
                break
        first = [] if position in starts else opening
        end = position + length - len(first)
        if end > len(ids):
            return rows
        rows.append([*first, *ids[position:end]])
        position = end


def _encode(text: str, encode: Callable[[str], list[int]], most: int | None) -> list[int]:
    """Encode a text, or only about its first `most` ids: encoding 30 MB can take minutes."""
    if most is not None:
        num_chars = CHARS_PER_TOKEN * most + 1024
        while num_chars < len(text):
            ids = encode(text[:num_chars])
            # the last ids may differ from those in the whole text
            if len(ids) >= most + most // 64 + 64:
                return ids[:most]
            num_chars *= 2
    return encode(text)


def perplexity(
    windows: torch.Tensor | Sequence[Window],
    logits: Callable[[Any], torch.Tensor],
    progress: bool = True,
    given: Iterable[int] = (),
) -> Perplexity:
    """Compute the perplexity over all windows.

    `logits`: window -> logits [S, V] for the token after each position. `given`: token ids that are
    not counted, such as BOS before a text. Log-softmax is in float32, sums are in float64. Raises
    InputError if a likelihood is not finite.
    """
    total, tokens = 0.0, 0
    given_G = torch.tensor(sorted(given), dtype=torch.long)
    with tqdm(windows, unit="window", disable=not progress) as bar:
        for number, window in enumerate(bar, 1):
            logits_SV = logits(window)[:-1].float()
            targets_S = targets_of(window, given_G)
            tokens += int((targets_S != IGNORED).sum())
            targets_S = targets_S.to(logits_SV.device)
            nll_S = torch.nn.functional.cross_entropy(logits_SV, targets_S, reduction="none")
            nll = float(nll_S.double().sum())
            if not math.isfinite(nll):
                raise InputError(
                    f"window {number}",
                    "the model's logits contain NaN or infinity",
                    "look for NaN weights, or evaluate in float32",
                )
            total += nll
    mean = total / max(tokens, 1)
    return Perplexity(
        value=math.exp(mean) if mean < 700 else math.inf,
        windows=len(windows),
        tokens=tokens,
        mean_nll=mean,
    )
