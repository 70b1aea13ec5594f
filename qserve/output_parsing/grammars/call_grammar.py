"""CallGrammar: building blocks for the Lark grammar of a request's calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qserve.output_parsing.grammars.markers import MarkerToken, first_token, lark_text
from qserve.structured.lark_text import quoted

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGrammar:
    """Building blocks for the grammar of a request's calls. Collects the rules.

    `tools`: tool name -> schema of its arguments. There is at least one tool, and llguidance can
    compile each schema.
    """

    tools: Mapping[str, Schema]
    is_single: bool  # True: at most one call
    as_json: Callable[[Any], str]  # schema -> Lark of a JSON value that fits it
    marker_token: MarkerToken
    # Tools whose schemas are not enforced: they take any arguments.
    free: frozenset[str] = frozenset()
    rules: dict[str, str] = field(default_factory=dict)  # rule name -> Lark, defined so far
    _names: dict[str, str] = field(default_factory=dict)  # expression -> name of its terminal

    def text(self, text: str) -> str:
        """Return Lark of a text. Markers that only a token id matches become token ids."""
        return lark_text(text, self.marker_token)

    def optional(self, text: str) -> str:
        """Return Lark of an optional marker; "" if the model has no token for it."""
        return f"({self.text(text)})?" if self.marker_token(text) is not None else ""

    def ended(self, expression: str, end: str, *, is_empty: bool) -> str:
        """Return Lark of a text that matches an expression, and of its end marker.

        `is_empty`: the expression also matches the empty text. The part of the end marker before
        its first token id is in the same terminal as the expression, since llguidance's lexer is
        greedy.
        """
        at = first_token(end, self.marker_token)
        if at is None:
            return self.terminal(f"({expression}) {quoted(end)}")
        if at:
            return f"{self.terminal(f'({expression}) {quoted(end[:at])}')} {self.text(end[at:])}"
        some = self.terminal(f"({expression}) & /(?s:.+)/")  # a terminal must not match ""
        return f"{some}{'?' if is_empty else ''} {self.text(end)}"

    def terminal(self, expression: str) -> str:
        """Define a terminal for an expression, once, and return its name."""
        name = self._names.setdefault(expression, f"TEXT_{len(self._names)}")
        self.rules[name] = expression
        return name

    def repeated(self, rule: str, separator: str) -> str:
        if self.is_single:
            return rule
        return f"{rule} ({quoted(separator)} {rule})*" if separator else f"{rule}+"

    def each(self, rule_of: Callable[[int, str, Schema], str]) -> str:
        """Define a rule per tool (`call_0`, ...) and their alternative `call`; return its name.

        `rule_of`: returns Lark of a call, by index, name and schema of the tool.
        """
        numbered = [f"call_{index}" for index in range(len(self.tools))]
        self.rules["call"] = " | ".join(numbered)
        for index, (name, schema) in enumerate(self.tools.items()):
            self.rules[f"call_{index}"] = rule_of(index, name, schema)
        return "call"

    def lines(self) -> str:
        return "\n".join(f"{name}: {rule}" for name, rule in self.rules.items())
