"""Source: input of a streaming reader that needs to look ahead."""

from collections import deque

from qserve.output_parsing.reading import SPACE, BrokenCall, Reader

MAX_NAME_CHARS = 256


class Source:
    """Input of a streaming reader. Characters since the last `mark` can be read again."""

    def __init__(self) -> None:
        self._waiting: deque[str] = deque()
        self._read: list[str] = []

    def next(self) -> Reader[str]:
        char = self._waiting.popleft() if self._waiting else (yield)
        self._read.append(char)
        return char

    def after_space(self) -> Reader[str]:
        char = yield from self.next()
        while char and char in SPACE:
            char = yield from self.next()
        return char

    def until(self, end: str, stops: str = "<\n") -> Reader[str]:
        """Read a name up to the character `end`. Raises BrokenCall for an impossible name."""
        name = ""
        while (char := (yield from self.next())) != end:
            if not char or char in stops or len(name) >= MAX_NAME_CHARS:
                raise BrokenCall
            name += char
        if not name:
            raise BrokenCall
        return name

    def mark(self) -> None:
        self._read = []

    def position(self) -> int:
        """Return the number of characters read since the mark."""
        return len(self._read)

    @property
    def is_at_end(self) -> bool:
        """True if the end of the output has been read since the mark."""
        return self._read[-1:] == [""]

    def read(self, position: int = 0) -> str:
        """Return the text from a position after the mark up to the last character read."""
        return "".join(self._read[position:])

    def rewind(self, position: int = 0) -> None:
        """Go back to a position after the mark, so that the text is read again."""
        self._waiting.extendleft(reversed(list(filter(None, self._read[position:]))))
        del self._read[position:]

    def put_back(self, char: str) -> None:
        """Put back a character that was read before the mark."""
        self._waiting.appendleft(char)

    def rest(self) -> str:
        """Return the characters that were put back and not read again."""
        return "".join(self._waiting)
