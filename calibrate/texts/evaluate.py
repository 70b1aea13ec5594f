"""Perplexity: how well a model predicts a text, from token ids and logits.

Texts are each preceded by BOS and concatenated; the stream is cut into windows without overlap.
Each window begins as the model's tokenizer begins a text: with BOS, if it adds one. Each window is
predicted independently: its first token and the tokenizer's own additions are given, the others
count. A chat with images is a window of its own.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from formats.errors import InputError

# Characters per token that are encoded at first: only the beginning of a long text is needed.
CHARS_PER_TOKEN = 4
IGNORED = -100  # target of a token that does not count; cross_entropy's default


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """exp(mean negative log likelihood, in nats) over all predicted tokens."""

    value: float
    windows: int
    tokens: int  # predicted tokens: at most windows * (sequence length - 1)
    mean_nll: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """Part of a text, perhaps its beginning."""

    text: str
    begins: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MediaWindow:
    """A window with images. Their tokens are given; the others count."""

    ids_S: torch.Tensor
    is_image_S: torch.Tensor  # bool
    num_images: int
    media: tuple[Any, ...]  # of these images, for the model that predicts the window


Window = torch.Tensor | MediaWindow  # ids [S] of a text, or with images


def ids_of(window: Window) -> torch.Tensor:
    """Return the token ids [S] of a window."""
    return window.ids_S if isinstance(window, MediaWindow) else window


def targets_of(window: Window, given_G: torch.Tensor) -> torch.Tensor:
    """Return the tokens [S - 1] after the first one; IGNORED for those that do not count."""
    ids_S = ids_of(window)
    targets_S = ids_S[1:].masked_fill(torch.isin(ids_S[1:], given_G), IGNORED)
    if isinstance(window, MediaWindow):
        targets_S = targets_S.masked_fill(window.is_image_S[1:], IGNORED)
    return targets_S


def text_opening(tokenizer: Any) -> tuple[int, ...]:
    """Ids that a tokenizer adds before a text: BOS for most models, none for some."""
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
    """Token ids, int64 [W, S]; an incomplete window is dropped. Reads no more texts than needed.

    `encode` adds no special tokens. A text begins with `opening`, or with `bos_token_id` if that is
    empty and the model has one. A window in the middle of a text begins with `opening`, too.
    Raises InputError, with `source` and `remedy`, if there is not one full window.
    """
    shortest = max(2, len(opening) + 1)
    if sequence_length < shortest or (max_windows is not None and max_windows < 1):
        raise InputError(
            "windows",
            f"expected a sequence length of {shortest} or more and a window or more, found length"
            f" {sequence_length} and {max_windows} windows",
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
            source, f"its {len(ids)} tokens do not fill one window of {sequence_length}", remedy
        )
    return torch.tensor(rows)


def _cut(
    ids: list[int], starts: frozenset[int], opening: list[int], length: int
) -> list[list[int]]:
    """Full windows of the stream; one that begins inside a text begins with `opening`."""
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
    """Ids of a text, at least the first `most`: a line of 30 MB takes minutes to encode."""
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
    """Predict each window. `logits`: a window -> logits [S, V] for the token after each.

    `given` are token ids that do not count, such as BOS before a text. Log-softmax in float32, sums
    in float64. Raises InputError if a likelihood is not finite.
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
