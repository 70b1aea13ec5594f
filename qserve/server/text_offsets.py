"""TextOffsets: where in an output's text its tokens begin, also those that share a character."""

from collections.abc import Sequence

from qserve.text import IncrementalDetokenizer, Tokenizer


class TextOffsets:
    """Takes an output's tokens one after the other.

    The bytes of one character may be several tokens: each of these begins where the character does.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens)
        self._num_chars = 0

    def take(self, token: int) -> int:
        """The characters before a token."""
        before = self._num_chars
        self._num_chars += len(self._detokenizer.push((token,)))
        return before
