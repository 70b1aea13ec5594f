"""TokenText: makes prompts of an exact number of tokens, as text if there is a tokenizer.

It uses only the package tokenizers, which loads no torch.
"""

import json
from pathlib import Path

import numpy as np

from formats.errors import CHECK_ACCESS, InputError

DEFAULT_VOCAB_SIZE = 8000
ATTEMPTS = 10  # attempts to find a text that encodes to the requested number of tokens


class TokenText:
    """Makes and measures prompts with a folder's tokenizer.

    If the folder has no tokenizer, prompts stay token ids, and each word counts as a token.
    """

    def __init__(self, folder: str | None, vocab_size: int | None = None) -> None:
        """Load the tokenizer of a folder, if there is one. Raises InputError.

        `folder` may also be the name of a remote model, which has no tokenizer here.
        """
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
            # The package raises plain Exception for unreadable files.
            raise InputError(str(file), f"cannot be read: {error}", CHECK_ACCESS) from None
        special = set(self._tokenizer.get_added_tokens_decoder())
        size = min(self._tokenizer.get_vocab_size(), vocab_size or 2**31)
        self._plain_ids = np.array([each for each in range(size) if each not in special])
        self.vocab_size = size

    def random_ids(self, count: int, random: np.random.Generator) -> list[int]:
        """Return random token ids, without control tokens if there is a tokenizer."""
        if self._plain_ids is not None:
            return self._plain_ids[random.integers(0, len(self._plain_ids), count)].tolist()
        return random.integers(0, self.vocab_size, count).tolist()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; without a tokenizer, one placeholder per word."""
        if self._tokenizer is None:
            return list(range(len(text.split())))
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def prompt(self, ids: list[int], random: np.random.Generator) -> tuple[str | list[int], int]:
        """Return a prompt, of `len(ids)` tokens if possible, and its length in tokens.

        Encoding the text of some ids can give other ids, mostly fewer. This draws the missing ones
        again, for a limited number of attempts.
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
