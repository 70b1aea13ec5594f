"""Reader of calls with arguments as bare text in tags. The tool's schema determines the types.

<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>

A value may contain any text, including tags. So an end tag ends a value only if a tag follows that
may follow a value; otherwise the end tag is text. If the end tag is misspelt or missing, the value
ends where the call is clearly over, so that it does not include the next call.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from qserve.output_parsing.calls import Calls
from qserve.output_parsing.notations.argument_schema import ArgumentSchema
from qserve.output_parsing.notations.bare_value import from_json, typed
from qserve.output_parsing.notations.source import MAX_NAME_CHARS, Source
from qserve.output_parsing.reading import SPACE, BrokenCall, Emit, Reader, json_escaped
from qserve.output_parsing.tool_format import Start

CALL, FUNCTION, PARAMETER = "call", "function", "parameter"
VALUE_END, FUNCTION_END, CALL_END = "value end", "function end", "call end"
AFTER_VALUE = (PARAMETER, FUNCTION, CALL, FUNCTION_END, CALL_END)
END_OF_TEXT = ""
MAX_TAG_CHARS = 48
MISSPELT = 4  # characters of an end tag that must be right if the tag is misspelt
# The inside of an opening tag: a name with or without quotes, and DeepSeek's type of the value.
NAMED = re.compile(
    r"""\s*(?:"([^"]*)"|'([^']*)'|([^"'\s][^"']*?))\s*(?:string="?(true|false)"?)?\s*"""
)


@dataclass(frozen=True, kw_only=True)
class Tags:
    """Texts of a format's tags. The text of an opening tag ends before the name in the tag."""

    call: str  # starts a call
    call_end: str
    function: str = ""  # before the tool's name; "": the name follows `call`
    function_end: str = ""
    parameter: str  # before the argument's name
    key_end: str = ""  # after the argument's name; "": ">"
    value: str = ""  # before the value, after `key_end`
    value_end: str
    trims: bool = False  # True: one line break on each side is not part of the value
    # How the chat template writes calls:
    quote: str = ""  # quotes around names in tags
    has_types: bool = False  # True: an attribute says if the value is a string
    is_spaced: bool = False  # True: line breaks between the tags

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Text of a tag -> kind of the tag."""
        found = {self.call: CALL, self.call_end: CALL_END, self.parameter: PARAMETER}
        found |= {self.function: FUNCTION, self.function_end: FUNCTION_END}
        found[self.value_end] = VALUE_END
        return {text: kind for text, kind in found.items() if text}

    @cached_property
    def misspelt(self) -> dict[str, str]:
        """Start of an end tag -> kind of the tag. Models misspell or omit the rest of the tag."""
        ends = (self.value_end, self.function_end, self.call_end)
        starts = {_start_of(tag): tag for tag in ends if tag[:2] == "</"}
        return {start: self.kinds[tag] for start, tag in starts.items()}

    def may_begin(self, text: str) -> bool:
        """Return True if a text may start a tag."""
        return any(tag.startswith(text) for tag in self.kinds)

    @cached_property
    def reserved(self) -> tuple[str, ...]:
        """Texts that end a value, or that a reader could take for its end."""
        return (*self.misspelt, *(tag for tag in self.kinds if tag[:2] != "</"))

    def read(self, calls: Calls, start: Start) -> Reader[str]:
        """Read one call, starting with the tool's name."""
        source = Source()
        source.put_back(start.char)
        reader = TagReader(self, source)
        name = yield from reader.name()
        calls.check(name)
        values = Values(reader, calls, ArgumentSchema(calls.tools.get(name)))
        calls.name(name)
        while True:
            source.mark()
            tag = yield from reader.next_tag()
            if tag != PARAMETER:
                break
            yield from values.read(*(yield from reader.key()))
        if tag not in AFTER_VALUE:
            raise BrokenCall
        calls.arguments("}" if values.keys else "{}")
        calls.end()
        if tag == FUNCTION_END:
            source.mark()
            tag = yield from reader.next_tag()
        if tag not in (CALL_END, END_OF_TEXT):
            source.rewind()
        rest = source.rest()
        # The output may end inside the end tag.
        return "" if self.call_end.startswith(rest.strip()) else rest


class TagReader:
    """Reads tags from a source."""

    def __init__(self, tags: Tags, source: Source) -> None:
        self.tags, self.source = tags, source

    def name(self) -> Reader[str]:
        """Read the tool's name."""
        if self.tags.function:
            return (yield from self._named())[0]
        name = ""
        while (char := (yield from self.source.next())) and char not in "<\n":
            name += char
            if len(name) > MAX_NAME_CHARS:
                raise BrokenCall
        self.source.rewind(self.source.position() - len(char))
        name = name.strip()
        if not char or any(each in name for each in SPACE):
            raise BrokenCall
        return name

    def key(self) -> Reader[tuple[str, str | None]]:
        """Read an argument's name after the tag `parameter`, and DeepSeek's type.

        The type is "true" for a string, "false" for JSON, None in other formats.
        """
        if not self.tags.key_end:
            return (yield from self._named())
        name = yield from self.source.until("<", stops="\n")
        yield from self._exactly(self.tags.key_end[1:])
        if (yield from self.source.after_space()) != self.tags.value[0]:
            raise BrokenCall
        yield from self._exactly(self.tags.value[1:])
        return name.strip(), None

    def _exactly(self, text: str) -> Reader[None]:
        for expected in text:
            if (yield from self.source.next()) != expected:
                raise BrokenCall

    def _named(self) -> Reader[tuple[str, str | None]]:
        inside = yield from self.source.until(">")
        match = NAMED.fullmatch(inside)
        if not match:
            raise BrokenCall
        return match[1] or match[2] or match[3] or "", match[4]

    def next_tag(self) -> Reader[str | None]:
        """Read white space and a tag. Returns the kind of the tag; None: other text follows."""
        char = yield from self.source.after_space()
        if not char:
            return END_OF_TEXT
        return (yield from self.tag_after()) if char == "<" else None

    def tag_after(self, key: str | None = None) -> Reader[str | None]:
        """Read a tag after its "<". Returns its kind, or None.

        `key`: name of the argument, which an end tag may have instead of the right name.
        """
        source, text = self.source, "<"
        while True:
            before = source.position()
            char = yield from source.next()
            if not char or not any(tag.startswith(text + char) for tag in self.tags.kinds):
                break
            text += char
            if text in self.tags.kinds:
                return self.tags.kinds[text]
        while char and (char.isalnum() or char in "_:｜" or (char == "/" and text == "<")):
            text += char
            if len(text) > MAX_TAG_CHARS:
                return None
            before = source.position()
            char = yield from source.next()
        if not text.startswith("</"):
            return None
        if char == "=":  # </parameter=KEY>
            yield from source.until(">")
        elif char not in (">", ""):
            source.rewind(before)
        if text[2:] == key:
            return VALUE_END
        found = (kind for start, kind in self.tags.misspelt.items() if text.startswith(start))
        return next(found, None)


class Values:
    """Reads the values of one call's arguments, each after its opening tag."""

    def __init__(self, reader: TagReader, calls: Calls, schema: ArgumentSchema) -> None:
        self.keys: set[str] = set()
        self._reader, self._source, self._tags = reader, reader.source, reader.tags
        self._calls, self._schema = calls, schema

    def read(self, key: str, is_string: str | None) -> Reader[None]:
        """Read a value and its end tag. `is_string`: DeepSeek's type, see TagReader.key.

        Strings are emitted as they arrive, other values when complete.
        """
        if key in self.keys:
            raise BrokenCall
        opening = f"{', ' if self.keys else '{'}{json.dumps(key, ensure_ascii=False)}: "
        self._calls.arguments(opening)
        self.keys.add(key)
        kinds = self._schema.kinds(self._schema.of(key))
        if (is_string is None and kinds == {"string"}) or (
            is_string == "true" and "string" in kinds
        ):
            self._calls.arguments('"')
            yield from self._bare(key, lambda text: self._calls.arguments(json_escaped(text)))
            self._calls.arguments('"')
            return
        parts: list[str] = []
        yield from self._bare(key, parts.append)
        read: Callable = from_json if is_string == "false" else typed
        self._calls.arguments(read("".join(parts), self._schema, key))

    def _bare(self, key: str, emit: Emit) -> Reader[None]:
        """Read text up to the value's end. With `trims`, drop one line break on each side."""
        char = yield from self._source.next()
        line_break = ""  # held back: dropped if the value ends here
        starts_line = char == "\n"
        if starts_line and self._tags.trims:
            char = yield from self._source.next()
        while True:
            if not char:
                emit("" if self._tags.trims else line_break)
                raise BrokenCall
            if char == "<" and (yield from self._ends(key, starts_line)):
                if not self._tags.trims:
                    emit(line_break)
                return
            if char == "\n":
                emit(line_break)
                line_break, starts_line = "\n", True
            else:
                emit(line_break + char)
                line_break, starts_line = "", starts_line and char in SPACE
            char = yield from self._source.next()

    def _ends(self, key: str, starts_line: bool) -> Reader[bool]:
        """Return True if the value ends at the "<" just read. Then its end tag is read, too."""
        source = self._source
        source.mark()
        try:
            tag = yield from self._reader.tag_after(key)
            if tag == VALUE_END:
                start = source.position()
                found = yield from self._reader.next_tag()
                # The output may end inside the next tag.
                is_cut = source.is_at_end and self._tags.may_begin(source.read(start).strip())
                if is_cut or found in (END_OF_TEXT, *AFTER_VALUE):
                    source.rewind(start)
                    return True
            elif tag is not None and (yield from self._begins_next(tag, starts_line)):
                source.rewind()
                source.put_back("<")
                return True
        except BrokenCall:
            pass
        if source.is_at_end and self._tags.value_end.startswith(f"<{source.read()}"):
            raise BrokenCall  # the output ends inside the end tag
        source.rewind()
        return False

    def _begins_next(self, tag: str, starts_line: bool) -> Reader[bool]:
        """Return True if a tag is not part of the value, so that the value's end tag is missing."""
        if tag == PARAMETER:
            key, _ = yield from self._reader.key()
            return starts_line and key in self._schema.keys and key not in self.keys
        if tag in (FUNCTION_END, CALL_END):
            following = yield from self._reader.next_tag()
            if tag == FUNCTION_END and following == CALL_END:
                following = yield from self._reader.next_tag()
            return following in (END_OF_TEXT, CALL, FUNCTION)
        if tag == CALL:
            if self._tags.function:
                tag = yield from self._reader.next_tag()
            else:
                tag = FUNCTION
            starts_line = True
        if tag != FUNCTION or not starts_line:
            return False
        name = yield from self._reader.name()
        return name in self._calls.tools or not self._calls.tools


def _start_of(tag: str) -> str:
    """Return the start of an end tag: the text before its name, and letters of the name."""
    name = max(tag.rfind(":"), tag.rfind("｜"), 1) + 1
    return tag[: name + MISSPELT]
