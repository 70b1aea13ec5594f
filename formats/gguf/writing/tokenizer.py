"""Convert tokenizer.json to the metadata of a GGUF file: the inverse of gguf/tokenizer.py.

Needs no torch.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.errors import CheckpointError
from formats.gguf.pre_tokenizers import CONTRACTIONS, GPT2, PRE_TOKENIZERS, STOPS
from formats.gguf.tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    SPECIAL_TOKENS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)
from formats.gguf.writing.container_writer import Value

FILE = "tokenizer.json"
REMEDY = "write another format"
SPELLED_OUT = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"


# An architecture, and the type of its vocabulary: SentencePiece with merges
GEMMA_4 = "gemma4"
# Special tokens of Gemma 4 that llama.cpp keeps in the text, to parse tool calls and thoughts
VISIBLE = (
    *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>'),
)


def tokenizer_metadata(folder: Path, vocab_size: int, architecture: str) -> dict[str, Any]:
    """Return the tokenizer's metadata; {} for a folder without a tokenizer.

    `architecture`: general.architecture, because llama.cpp has a tokenizer type for Gemma 4. Raises
    CheckpointError if GGUF has no name for the tokenizer.
    """
    if not (folder / FILE).is_file():
        if (folder / "tokenizer.model").is_file():
            raise CheckpointError(
                str(folder), f"has tokenizer.model but no {FILE}", "save it with transformers"
            )
        return {}
    tokenizer = json.loads((folder / FILE).read_text(encoding="utf-8"))
    stated = _read(folder / "tokenizer_config.json")
    model = tokenizer["model"]
    if model.get("type") != "BPE":
        raise _unknown(folder, f"its model is {model.get('type')!r}, not BPE")
    merges = [each if isinstance(each, list) else each.split(" ", 1) for each in model["merges"]]
    added = {each["id"]: each for each in tokenizer.get("added_tokens", [])}
    texts = _texts(model["vocab"], added, vocab_size, folder)
    types = [_type_of(i, text, added, model) for i, text in enumerate(texts)]
    special = _special_tokens(tokenizer, stated, texts)
    if architecture == GEMMA_4:
        types = [
            USER_DEFINED if text in VISIBLE else kind
            for text, kind in zip(texts, types, strict=True)
        ]
    keys: dict[str, Any] = {"tokens": texts, "token_type": Value(type="i32", value=types)}
    if model.get("byte_fallback"):
        keys |= _sentence_piece(tokenizer, texts, types, merges)
        # llama.cpp adds a first token to every text of this kind
        if architecture == GEMMA_4 and special["add_bos_token"].value:
            keys |= {"model": GEMMA_4, "merges": _joined(merges)}
    else:
        keys |= {
            "model": "gpt2",
            "pre": _pre_name(tokenizer, bool(model.get("ignore_merges")), folder),
            "merges": _joined(merges),
        }
    keys |= special
    found = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    template = _template(folder, stated)
    return found | ({"tokenizer.chat_template": template} if template else {})


def _joined(merges: list[list[str]]) -> list[str]:
    return [f"{left} {right}" for left, right in merges]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _unknown(folder: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{folder}/{FILE}", problem, REMEDY)


def _texts(
    vocab: Mapping[str, int], added: Mapping[int, dict], size: int, folder: Path
) -> list[str]:
    """Return the token text of each row of the embedding; rows without a token get a name."""
    by_id = {number: text for text, number in vocab.items()}
    by_id |= {number: each["content"] for number, each in added.items()}
    if max(by_id, default=0) >= size:
        raise _unknown(folder, f"has token {max(by_id)}, the embedding has {size} rows")
    return [by_id.get(number, f"[PAD{number}]") for number in range(size)]


def _type_of(number: int, text: str, added: Mapping[int, dict], model: Mapping[str, Any]) -> int:
    if text == model.get("unk_token") and model.get("byte_fallback"):
        return UNKNOWN
    if number in added:
        return CONTROL if added[number].get("special") else USER_DEFINED
    if text not in model["vocab"]:
        return UNUSED
    is_byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
    return BYTE if model.get("byte_fallback") and is_byte else NORMAL


def _sentence_piece(
    tokenizer: Mapping[str, Any], texts: list[str], types: list[int], merges: list[list[str]]
) -> dict[str, Any]:
    """Return the keys of a SentencePiece BPE; tokens of earlier merges get higher scores."""
    rank: dict[str, int] = {}
    for number, (left, right) in enumerate(merges):
        rank.setdefault(left + right, number)
    last = len(merges)
    scores = [
        -float(rank.get(text, last)) if kind == NORMAL else 0.0
        for text, kind in zip(texts, types, strict=True)
    ]
    normalizer = json.dumps(tokenizer.get("normalizer")) + json.dumps(tokenizer["pre_tokenizer"])
    has_prefix = '"Prepend"' in normalizer or '"prepend_scheme": "always"' in normalizer
    return {
        "model": "llama",
        "scores": Value(type="f32", value=scores),
        "add_space_prefix": Value(type="bool", value=has_prefix),
        "tokens": [
            text.replace(SPACE, " ") if kind == USER_DEFINED else text
            for text, kind in zip(texts, types, strict=True)
        ],
    }


def _splits(pre_tokenizer: Mapping[str, Any] | None) -> list[str]:
    """Return the regular expressions of a pre-tokenizer in the spelling of pre_tokenizers.py."""
    if pre_tokenizer is None:
        return []
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return [text for each in pre_tokenizer["pretokenizers"] for text in _splits(each)]
    if kind == "ByteLevel":
        return [GPT2] if pre_tokenizer.get("use_regex", True) else []
    if kind == "Digits":
        return [r"\p{N}" if pre_tokenizer.get("individual_digits") else r"\p{N}+"]
    if kind == "Split":
        text = pre_tokenizer["pattern"].get("Regex", "")
        text = text.replace(f"[{STOPS}]", STOPS)  # BLOOM writes a class within a class
        return [text.replace(SPELLED_OUT, CONTRACTIONS).replace("(?:'s|", "(?i:'s|")]
    return [f"<{kind}>"]


def _pre_name(tokenizer: Mapping[str, Any], ignore_merges: bool, folder: Path) -> str:
    splits = tuple(_splits(tokenizer.get("pre_tokenizer")))
    same = [(name, row) for name, row in PRE_TOKENIZERS.items() if name and row.splits == splits]
    exact = [name for name, row in same if row.ignore_merges == ignore_merges]
    if not same:
        raise _unknown(folder, "splits texts by a rule that has no name in GGUF")
    return exact[0] if exact else same[0][0]


def _special_tokens(
    tokenizer: Mapping[str, Any], stated: Mapping[str, Any], texts: list[str]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, key in SPECIAL_TOKENS.items():
        text = stated.get(name)
        text = text.get("content") if isinstance(text, dict) else text
        if isinstance(text, str) and text in texts:
            found[key] = Value(type="u32", value=texts.index(text))
    template = tokenizer.get("post_processor") or {}
    parts = [template, *template.get("processors", [])]
    pieces = [piece for part in parts for piece in part.get("single", [])]
    before = [p for p in pieces[: _text_at(pieces)] if "SpecialToken" in p]
    after = [p for p in pieces[_text_at(pieces) + 1 :] if "SpecialToken" in p]
    found["add_bos_token"] = Value(type="bool", value=bool(before))
    found["add_eos_token"] = Value(type="bool", value=bool(after))
    return found


def _text_at(pieces: list[dict]) -> int:
    return next((i for i, piece in enumerate(pieces) if "Sequence" in piece), 0)


def _template(folder: Path, stated: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = stated.get("chat_template")
    return found if isinstance(found, str) else ""
