"""ReasoningScanner: parts a growing text into the model's reasoning and what follows it."""

from dataclasses import dataclass

from qserve.output_parsing.pieces import REASONING, Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    start: str
    end: str
    is_implied: bool  # the text begins with reasoning, whether or not the prompt has the start


# by the name that --reasoning-parser takes
REASONING_PARSERS = {
    "deepseek_r1": ReasoningFormat(start="<think>", end="</think>", is_implied=True),
    "qwen3": ReasoningFormat(start="<think>", end="</think>", is_implied=False),
}


# What a prompt's end says of the reasoning.
OPEN, POSSIBLE, CLOSED = "open", "possible", "closed"
SPACE = r"/[ \t\r\n]{0,4}/"
MAX_SPACE = 64  # characters before reasoning; more are no reasoning, and not held back
ANY = r"(.|\n)*"


def state_after(form: ReasoningFormat, prompt_end: str) -> str:
    """Whether text behind the prompt begins within reasoning, may begin with it, or has none."""
    before = prompt_end.rstrip()
    if before.endswith(form.end):
        return CLOSED
    return OPEN if form.is_implied or before.endswith(form.start) else POSSIBLE


def grammar_prefix(
    form: ReasoningFormat, prompt_end: str, *, are_special: bool = False, thinks: bool = True
) -> str:
    """Lark of the reasoning that may come before a text of some form; empty: none may.

    `are_special`: the markers are special tokens, which no text matches. `thinks`: the model was
    trained to reason. One that was not would be led to it by a form that forbids it all other
    words, and not come out of it again.
    """
    state = state_after(form, prompt_end)
    if state == CLOSED or (state == POSSIBLE and not thinks):
        return ""
    start = form.start if state == POSSIBLE else ""
    prefix = f"prefix: (thought {SPACE})?" if start else f"prefix: thought {SPACE}"
    if are_special:
        begun = f"{SPACE} {start} " if start else ""
        return f"{prefix}\nthought: {begun}/{ANY}/ {form.end}"
    begun = f"{SPACE[1:-1]}{start}" if start else ""
    return f'{prefix}\nthought[suffix="{form.end}"]: /{begun}{ANY}/'


class ReasoningScanner:
    """White space at both ends of the reasoning, and behind it, belongs to neither."""

    def __init__(self, form: ReasoningFormat, *, prompt_end: str) -> None:
        """`prompt_end`: the last characters of the prompt, which may begin or end reasoning."""
        state = state_after(form, prompt_end)
        self._form = form
        self._held = ""  # may begin a marker
        self._spaces = ""
        self._has_begun = False  # some of the reasoning was told
        self._is_open = state == OPEN
        # Until the first character that is no white space: whether reasoning begins.
        self._may_begin = state != CLOSED
        self._is_behind = not self._may_begin  # of reasoning: leading white space is dropped

    @property
    def is_open(self) -> bool:
        """Whether what comes next is reasoning, unless it ends it."""
        return self._is_open

    @property
    def may_begin(self) -> bool:
        """Whether it is not known yet if the text begins with reasoning."""
        return self._may_begin and not self._is_open

    def push(self, text: str) -> tuple[list[Piece], str]:
        """The reasoning and the other text that are known with these characters."""
        reasoning: list[str] = []
        for at, char in enumerate(text):
            if not self._is_open and not self._may_begin:
                return _pieces(reasoning), self._behind(text[at:])
            if self._may_begin:
                self._held += char
                found = self._held.lstrip()
                if found == self._form.start:
                    self._held, self._may_begin, self._is_open = "", False, True
                elif not self._form.start.startswith(found) or len(self._held) > MAX_SPACE + len(
                    found
                ):
                    self._may_begin = False
                    held, self._held = self._held, ""
                    if not self._is_open:
                        return _pieces(reasoning), held + text[at + 1 :]
                    for each in held:
                        self._reason(each, reasoning)
                continue
            self._reason(char, reasoning)
        return _pieces(reasoning), ""

    def finish(self) -> tuple[list[Piece], str]:
        """The rest, when no more text comes."""
        held, self._held = self._held, ""
        if self._is_open:
            text = (self._spaces + held).strip() and self._spaces + held
            return _pieces([text if self._has_begun else text.lstrip()]), ""
        return [], held

    def _reason(self, char: str, reasoning: list[str]) -> None:
        self._held += char
        while self._held:
            if self._held == self._form.end:
                self._held, self._is_open, self._is_behind = "", False, True
                return
            if self._form.end.startswith(self._held):
                return
            first, self._held = self._held[0], self._held[1:]
            if first.isspace():
                self._spaces += first
            else:
                reasoning.append(self._spaces + first if self._has_begun else first)
                self._has_begun, self._spaces = True, ""

    def _behind(self, text: str) -> str:
        if self._is_behind:
            text = text.lstrip()
            self._is_behind = not text
        return text


class ReasoningTokens:
    """Counts the tokens of an output's reasoning, its marks among them, as the text comes."""

    def __init__(self, form: ReasoningFormat, *, prompt_end: str) -> None:
        self._scanner = ReasoningScanner(form, prompt_end=prompt_end)
        self._num_waiting = 0  # tokens of which it is not known what they are
        self.count = 0

    def add(self, text: str, num_tokens: int) -> None:
        """Text, and the tokens that brought it."""
        was_open = self._scanner.is_open
        if not was_open and not self._scanner.may_begin:
            return
        self._num_waiting += num_tokens
        reasoning, _ = self._scanner.push(text)
        if was_open or self._scanner.is_open or reasoning:
            self.count, self._num_waiting = self.count + self._num_waiting, 0


def _pieces(reasoning: list[str]) -> list[Piece]:
    text = "".join(reasoning)
    return [Piece(REASONING, text)] if text else []
