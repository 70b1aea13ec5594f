"""Windows of token ids to train a head on: texts of a file, and the target's continuations.

A head learns to predict its target, so the target's continuations are the better training data.

Legend: W windows, S tokens of a window.
"""

import random
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from calibrate.heads.target import Target
from calibrate.texts.documents import read_documents
from calibrate.texts.evaluate import make_windows, text_opening
from calibrate.texts.excerpts import render

IDS = "ids"


def text_windows(
    source: str, target: Target, length: int, *, most: int | None = None, seed: int = 0
) -> torch.Tensor:
    """Cut windows [W, S] from a file's texts. Raises InputError."""
    documents = read_documents(source)
    random.Random(seed).shuffle(documents)
    tokenizer = target.tokenizer
    return make_windows(
        (render(document, tokenizer) for document in documents),
        lambda text: tokenizer.encode(text, add_special_tokens=False, verbose=False),
        tokenizer.bos_token_id,
        length,
        most,
        opening=text_opening(tokenizer),
        source=source,
        remedy="use a longer text or a smaller --length",
    )


def continued_windows(
    target: Target,
    texts_WS: torch.Tensor,
    count: int,
    *,
    batch: int,
    temperature: float,
    seconds: float,
    seed: int = 0,
    progress: bool = True,
) -> torch.Tensor:
    """Sample up to `count` windows [W, S]: the target continues excerpts of texts.

    The excerpt is an eighth to a half of a window. Sampling stops before the first batch that would
    exceed `seconds`, but runs at least one batch.
    """
    length, started, slowest = texts_WS.shape[1], time.monotonic(), 0.0
    draw, found = random.Random(seed), []
    with tqdm(total=count, unit="window", desc="Sampling", disable=not progress) as bar:
        while sum(map(len, found)) < count:
            left = seconds - (time.monotonic() - started)
            if found and left < slowest:
                break
            began = time.monotonic()
            given = draw.randint(length // 8, length // 2)
            begin = draw.randint(0, length - given)
            rows = torch.tensor([draw.randrange(len(texts_WS)) for _ in range(batch)])
            prompts = texts_WS[rows, begin : begin + given]
            found.append(target.continued(prompts, length, temperature=temperature).cpu())
            slowest = max(slowest, time.monotonic() - began)
            bar.update(batch)
    return torch.cat(found)[:count]


def save_windows(path: str | Path, ids_WS: torch.Tensor) -> None:
    """Save windows, to train another head of the same target on them."""
    save_file({IDS: ids_WS.to(torch.int32).contiguous()}, path)


def load_windows(path: str | Path) -> torch.Tensor:
    """Load windows that save_windows wrote, as int64."""
    return load_file(path)[IDS].long()
