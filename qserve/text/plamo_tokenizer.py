"""Tokenizer of PLaMo 2 and 3, whose files have a vocabulary (`tokenizer.jsonl`) and code.

The code is not run. Like Unigram in the library tokenizers, it searches for the split of a text
into pieces with the largest sum of scores, and spells characters that no piece contains in bytes.
If sums are equal, the code chooses the split with the longest first piece, and Unigram the one with
the longest last piece. This happens in long runs of one character.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

FILE = "tokenizer.jsonl"
UNKNOWN_SCORE = -10_000_000  # of a character that no piece has; scores are in units of 1e-4
GAP = 10  # a Unigram's score of such a character is this far below its lowest score
# keys of tokenizer_config.json -> names if it states none
SPECIAL = {f"{name}_token": f"<|plamo:{name}|>" for name in ("unk", "bos", "eos", "pad")}


def load_plamo_tokenizer(folder: Path, stated: dict[str, Any]) -> Any:
    """Load the tokenizer of a folder as a tokenizer of transformers.

    `stated`: tokenizer_config.json. Raises any exception of a file that is not valid.
    """
    from transformers import PreTrainedTokenizerFast

    with (folder / FILE).open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    special = {key: _name(stated.get(key)) or name for key, name in SPECIAL.items()}
    backend = Backend.from_str(json.dumps(_values(rows, special, stated)))
    template = stated.get("chat_template")
    if (path := folder / "chat_template.jinja").is_file():
        template = path.read_text(encoding="utf-8")
    found = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    found.chat_template = template
    return found


def _values(
    rows: list[list[Any]], special: dict[str, str], stated: dict[str, Any]
) -> dict[str, Any]:
    """Return the tokenizer as the values of a tokenizer.json."""
    ids = {piece: number for number, (piece, *_) in enumerate(rows)}
    kinds = [row[2] if len(row) > 2 else "NORMAL" for row in rows]
    vocab = [
        # text that looks like a byte is never a piece
        (piece, UNKNOWN_SCORE + GAP if kind == "BYTE" else round(score * 1e4))
        for (piece, score, *_), kind in zip(rows, kinds, strict=True)
    ]
    names = {*special.values()}
    added = [
        {
            **{"id": number, "content": piece, "special": piece in names},
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for number, ((piece, *_), kind) in enumerate(zip(rows, kinds, strict=True))
        if kind in ("CONTROL", "UNKNOWN") or piece in names
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": _splits(stated),
        "post_processor": _ends(ids, special, stated),
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "Unigram",
            "unk_id": ids[special["unk_token"]],
            "vocab": vocab,
            "byte_fallback": True,
        },
    }


def _name(token: Any) -> str | None:
    """Return the text of a token of tokenizer_config.json, which may be an object."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _splits(stated: dict[str, Any]) -> dict[str, Any] | None:
    """Return the pre-tokenizer that sets runs of characters apart; None: no piece is too long."""
    repeated, spaces = (
        stated.get(f"break_around_{name}_threshold")
        for name in ("repeated_chars", "consecutive_spaces")
    )
    patterns = [] if repeated is None else [f"(.)\\1{{{repeated - 1},}}"]
    patterns += [] if spaces is None else [f" {{{spaces},}}"]
    if not patterns:
        return None
    pattern = {"Regex": "|".join(patterns)}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def _ends(
    ids: dict[str, int], special: dict[str, str], stated: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the post-processor that adds the tokens of a text's ends; None: it has none."""
    first, last = (
        [special[f"{name}_token"]] if stated.get(f"add_{name}_token") else []
        for name in ("bos", "eos")
    )
    if not first and not last:
        return None

    def template(*texts: str) -> list[dict[str, Any]]:
        found = []
        for text in texts:
            before, after = (
                [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]
                for names in (first, last)
            )
            found += [*before, {"Sequence": {"id": text, "type_id": 0}}, *after]
        return found

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": {
            name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in {*first, *last}
        },
    }
