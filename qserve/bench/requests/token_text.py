"""TokenText: prompts of an exact number of tokens, as text if a tokenizer is available.

Uses only the tokenizers library, which loads no torch.
"""

import json
from pathlib import Path

import numpy as np

from formats.errors import InputError

DEFAULT_VOCAB_SIZE = 8000
ATTEMPTS = 10  # attempts to find a text that encodes to the requested number of tokens


class TokenText:
    """Tokenizer of a folder, or none: then prompts stay token ids, and words count as tokens."""

    def __init__(self, folder: str | None, vocab_size: int | None = None) -> None:
        """`folder` need not exist: it may be the name of a remote model. Raises InputError."""
        self._tokenizer, self._plain_ids = None, None
        self.vocab_size = vocab_size or DEFAULT_VOCAB_SIZE
        path = None if folder is None else Path(folder)
        if path is None or not path.is_dir():
            return
        config = path / "config.json"
        if vocab_size is None and config.is_file():
            self.vocab_size = int(json.loads(config.read_text()).get("vocab_size", 0)) or (
                DEFAULT_VOCAB_SIZE
            )
        file = path / "tokenizer.json"
        if not file.is_file():
            return
        try:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:
            # The library raises plain Exception for unreadable files.
            raise InputError(str(file), f"cannot be read: {error}") from None
        special = set(self._tokenizer.get_added_tokens_decoder())
        size = min(self._tokenizer.get_vocab_size(), vocab_size or 2**31)
        self._plain_ids = np.array([each for each in range(size) if each not in special])
        self.vocab_size = size

    def random_ids(self, count: int, random: np.random.Generator) -> list[int]:
        """Random token ids, without control tokens as far as these are known."""
        if self._plain_ids is not None:
            return self._plain_ids[random.integers(0, len(self._plain_ids), count)].tolist()
        return random.integers(0, self.vocab_size, count).tolist()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; without a tokenizer one placeholder per word."""
        if self._tokenizer is None:
            return list(range(len(text.split())))
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def prompt(self, ids: list[int], random: np.random.Generator) -> tuple[str | list[int], int]:
        """A prompt that encodes to `len(ids)` tokens if possible, and its length.

        Decoding ids and encoding the text gives different ids, mostly fewer; the missing ones are
        drawn again.
        """
        if self._tokenizer is None:
            return ids, len(ids)
        want, text = len(ids), ""
        for _ in range(ATTEMPTS):
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            ids = self.encode(text)
            if len(ids) == want:
                break
            ids = ids[:want] + self.random_ids(max(0, want - len(ids)), random)
        return text, len(self.encode(text))
