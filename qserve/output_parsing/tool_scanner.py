"""ToolScanner: splits text into content and tool calls as it arrives."""

from collections.abc import Mapping
from typing import Any

from qserve.output_parsing.calls import Calls
from qserve.output_parsing.pieces import ARGUMENTS, NAME, Piece, merged
from qserve.output_parsing.reading import BrokenCall, Reader
from qserve.output_parsing.tool_format import ToolFormat

# Limit on the characters of one output that are read again, to find calls inside broken calls.
MAX_READ_AGAIN = 2**20


class ToolScanner:
    """Scanner of one output. Holds back only text that may start a call, and white space before."""

    def __init__(
        self,
        tool_format: ToolFormat,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        is_forced: bool = False,
    ) -> None:
        """Start a scanner.

        tools: tool name -> JSON schema of its arguments
        is_forced: a grammar enforces calls, so an incomplete call is cut off, not content
        """
        self._format = tool_format
        self._calls = Calls(tools)
        self._is_forced = is_forced
        self._reader: Reader[str] | None = None
        self._held = ""  # text that may start a marker
        self._spaces: list[str] = []  # white space that is dropped if a call follows
        self._is_start = bool(tool_format.starts)  # True where calls may start without a marker
        self._is_behind = False  # True after a call, until other text than closing texts follows
        self._is_inside = False  # True until the last call's outer opening text is closed
        self._is_cut = False
        self._num_read_again = 0

    @property
    def num_calls(self) -> int:
        """Number of calls found so far, including an incomplete one."""
        return self._calls.count + self._calls.is_open

    def push(self, text: str) -> list[Piece]:
        """Add text. Returns the pieces that are now known."""
        at = 0
        while at < len(text):
            if self._reader is None and not self._held and not self._is_start:
                # Skip to the next character that may start a marker.
                match = self._format.stops.search(text, at)
                end = len(text) if match is None else match.start()
                self._show(text[at:end])
                at = end
                if at == len(text):
                    break
            self._take(text[at])
            at += 1
        return self._taken()

    def finish(self, is_cut: bool = False) -> list[Piece]:
        """Return the remaining pieces, after the last text.

        `is_cut`: the output ended at its token limit. Then an incomplete call, or text that may
        start another call, is not content.
        """
        self._is_cut = is_cut
        while self._reader is not None:
            self._advance("")
        held, self._held = self._held, ""
        # The output may end inside a closing text.
        is_end = self._is_behind and any(end.startswith(held) for end in self._format.ends)
        if not (is_end or (self._is_cut and self._calls.count)):
            self._show(held)
        if not self._calls.count:
            self._calls.content("".join(self._spaces))
        self._spaces = []
        return self._taken()

    def _taken(self) -> list[Piece]:
        pieces, self._calls.pieces = self._calls.pieces, []
        return merged(pieces)

    def _take(self, char: str) -> None:
        if self._reader is None:
            self._look(char)
        else:
            self._calls.raw.append(char)
            self._advance(char)

    def _look(self, char: str) -> None:
        """Process one character outside of calls."""
        form = self._format
        if char == "\n" and self._calls.count and form.starts:
            self._is_start = True
        elif self._is_start and not char.isspace():
            self._is_start = False
            if char in form.starts:
                self._begin(char)
                return
        self._held += char
        while self._held:
            if self._held in form.markers:
                marker, self._held = self._held, ""
                self._begin(marker)
                return
            if self._is_behind and self._held in form.ends:
                self._is_inside &= self._held != form.ends[-1]
                self._held, self._spaces = "", []
                return
            ends = form.ends if self._is_behind else ()
            if any(text.startswith(self._held) for text in (*form.markers, *ends)):
                return
            first, self._held = self._held[0], self._held[1:]
            self._show(first)

    def _show(self, text: str) -> None:
        shown = text.rstrip()
        if shown:
            self._calls.content("".join((*self._spaces, shown)))
            self._spaces, self._is_behind = [], False
        if len(shown) < len(text):
            self._spaces.append(text[len(shown) :])

    def _begin(self, marker: str) -> None:
        form = self._format
        is_outer = form.is_outer(marker)
        self._calls.raw = [*self._spaces, marker]
        self._spaces = []
        self._calls.only_known = form.is_bare or not (is_outer or self._is_inside)
        self._is_inside |= is_outer and len(form.opens) > 1
        self._is_behind = False
        self._reader = form.read(self._calls, marker)
        next(self._reader)

    def _advance(self, char: str) -> None:
        num_calls = self._calls.count
        try:
            self._reader.send(char)
        except StopIteration as stop:
            self._reader = None
            self._calls.raw = []
            self._is_behind = True
            rest = stop.value
        except BrokenCall:
            self._reader = None
            self._is_inside &= num_calls > 0
            rest = self._broken("".join(self._calls.raw).removesuffix(char), char)
        else:
            return
        for each in rest:
            self._take(each)

    def _broken(self, raw: str, char: str) -> str:
        """Give up a call with the text `raw` that broke at `char`. Returns the text to read again.

        The character may start the next call. If the broken call has an unclosed string that
        contains the start of the next call, reading continues at that start.
        """
        is_end = not char
        is_cut = self._is_cut and (self._calls.is_open or self._calls.count)
        if is_end and (self._is_forced or is_cut):
            self._calls.raw = []
            return ""
        found = self._next_call(raw, char)
        if found is None:
            self._calls.give_up(raw)
            return char
        start, marker = found
        text = raw[:start].rstrip()
        self._calls.give_up(text)
        self._spaces = [raw[len(text) : start]]
        self._begin(marker)
        return raw[start + len(marker) :] + char

    def _next_call(self, raw: str, char: str) -> tuple[int, str] | None:
        """Return the start of the next call in a broken call's text, and its marker."""
        pattern = self._format.next_call
        if pattern is None:
            return None
        own = len(raw) - len(raw.lstrip())  # start of the broken call itself
        for match in pattern.finditer(raw, own + 1):
            if self._num_read_again > MAX_READ_AGAIN:
                return None
            if self._is_call(match[match.lastindex], raw[match.end(match.lastindex) :], char):
                return match.start(match.lastindex), match[match.lastindex]
        return None

    def _is_call(self, marker: str, text: str, char: str) -> bool:
        """Return True if the text and `char` can be read as the start of calls.

        At the end of the output (`char` is "") the calls must be complete.
        """
        calls = Calls(self._calls.tools, only_known=self._calls.only_known)
        reader = self._format.read(calls, marker)
        next(reader)
        num_read = 0
        try:
            for each in (*text, char):
                reader.send(each)
                num_read += 1
            while not char:
                reader.send("")
        except BrokenCall:
            return False
        except StopIteration:
            return calls.count > 0
        finally:
            self._num_read_again += num_read
        return True


class NamedCall:
    """Scanner for text that is the arguments of one known tool."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[Piece]:
        """Add text. The first text also emits the tool's name."""
        if not text:
            return []
        opening = [] if self._name is None else [Piece(NAME, self._name)]
        self._name = None
        return [*opening, Piece(ARGUMENTS, text)]

    def finish(self, is_cut: bool = False) -> list[Piece]:
        return []
