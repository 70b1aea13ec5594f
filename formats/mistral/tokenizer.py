"""Files of a transformers fast tokenizer, made from tekken.json or a SentencePiece model."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from formats.gguf import tokenizer as gguf
from formats.mistral.chat_template import chat_template
from formats.mistral.sentence_piece import read_pieces
from formats.mistral.tekken import Tekken, added_token

TEKKEN = "tekken.json"
PIECES = re.compile(r"tokenizer\.model(?:\.(v\d+)(?:m\d+)?)?")
# Tokens that end an answer, start a text, and fill a batch.
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
USUAL_FILES = ("tokenizer.json", "tokenizer_config.json")


def find_tokenizer(source: Path) -> Path | None:
    """Return the tokenizer in Mistral's format; None: there is none."""
    if (source / TEKKEN).is_file():
        return source / TEKKEN
    # The last one of several is the newest version.
    found = [path for path in sorted(source.glob("tokenizer.model*")) if _version(path) is not None]
    return found[-1] if found else None


def tokenizer_files(source: Path, text: Mapping[str, Any]) -> dict[str, str | dict[str, Any]]:
    """Return the tokenizer's files by name. Raises CheckpointError.

    `text`: config.json of the text model. A folder that has transformers' files needs no others.
    """
    path = find_tokenizer(source)
    if path is None or all((source / name).is_file() for name in USUAL_FILES):
        return {}
    if path.name == TEKKEN:
        tekken = Tekken.read(path)
        tokenizer = tekken.tokenizer()
        template = chat_template(
            tekken.version, settings=tekken.settings, thinks="[THINK]" in tekken.special
        )
    else:
        version = _version(path) or "v1"
        tokenizer = _of_pieces(path, text, first_version=version == "v1")
        template = chat_template(version)
    ids = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    stated: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": text["max_position_embeddings"],
    }
    stated |= {key: token for key, token in NAMED.items() if token in ids}
    keys = {"bos_token_id": "<s>", "eos_token_id": "</s>", "pad_token_id": "<pad>"}
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": stated,
        "generation_config.json": {key: ids[each] for key, each in keys.items() if each in ids},
        "chat_template.jinja": template,
    }


def _version(path: Path) -> str | None:
    """Return the version in the name of a SentencePiece model; None: it is no such file."""
    match = PIECES.fullmatch(path.name)
    return None if match is None else match[1] or "v1"


def _of_pieces(path: Path, text: Mapping[str, Any], *, first_version: bool) -> dict[str, Any]:
    """Return tokenizer.json of a SentencePiece BPE, which is stored in GGUF files alike."""
    pieces = read_pieces(path)
    names = {piece.text: number for number, piece in enumerate(pieces)}
    values = {
        "model": "llama",
        "tokens": [piece.text for piece in pieces],
        "scores": [piece.score for piece in pieces],
        "token_type": [piece.kind for piece in pieces],
        "bos_token_id": names.get("<s>"),
        "eos_token_id": names.get("</s>"),
        "unknown_token_id": names.get("<unk>"),
    }
    metadata = {f"{gguf.PREFIX}{key}": value for key, value in values.items()}
    held = SimpleNamespace(gguf=SimpleNamespace(metadata=metadata), subject=str(path))
    tokenizer = gguf.tokenizer_files(cast(Any, held), dict(text))["tokenizer.json"]
    if not first_version:  # [INST] and others are control tokens
        known = {each["content"] for each in tokenizer["added_tokens"]}
        marks = [piece.text for piece in pieces if re.fullmatch(r"\[/?[A-Z_]+\]", piece.text)]
        tokenizer["added_tokens"] += [added_token(names[m], m) for m in marks if m not in known]
        tokenizer["added_tokens"].sort(key=lambda each: each["id"])
    return tokenizer
