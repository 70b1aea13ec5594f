"""Builds Lark grammars of tool calls for llguidance from a ToolFormat: its texts and its notation.

The grammars restrict a model to complete calls with arguments that fit the tools' schemas. The
readers of the formats accept more than the grammars.
"""

from qserve.output_parsing.grammars.call_grammar import CallGrammar, Schema
from qserve.output_parsing.grammars.markers import first_token
from qserve.output_parsing.grammars.text_grammar import all_of, escaped, without
from qserve.output_parsing.tool_format import ToolFormat
from qserve.structured.lark_text import quoted

RULE = "calls"  # name of a grammar's top rule


def lark(form: CallGrammar, row: ToolFormat) -> str:
    """Return the grammar of output that consists of calls in a format. Raises Inexpressible."""
    form.rules[RULE] = _calls(form, row)
    return form.lines()


def lark_in_text(form: CallGrammar, row: ToolFormat) -> str:
    """Return the grammar of free text with calls in a format. Raises Inexpressible.

    For formats whose calls must start the output, the output is either calls or text.
    """
    texts = without(_starts(form, row))
    texts += [rf"~/\s*{escaped(text)}(?s:.*)/" for text in row.starts]
    some = form.terminal(" & ".join(("/(?s:.+)/", *texts)))
    if row.body.is_text_message:
        form.rules[RULE] = f"{row.body.whole(form)} | {form.text(row.body.left)} {some}?"
        return form.lines()
    calls = f"({_calls(form, row)})"
    marker = row.markers[0] if row.markers else ""
    is_token = _starts_with_token(form, marker)
    if row.is_bare or (row.body.whole is not None and not is_token):
        form.rules[RULE] = f"{calls} | {some}?"
    elif is_token:
        form.rules[RULE] = f"({some}? {calls}){'?' if form.is_single else '*'} {some}?"
    else:
        # The terminal of the text before a call includes the marker, so the call's rule omits it.
        before = form.terminal(f"({all_of(texts)}) {quoted(marker)}")
        after = f"({_calls(form, row, begun=marker)})"
        form.rules[RULE] = f"({before} {after}){'?' if form.is_single else '*'} {some}?"
    return form.lines()


def _starts(form: CallGrammar, row: ToolFormat) -> list[str]:
    """Return the start markers that have no token id, so that ordinary text could contain them."""
    return [text for text in row.markers if not _starts_with_token(form, text)]


def _starts_with_token(form: CallGrammar, marker: str) -> bool:
    """Return True if a marker is a token, or begins with one, which no ordinary text contains."""
    return first_token(marker, form.marker_token) == 0


def _calls(form: CallGrammar, row: ToolFormat, begun: str = "") -> str:
    """Return Lark of the calls in a format. `begun`: text at the start that was matched before."""
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
        # Each marker starts one call; lark_in_text repeats the text and the call.
        return f"{_joined(form.text(own.removeprefix(begun)), 'call', texts(own_end))}"
    form.rules["one"] = _joined(texts(own), "call", texts(own_end))
    left, right = (text and quoted(text) for text in (row.body.left, row.body.right))
    calls = form.repeated("one", row.between)
    opening = form.text(outer.removeprefix(begun)) if begun else texts(outer)
    return _joined(opening, left, calls, right, texts(outer_end))


def _joined(*parts: str) -> str:
    return " ".join(filter(None, parts))
