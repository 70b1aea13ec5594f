"""Convert the tokenizer of a GGUF file to the files of a transformers fast tokenizer.

`gpt2` is byte-level BPE with a list of merges. `llama` is SentencePiece BPE, whose merges follow
from the scores of its tokens; `gemma4` is the same with a list of merges. Needs neither torch nor
transformers.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from formats.errors import CheckpointError
from formats.gguf.metadata import Metadata
from formats.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "▁"  # SentencePiece's character for a space
PREFIX = "tokenizer.ggml."
REMEDY = "use the model's safetensors with its tokenizer.json"
# Tokens that end an answer in addition to eos_token_id. llama.cpp also knows them by their texts.
END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>"),
    *("<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<EOT>", "<|END_OF_TURN_TOKEN|>"),
    *("<|end_of_turn|>", "[|endofturn|]", "<|user|>", "<|observation|>"),
)
SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
MAX_PIECE = 256  # longest token, in characters, for which merges are derived


class Vocabulary:
    """The tokens of the file, checked."""

    def __init__(self, metadata: Metadata) -> None:
        """Read the tokens. Raises CheckpointError if the file's lists do not match."""
        self._values, self.subject = metadata.gguf.metadata, metadata.subject
        self.kind = self.get("model")
        tokens = self.get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(each, str) for each in tokens):
            raise self.wrong("tokens", "expected a list of strings")
        self.texts = _unique(tokens)
        self.types = self._numbers("token_type", NORMAL)
        self.scores = self._numbers("scores", 0.0)
        self.ids = {text: number for number, text in enumerate(self.texts)}

    def get(self, key: str) -> Any:
        return self._values.get(PREFIX + key)

    def token(self, key: str) -> int | None:
        """Return the token id that a key states; None: it is no valid id."""
        value = self.get(key)
        return value if type(value) is int and 0 <= value < len(self.texts) else None

    def of_type(self, *kinds: int) -> list[int]:
        """Return the ids of tokens of these types."""
        return [number for number, kind in enumerate(self.types) if kind in kinds]

    def wrong(self, key: str, problem: str, remedy: str = REMEDY) -> CheckpointError:
        return CheckpointError(f"{self.subject}: {PREFIX}{key}", problem, remedy)

    def _numbers(self, key: str, default: float) -> Sequence[float]:
        values = self.get(key)
        if values is None:
            return [default] * len(self.texts)
        if isinstance(values, str | int | float) or len(values) != len(self.texts):
            raise self.wrong(key, f"expected {len(self.texts)} numbers, one for each token")
        if not all(isinstance(value, int | float) and not math.isnan(value) for value in values):
            raise self.wrong(key, "expected numbers")
        return values


def tokenizer_files(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Return the tokenizer's files by name, as JSON values or texts; {} if the file has none.

    Raises CheckpointError for an unknown tokenizer.
    """
    if f"{PREFIX}model" not in metadata.gguf.metadata:
        return {}
    if metadata.gguf.metadata[f"{PREFIX}model"] in ("none", "no_vocab"):
        return {}
    vocabulary = Vocabulary(metadata)
    if vocabulary.kind not in BUILDERS:
        raise vocabulary.wrong(
            "model", f"expected one of {', '.join(BUILDERS)}, found {vocabulary.kind!r:.40}"
        )
    built = BUILDERS[vocabulary.kind](vocabulary)
    added_ids = _added_tokens(vocabulary)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_ids,
        **built,
    }
    template = metadata.gguf.metadata.get("tokenizer.chat_template")
    stated = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    for name, key in SPECIAL_TOKENS.items():
        token = vocabulary.token(key)
        if token is not None:
            stated[name] = vocabulary.texts[token]
    files = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": stated,
        "generation_config.json": _generation_config(vocabulary),
    }
    if isinstance(template, str) and template:
        files["chat_template.jinja"] = template
    return files


def _byte_level(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the parts of tokenizer.json of a byte-level BPE."""
    pre = vocabulary.get("pre") or ""
    row = PRE_TOKENIZERS.get(pre)
    if row is None:
        raise vocabulary.wrong("pre", f"{pre!r:.40} is not known: how texts are split into words")
    splits = [
        {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False}
        for text in row.splits
    ]
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, _bytes_of_words()],
        },
        "post_processor": _ends(vocabulary, row.adds_bos) or _bytes_of_words(),
        "decoder": _bytes_of_words(),
        "model": bpe(vocabulary.ids, _listed_merges(vocabulary), ignore_merges=row.ignore_merges),
    }


def _bytes_of_words() -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }


def _sentence_piece(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the parts of tokenizer.json of a SentencePiece BPE."""
    listed = vocabulary.kind == "gemma4"
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    spaces = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    stated = vocabulary.get("add_space_prefix")
    has_prefix = stated is True if listed else stated is not False
    if has_prefix:
        before = {"type": "Prepend", "prepend": SPACE}
        normalizer = {"type": "Sequence", "normalizers": [before, replaced]}
        spaces.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    else:
        normalizer = replaced
    _respell_spaces(vocabulary)
    unknown = vocabulary.token("unknown_token_id")
    unknown = next(iter(vocabulary.of_type(UNKNOWN)), None) if unknown is None else unknown
    merges = _listed_merges(vocabulary) if listed else derived_merges(vocabulary)
    model = bpe(vocabulary.ids, merges)
    model |= {
        "unk_token": None if unknown is None else vocabulary.texts[unknown],
        "fuse_unk": True,
        "byte_fallback": bool(vocabulary.of_type(BYTE)),
    }
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "post_processor": _ends(vocabulary, adds_bos=True),
        "decoder": {"type": "Sequence", "decoders": spaces},
        "model": model,
    }


def _respell_spaces(vocabulary: Vocabulary) -> None:
    """Spell tokens that are only spaces as the normalizer does.

    Programs that write GGUF files respell the tokens that they add.
    """
    for number, text in enumerate(vocabulary.texts):
        spelled = SPACE * len(text)
        if text and not text.strip(" ") and spelled not in vocabulary.ids:
            vocabulary.texts[number] = spelled
            vocabulary.ids[spelled] = vocabulary.ids.pop(text)


BUILDERS = {"gpt2": _byte_level, "llama": _sentence_piece, "gemma4": _sentence_piece}


def bpe(
    ids: Mapping[str, int], merges: list[tuple[str, str]], *, ignore_merges: bool = False
) -> dict[str, Any]:
    """Return the model of a tokenizer.json that joins pairs of tokens."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": ids,
        "merges": merges,
    }


def _listed_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return the merges of the file whose tokens are in the vocabulary."""
    listed = vocabulary.get("merges")
    if not isinstance(listed, list):
        raise vocabulary.wrong("merges", "expected a list of pairs such as 'a b'")
    merges = []
    for text in listed:
        cut = text.find(" ", 1)  # a token may be a space
        left, right = text[:cut], text[cut + 1 :]
        known = vocabulary.ids
        if cut > 0 and left in known and right in known and left + right in known:
            merges.append((left, right))
    return merges


def derived_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return the merges that scores imply, the merge with the best-scored result first.

    Runs of spaces that the vocabulary's maker defined come before all others, because SentencePiece
    never splits them.
    """
    found = []
    for number, text in enumerate(vocabulary.texts):
        kind = vocabulary.types[number]
        is_run = kind == USER_DEFINED and not text.strip(SPACE)
        if (kind != NORMAL and not is_run) or not 1 < len(text) <= MAX_PIECE:
            continue
        rank = (0, number) if is_run else (1, -vocabulary.scores[number])
        for cut in range(1, len(text)):
            left, right = vocabulary.ids.get(text[:cut]), vocabulary.ids.get(text[cut:])
            if left is not None and right is not None:
                found.append((rank, left, right))
    found.sort()
    return [(vocabulary.texts[left], vocabulary.texts[right]) for _, left, right in found]


def _added_tokens(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Return the tokens that are never split. Control tokens are special."""
    added = []
    for number in vocabulary.of_type(UNKNOWN, CONTROL, USER_DEFINED):
        text, kind = vocabulary.texts[number], vocabulary.types[number]
        if not text or (kind == USER_DEFINED and not text.strip(SPACE)):
            continue
        added.append(
            {
                "id": number,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != USER_DEFINED,
            }
        )
    return added


def _ends(vocabulary: Vocabulary, adds_bos: bool) -> dict[str, Any] | None:
    """Return the template that adds the first and last token; None: nothing is added."""
    tokens = {}
    for place, key, default in (
        ("bos", "add_bos_token", adds_bos),
        ("eos", "add_eos_token", False),
    ):
        stated = vocabulary.get(key)
        token = vocabulary.token(f"{place}_token_id")
        if token is not None and (default if stated is None else stated is True):
            tokens[place] = token
    if not tokens:
        return None

    def sequence(name: str, number: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": name, "type_id": number}}
        ends = {
            place: [{"SpecialToken": {"id": vocabulary.texts[token], "type_id": number}}]
            for place, token in tokens.items()
        }
        return [*ends.get("bos", []), text, *ends.get("eos", [])]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": [*sequence("A", 0), *sequence("B", 1)],
        "special_tokens": {
            vocabulary.texts[token]: {
                "id": vocabulary.texts[token],
                "ids": [token],
                "tokens": [vocabulary.texts[token]],
            }
            for token in tokens.values()
        },
    }


def _generation_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return generation_config.json: the tokens that end an answer."""
    ends = [vocabulary.token(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    special = set(vocabulary.of_type(CONTROL, USER_DEFINED))
    ends += [vocabulary.ids.get(text) for text in END_TEXTS if vocabulary.ids.get(text) in special]
    if {"<|return|>", "<|call|>"} <= vocabulary.ids.keys():  # Harmony: <|end|> ends only a message
        ends = [each for each in ends if each != vocabulary.ids.get("<|end|>")]
    ends = list(dict.fromkeys(each for each in ends if each is not None))
    found = {"eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    found |= {key: vocabulary.token(key) for key in ("bos_token_id",)}
    found["pad_token_id"] = vocabulary.token("padding_token_id")
    return {key: value for key, value in found.items() if value is not None}


def _unique(tokens: list[str]) -> list[str]:
    """Return texts without repetitions: of equal texts, only the first is ever produced."""
    seen: set[str] = set()
    unique = []
    for number, text in enumerate(tokens):
        if text in seen:
            text = f"[duplicate {number} of {text}]"
        seen.add(text)
        unique.append(text)
    return unique


__all__ = ["PreTokenizer", "Vocabulary", "derived_merges", "tokenizer_files"]
