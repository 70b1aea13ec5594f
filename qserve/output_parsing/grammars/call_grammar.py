"""CallGrammar: building blocks for the Lark grammar of a request's calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qserve.output_parsing.grammars.markers import MarkerToken, first_token, lark_text
from qserve.structured.grammar import quoted

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGrammar:
    """Building blocks for the grammar of a request's calls.

    `tools`: tool name -> schema of its arguments; at least one, and each can be compiled.
    """

    tools: Mapping[str, Schema]
    is_single: bool  # at most one call
    as_json: Callable[[Any], str]  # Lark rule of a JSON value of a schema
    marker_token: MarkerToken
    # Tools that take any arguments, since their schemas are not enforced.
    free: frozenset[str] = frozenset()
    rules: dict[str, str] = field(default_factory=dict)  # those defined so far
    _names: dict[str, str] = field(default_factory=dict)  # of terminals by their expressions

    def text(self, text: str) -> str:
        """Lark of a text: tokens where the model has one that no text matches."""
        return lark_text(text, self.marker_token)

    def optional(self, text: str) -> str:
        """Lark of a text that only models with a token for it write."""
        return f"({self.text(text)})?" if self.marker_token(text) is not None else ""

    def ended(self, expression: str, end: str, *, is_empty: bool) -> str:
        """Lark of a text that an expression matches, and of the text that ends it.

        `is_empty`: the expression also matches no text. Up to a token, the end belongs to the
        expression: the library's lexer is greedy.
        """
        at = first_token(end, self.marker_token)
        if at is None:
            return self.terminal(f"({expression}) {quoted(end)}")
        if at:
            return f"{self.terminal(f'({expression}) {quoted(end[:at])}')} {self.text(end[at:])}"
        some = self.terminal(f"({expression}) & /(?s:.+)/")  # no terminal is empty
        return f"{some}{'?' if is_empty else ''} {self.text(end)}"

    def terminal(self, expression: str) -> str:
        """Name of a terminal with an expression."""
        name = self._names.setdefault(expression, f"TEXT_{len(self._names)}")
        self.rules[name] = expression
        return name

    def repeated(self, rule: str, separator: str) -> str:
        if self.is_single:
            return rule
        return f"{rule} ({quoted(separator)} {rule})*" if separator else f"{rule}+"

    def each(self, rule_of: Callable[[int, str, Schema], str]) -> str:
        """Define rules from bodies: `call`, an alternative of all tools, and `call_0`, ..."""
        numbered = [f"call_{index}" for index in range(len(self.tools))]
        self.rules["call"] = " | ".join(numbered)
        for index, (name, schema) in enumerate(self.tools.items()):
            self.rules[f"call_{index}"] = rule_of(index, name, schema)
        return "call"

    def lines(self) -> str:
        return "\n".join(f"{name}: {rule}" for name, rule in self.rules.items())
