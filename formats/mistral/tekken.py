"""Convert tekken.json to tokenizer.json of a byte-level BPE.

tekken.json has a rank for each token, and a pattern that splits text into words. A word's bytes are
joined pair by pair, the pair whose result has the lowest rank first; so each way to cut a token in
two is a merge of that rank. Ids are ranks above those of the special tokens.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.architecture.sizes import is_size
from formats.errors import CheckpointError
from formats.files.json_file import read_json
from formats.gguf.tokenizer import bpe

MAX_BYTES = 2**27  # published files have up to 20 MB
MAX_TOKEN = 2**10  # longest token, in bytes
# Special tokens of files before v7, which do not list them. They are ids 0 to 19.
FIRST_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
REMEDY = "copy tekken.json from the published model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tekken:
    """Content of a tekken.json, checked."""

    subject: str
    version: str  # such as v7
    pattern: str
    special: tuple[str, ...]  # texts of ids from 0 on
    tokens: tuple[bytes, ...]  # bytes of the ids after them
    settings: Mapping[str, Any]  # model_settings_builder

    @classmethod
    def read(cls, path: Path) -> "Tekken":
        """Read a file. Raises CheckpointError."""
        values, subject = read_json(path, MAX_BYTES), str(path)
        config = values.get("config")
        pattern = config.get("pattern") if isinstance(config, dict) else None
        if not isinstance(config, dict) or not isinstance(pattern, str):
            raise CheckpointError(subject, "expected a config with a pattern", REMEDY)
        special = _special(values, config, subject)
        tokens = _tokens(values, subject)
        size = config.get("default_vocab_size", len(special) + len(tokens))
        if not is_size(size) or not 0 <= size - len(special) <= len(tokens):
            raise CheckpointError(
                subject,
                f"expected a default_vocab_size of {len(special)} special and at most"
                f" {len(tokens)} other tokens, found {size!r:.40}",
                REMEDY,
            )
        settings = values.get("model_settings_builder")
        return cls(
            subject=subject,
            version=str(config.get("version", "v3")),
            pattern=pattern,
            special=special,
            tokens=tokens[: size - len(special)],
            settings=settings if isinstance(settings, dict) else {},
        )

    def tokenizer(self) -> dict[str, Any]:
        """Return tokenizer.json. A text starts with the token <s>."""
        characters = byte_characters()
        texts = ["".join(characters[byte] for byte in token) for token in self.tokens]
        first = len(self.special)
        vocabulary = {text: first + rank for rank, text in enumerate(texts)}
        vocabulary |= {text: number for number, text in enumerate(self.special)}
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        }
        words = {
            "type": "Split",
            "pattern": {"Regex": self.pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [added_token(n, text) for n, text in enumerate(self.special)],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, byte_level]},
            "post_processor": starts_with("<s>", vocabulary) or byte_level,
            "decoder": byte_level,
            # a word that is a token is never cut
            "model": bpe(vocabulary, self._merges(texts), ignore_merges=True),
        }

    def _merges(self, texts: list[str]) -> list[tuple[str, str]]:
        """Return every way to cut a token in two tokens, in the order of ranks."""
        ranks = {text: rank for rank, text in enumerate(texts)}
        found: list[tuple[str, str]] = []
        for text in texts:
            cuts = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
            pairs = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
            found += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        return found


def byte_characters() -> tuple[str, ...]:
    """Return the character of each byte in the vocabulary of a byte-level BPE, as in GPT-2.

    Printable bytes of Latin-1 are themselves; the others are characters from 256 on, in order.
    """
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    found, others = [], 256
    for byte in range(256):
        found.append(chr(byte if byte in shown else others))
        others += byte not in shown
    return tuple(found)


def added_token(number: int, text: str) -> dict[str, Any]:
    """Return the entry of a special token in tokenizer.json."""
    return {
        "id": number,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def starts_with(text: str, vocabulary: Mapping[str, int]) -> dict[str, Any] | None:
    """Return the post-processor that writes a token before each text; None: it is unknown."""
    if text not in vocabulary:
        return None
    token = {"id": text, "ids": [vocabulary[text]], "tokens": [text]}

    def sequence(name: str, kind: int) -> list[dict[str, Any]]:
        first = {"SpecialToken": {"id": text, "type_id": kind}}
        return [first, {"Sequence": {"id": name, "type_id": kind}}]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": [*sequence("A", 0), *sequence("B", 1)],
        "special_tokens": {text: token},
    }


def _special(values: Mapping[str, Any], config: Mapping[str, Any], subject: str) -> tuple[str, ...]:
    """Return the special tokens, with those that only fill the ids up to the others."""
    listed = values.get("special_tokens")
    if listed is None:
        texts = list(FIRST_SPECIAL)
    else:
        wrong = CheckpointError(
            subject, "expected special_tokens with ranks from 0 on and a token_str each", REMEDY
        )
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            raise wrong
        named = {each.get("rank"): each.get("token_str") for each in listed}
        if set(named) != set(range(len(listed))):
            raise wrong
        texts = [named[rank] for rank in range(len(listed))]
        if not all(isinstance(text, str) and text for text in texts):
            raise wrong
    count = config.get("default_num_special_tokens", len(texts))
    if type(count) is not int or not len(texts) <= count <= 2**20:
        raise CheckpointError(
            subject, f"expected {len(texts)} special tokens or more, found {count!r:.40}", REMEDY
        )
    return (*texts, *(f"<SPECIAL_{number}>" for number in range(len(texts), count)))


def _tokens(values: Mapping[str, Any], subject: str) -> tuple[bytes, ...]:
    listed = values.get("vocab")
    wrong = CheckpointError(
        subject, "expected a vocab with the token_bytes of each rank, in order", REMEDY
    )
    if not isinstance(listed, list):
        raise wrong
    found = []
    for rank, each in enumerate(listed):
        text = each.get("token_bytes") if isinstance(each, dict) else None
        if not isinstance(text, str) or each.get("rank", rank) != rank:
            raise wrong
        try:
            token = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise wrong from None
        if not 0 < len(token) <= MAX_TOKEN:
            raise wrong
        found.append(token)
    if len(set(found)) != len(found):
        raise CheckpointError(subject, "two tokens of its vocab have the same bytes", REMEDY)
    return tuple(found)
