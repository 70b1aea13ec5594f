"""Tokenizers that transformers has loaded, recorded on disk between starts.

Importing transformers' AutoTokenizer takes 1 to 8 seconds in each process, depending on its version
and on the disk: it imports torch, and some versions text generation and torch's compiler. A record
holds what AutoTokenizer made of a folder, so a later start needs only the library tokenizers. Its
key is made from the contents of the files that transformers reads and from the versions of the
libraries. A record is written only if a tokenizer read back from it equals the original.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from formats.files.atomic_file import write_atomic

FORMAT = 1  # version of the file
MAX_BYTES = 2**28  # the largest tokenizer.json have about 35 MB
MAX_RECORDS = 32  # the oldest are deleted; one takes up to 30 MB
TOKENIZER = "tokenizer.json"
# Suffixes of the files that transformers makes a tokenizer of, or a choice by.
SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".jsonl")
TENSOR_INDEX = ".index.json"
TEMPLATES = "additional_chat_templates"
# Packages that transformers reads other files with, if they are installed.
READERS = ("sentencepiece", "tiktoken", "mistral_common")
# Members of RecordedTokenizer that equal those of PreTrainedTokenizerFast, but not of a subclass
# that defines them again.
SHARED = (
    *("added_tokens_decoder", "apply_chat_template", "convert_ids_to_tokens", "get_chat_template"),
    *("get_vocab", "__len__"),
)
# Rendered to compare a tokenizer with its record; the model's own template may never end.
TRIAL_TEMPLATE = "{{ eos_token }}{% for each in messages %}{{ each | tojson }}{% endfor %}"
TRIAL_TEXT = "A text, 12 words:\n\t<s> naïve ünïcode 🦕 \x00 </s>"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Attributes of a transformers tokenizer under their names there."""

    special_tokens_map: dict[str, str]
    all_special_tokens: list[str]
    all_special_ids: list[int | None]
    bos_token_id: int | None
    eos_token_id: int | None
    unk_token_id: int | None
    chat_template: str | dict[str, str] | None


class RecordedTokenizer:
    """A tokenizer with a state that transformers gave it. Names are those of transformers."""

    def __init__(self, backend: Backend, state: State) -> None:
        self.backend_tokenizer = backend
        for name, value in asdict(state).items():
            setattr(self, name, value)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        return [self.backend_tokenizer.id_to_token(token) for token in ids]

    @property
    def get_chat_template(self) -> Callable[..., str]:
        return self._method("get_chat_template")

    @property
    def apply_chat_template(self) -> Callable[..., Any]:
        return self._method("apply_chat_template")

    def _method(self, name: str) -> Callable[..., Any]:
        """Return transformers' own method, with this object as its `self`."""
        # Takes up to a second, without torch; needed only to render chats.
        from transformers import PreTrainedTokenizerBase

        return types.MethodType(getattr(PreTrainedTokenizerBase, name), self)


def record_path(folder: Path) -> Path | None:
    """Return the path of a folder's record; None if a file of the folder cannot be read."""
    made_by: list[Any] = [FORMAT]
    made_by += [importlib.metadata.version(name) for name in ("transformers", "tokenizers")]
    made_by += [importlib.util.find_spec(name) is not None for name in READERS]
    found = hashlib.sha256(json.dumps(made_by).encode())
    try:
        for path in sorted([*folder.iterdir(), *(folder / TEMPLATES).glob("*")]):
            if path.suffix in SUFFIXES and not path.name.endswith(TENSOR_INDEX) and path.is_file():
                # With the folder's name, by which transformers chooses some classes.
                found.update(json.dumps([str(path), _digest(path)]).encode())
    except OSError:
        return None
    # Not Path.home(), which raises for a container user without a home.
    return Path(os.path.expanduser("~/.cache/qserve/tokenizers")) / f"{found.hexdigest()[:32]}.json"


def _digest(path: Path) -> str:
    """Return the digest of a file; of a file that is too large for a tokenizer, its size and time.

    Raises OSError.
    """
    status = path.stat()
    if status.st_size > MAX_BYTES:
        return f"{status.st_size} {status.st_mtime_ns}"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_record(path: Path, folder: Path) -> RecordedTokenizer | None:
    """Return the tokenizer of a record. Returns None if the record is missing or damaged."""
    try:
        values = json.loads(path.read_bytes())
        return _tokenizer_of(values, folder)
    # The library tokenizers raises a bare Exception.
    except Exception:
        return None


def write_record(path: Path, folder: Path, tokenizer: Any) -> None:
    """Write the record of a tokenizer that transformers has loaded from a folder.

    Does nothing if the tokenizer has code of its own, if its record would not equal it, or if the
    record's folder is not writable.
    """
    # A tokenizer that cannot be stored raises any exception, even a bare Exception from Rust.
    with contextlib.suppress(Exception):
        values = _values_of(tokenizer, folder) if _is_plain(tokenizer) else None
        if values is not None:
            write_atomic(path, values)
            _delete_oldest(path.parent)


def _values_of(tokenizer: Any, folder: Path) -> str | None:
    """Return the text of a record that equals a tokenizer; None if there is none."""
    state = {name: getattr(tokenizer, name) for name in State.__slots__}
    flag = tokenizer.backend_tokenizer.encode_special_tokens
    original = _facts(tokenizer)
    # Most tokenizers are tokenizer.json itself; others take tens of megabytes.
    is_file = (folder / TOKENIZER).is_file()
    for text in (None, tokenizer.backend_tokenizer.to_str())[not is_file :]:
        values = json.dumps({"tokenizer": text, "encode_special_tokens": flag, "state": state})
        if _facts(_tokenizer_of(json.loads(values), folder)) == original:
            return values
    return None


def _tokenizer_of(values: dict[str, Any], folder: Path) -> RecordedTokenizer:
    text = values["tokenizer"]
    backend = Backend.from_file(str(folder / TOKENIZER)) if text is None else Backend.from_str(text)
    backend.encode_special_tokens = values["encode_special_tokens"]
    return RecordedTokenizer(backend, State(**values["state"]))


def _is_plain(tokenizer: Any) -> bool:
    """Return True if RecordedTokenizer has the same methods as a tokenizer's class."""
    from transformers import PreTrainedTokenizerFast

    cls = type(tokenizer)
    return issubclass(cls, PreTrainedTokenizerFast) and all(
        getattr(cls, name) is getattr(PreTrainedTokenizerFast, name) for name in SHARED
    )


def _facts(tokenizer: Any) -> list[Any]:
    """Return everything that qserve's Tokenizer reads from a tokenizer."""
    backend = tokenizer.backend_tokenizer
    messages = [{"role": "user", "content": TRIAL_TEXT}]
    return [
        *(getattr(tokenizer, name) for name in State.__slots__),
        backend.to_str(),
        backend.encode_special_tokens,
        backend.encode(TRIAL_TEXT).ids,
        {token: repr(added) for token, added in tokenizer.added_tokens_decoder.items()},
        len(tokenizer),
        tokenizer.convert_ids_to_tokens([0]),
        tokenizer.apply_chat_template(messages, chat_template=TRIAL_TEMPLATE, tokenize=False),
    ]


def _delete_oldest(folder: Path) -> None:
    records = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in records[:-MAX_RECORDS]:
        path.unlink(missing_ok=True)
