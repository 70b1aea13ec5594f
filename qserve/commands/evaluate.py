"""`qserve eval`: measure perplexity on texts and chats, and the KL divergence from another model.

Texts are joined and cut into windows. A chat with images is a separate window, in which image
tokens are not counted. Loads torch only when it computes.
"""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.errors import InputError
from formats.table import count_text
from qserve.command_line.command import Command
from qserve.command_line.tool_config import EvalConfig
from qserve.config import EngineConfig

if TYPE_CHECKING:
    import torch

    from calibrate.texts.evaluate import Window
    from qserve.llm import LLM
    from qserve.text.tokenizer import Tokenizer


def evaluate(model: str, engine: EngineConfig, config: EvalConfig) -> int:
    from calibrate.quality.agreement import compare_logits
    from calibrate.quality.table import agreement_table
    from calibrate.texts.evaluate import perplexity, text_opening
    from formats.hub.fetch import local_path
    from qserve.hub.local import local_config
    from qserve.llm import LLM
    from qserve.text.tokenizer import Tokenizer

    # Check as much as possible before the model loads, which may take minutes.
    documents, engine = _documents(config.text), local_config(engine)
    engines, tokenizers = [engine], [Tokenizer(engine.model, engine.tokenizer)]
    if config.against is not None:
        other = local_path(config.against, download_dir=engine.download_dir)
        engine = _for_windows(engine, config.sequence_length)
        engines = [dataclasses.replace(engine, model=other, tokenizer=None), engine]
        tokenizers.insert(0, Tokenizer(other))
    openings = [text_opening(each) if config.bos else () for each in tokenizers]
    windows, *others = (
        _windows(documents, tokenizer, opening, each.model, config)
        for each, tokenizer, opening in zip(engines, tokenizers, openings, strict=True)
    )
    if any(not _are_equal(windows, other) for other in others):
        raise InputError(
            config.against,
            f"its tokenizer or its image processor gives other token ids than that of {model}",
            "compare models with the same tokenizer",
        )
    llms = [LLM(**dataclasses.asdict(each)) for each in engines]
    longest = min(llm.engine.max_model_len for llm in llms)
    if config.sequence_length > longest:
        raise InputError(
            "--sequence-length",
            f"expected at most {longest}, the model's maximum length,"
            f" found {config.sequence_length}",
            f"use --sequence-length {longest}",
        )
    runs = [lambda window, llm=llm: _logits(llm, window) for llm in llms]
    shown: dict[str, Any] = {"model": model, "text": config.text}
    if num_images := sum(getattr(each, "num_images", 0) for each in windows):
        shown["images"] = num_images
    if config.against is None:
        result = perplexity(windows, *runs, given=openings[0])
        text = (
            f"perplexity {result.value:.4f} on {count_text(result.windows, 'window')}"
            f" of {'at most ' * bool(num_images)}{config.sequence_length} tokens"
        )
    else:
        sizes = [llm.engine.model_config.vocab_size for llm in llms]
        if sizes[0] != sizes[1]:
            raise InputError(
                config.against, f"has {sizes[0]} tokens, {model} has {sizes[1]}", "compare others"
            )
        result = compare_logits(windows, *runs, given=openings[0])
        shown["against"] = config.against
        text = agreement_table(result, config.against, model, config.text)
    print(json.dumps({**shown, **dataclasses.asdict(result)}) if config.json else text)
    return 0


def _documents(source: str) -> list[Any]:
    """Return the texts of a file, and its chats if one has images. Raises InputError."""
    from calibrate.texts.documents import read_file, read_texts
    from calibrate.texts.image_windows import has_images

    documents = read_file(source)
    return documents if any(map(has_images, documents)) else list(read_texts(source))


def _windows(
    documents: list[Any],
    tokenizer: "Tokenizer",
    opening: tuple[int, ...],
    folder: str,
    config: EvalConfig,
) -> "list[Window]":
    """Return one window per chat, then the windows of all texts. Raises InputError."""
    from calibrate.texts.evaluate import make_windows

    texts = [each for each in documents if isinstance(each, str)]
    chats = [each for each in documents if not isinstance(each, str)]
    found = _chat_windows(chats, folder, config) if chats else []
    count = None if config.windows is None else config.windows - len(found)
    if (texts and count != 0) or not found:  # raises InputError if there is no window
        found += make_windows(
            texts,
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            tokenizer.bos_token_id,
            config.sequence_length,
            count,
            opening=opening,
            source=config.text,
        )
    return found


def _chat_windows(chats: list[Any], folder: str, config: EvalConfig) -> "list[Window]":
    """Return one window per chat; long chats are cut after the last image. Raises InputError."""
    import torch

    from calibrate.texts.evaluate import MediaWindow
    from qserve.multimodal.calibration import CalibrationChats

    reader, base = CalibrationChats(folder), Path(config.text).absolute().parent
    found: list[Window] = []
    for number, chat in enumerate(chats, 1):
        if len(found) == config.windows:
            break
        read = reader.read(chat, base)
        end = max((item.end for item in read.media), default=0)
        if end > config.sequence_length:
            raise InputError(
                f"{config.text} chat {number}",
                f"its last image ends at token {end}; a window has {config.sequence_length}",
                "raise --sequence-length, or give smaller images",
            )
        ids_S = torch.tensor(read.ids[: config.sequence_length])
        is_image_S = torch.zeros(len(ids_S), dtype=torch.bool)
        for item in read.media:
            is_image_S[item.offset : item.end] = True
        found.append(
            MediaWindow(
                ids_S=ids_S,
                is_image_S=is_image_S,
                num_images=len(read.images),
                media=read.media,
            )
        )
    return found


def _are_equal(windows: "list[Window]", others: "list[Window]") -> bool:
    from calibrate.texts.evaluate import ids_of

    return len(windows) == len(others) and all(
        ids_of(a).equal(ids_of(b)) and getattr(a, "media", ()) == getattr(b, "media", ())
        for a, b in zip(windows, others, strict=True)
    )


def _logits(llm: "LLM", window: "Window") -> "torch.Tensor":
    from calibrate.texts.evaluate import ids_of

    return llm.logits(ids_of(window).tolist(), getattr(window, "media", ()))


def _for_windows(engine: EngineConfig, length: int) -> EngineConfig:
    """Return engine settings for one window at a time, with little memory besides the weights."""
    longest = length if engine.max_model_len is None else min(length, engine.max_model_len)
    return dataclasses.replace(
        engine,
        max_model_len=longest,
        max_num_seqs=1,
        num_gpu_blocks_override=-(-longest // engine.block_size) + 1,
        enforce_eager=True,
    )


EVAL = Command(
    help="measure perplexity on texts or chats with images, and KL divergence from another model",
    settings=(EngineConfig, EvalConfig),
    run=evaluate,
)
