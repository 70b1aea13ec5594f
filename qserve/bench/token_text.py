"""TokenText: prompts of an exact number of tokens, as text where a tokenizer is at hand.

Uses the tokenizers library alone, which loads no torch.
"""

import json
from pathlib import Path

import numpy as np

from formats.errors import InputError

DEFAULT_VOCAB_SIZE = 8000
ATTEMPTS = 10  # to find a text that encodes to as many tokens as were asked for


class TokenText:
    """A folder's tokenizer, or none: then prompts stay token ids, and words stand for tokens."""

    def __init__(self, folder: str | None, vocab_size: int | None = None) -> None:
        """`folder` need not exist: it may be the name of a model elsewhere. Raises InputError."""
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
            # The library raises plain Exception for a file it cannot read.
            raise InputError(str(file), f"cannot be read: {error}") from None
        special = set(self._tokenizer.get_added_tokens_decoder())
        size = min(self._tokenizer.get_vocab_size(), vocab_size or 2**31)
        self._plain_ids = np.array([each for each in range(size) if each not in special])
        self.vocab_size = size

    def random_ids(self, count: int, random: np.random.Generator) -> list[int]:
        """Token ids that are no control tokens, as far as that is known."""
        if self._plain_ids is not None:
            return self._plain_ids[random.integers(0, len(self._plain_ids), count)].tolist()
        return random.integers(0, self.vocab_size, count).tolist()

    def encode(self, text: str) -> list[int]:
        """Token ids; without a tokenizer, a stand-in for each word."""
        if self._tokenizer is None:
            return list(range(len(text.split())))
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def prompt(self, ids: list[int], random: np.random.Generator) -> tuple[str | list[int], int]:
        """A prompt that encodes to as many tokens as `ids`, where that can be had; its length.

        Decoding ids and encoding the text gives other ids, and mostly fewer: what is missing is
        drawn anew.
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
