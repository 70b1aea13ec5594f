"""Lark grammars of tool calls for llguidance, made of a row's texts and its notation.

They restrict a model to complete calls with arguments that fit the tools' schemas. The readers of
these formats accept more than the grammars do.
"""

from qserve.output_parsing.grammars.call_grammar import CallGrammar, Schema
from qserve.output_parsing.grammars.text_grammar import all_of, escaped, without
from qserve.output_parsing.tool_format import ToolFormat
from qserve.structured.grammar import quoted

RULE = "calls"  # the rule that a grammar defines


def lark(form: CallGrammar, row: ToolFormat) -> str:
    """The grammar of an output of calls in a row's format. Raises Inexpressible."""
    form.rules[RULE] = _calls(form, row)
    return form.lines()


def lark_in_text(form: CallGrammar, row: ToolFormat) -> str:
    """The grammar of free text in which all calls are in a row's format. Raises Inexpressible.

    Formats whose calls must begin the output have either calls or text.
    """
    texts = without(_starts(form, row))
    texts += [rf"~/\s*{escaped(text)}(?s:.*)/" for text in row.starts]
    some = form.terminal(" & ".join(("/(?s:.+)/", *texts)))
    if row.body.is_text_message:
        form.rules[RULE] = f"{row.body.whole(form)} | {form.text(row.body.left)} {some}?"
        return form.lines()
    calls = f"({_calls(form, row)})"
    marker = row.markers[0] if row.markers else ""
    is_token = form.marker_token(marker) is not None
    if row.is_bare or (row.body.whole is not None and not is_token):
        form.rules[RULE] = f"{calls} | {some}?"
    elif is_token:
        form.rules[RULE] = f"({some}? {calls}){'?' if form.is_single else '*'} {some}?"
    else:
        # The text before a call ends with the marker, which is then no part of the call.
        before = form.terminal(f"({all_of(texts)}) {quoted(marker)}")
        after = f"({_calls(form, row, begun=marker)})"
        form.rules[RULE] = f"({before} {after}){'?' if form.is_single else '*'} {some}?"
    return form.lines()


def _starts(form: CallGrammar, row: ToolFormat) -> list[str]:
    """Texts that begin calls and that an ordinary text of the model can spell."""
    return [text for text in row.markers if form.marker_token(text) is None]


def _calls(form: CallGrammar, row: ToolFormat, begun: str = "") -> str:
    """Lark of all calls of a row; `begun`: text at its start that is left out."""
    if row.body.whole is not None:
        return row.body.whole(form)
    num_shared = row.num_shared
    outer, own = "".join(row.opens[:num_shared]), "".join(row.opens[num_shared:])
    at = len(row.closes) - num_shared
    own_end, outer_end = "".join(row.closes[:at]), "".join(row.closes[at:])

    def call(index: int, name: str, schema: Schema) -> str:
        arguments = row.body.lark(form, index, name, schema)
        if row.name is None:
            return arguments
        number = ""
        if row.name.is_numbered:
            number, form.rules["CALL_NUMBER"] = "CALL_NUMBER", "/[0-9]{1,2}/"
        before = form.text(f"{row.name.before}{name}{':' if number else ''}")
        parts = (before, number, row.separator and form.text(row.separator), arguments)
        return " ".join(filter(None, parts))

    texts = form.optional if row.is_bare else form.text
    form.each(call)
    if begun and not num_shared:
        # Each marker begins one call; more of them follow in the text.
        return f"{_joined(form.text(own.removeprefix(begun)), 'call', texts(own_end))}"
    form.rules["one"] = _joined(texts(own), "call", texts(own_end))
    left, right = (text and quoted(text) for text in (row.body.left, row.body.right))
    calls = form.repeated("one", row.between)
    opening = form.text(outer.removeprefix(begun)) if begun else texts(outer)
    return _joined(opening, left, calls, right, texts(outer_end))


def _joined(*parts: str) -> str:
    return " ".join(filter(None, parts))
