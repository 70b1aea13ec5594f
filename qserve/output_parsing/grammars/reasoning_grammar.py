"""Lark grammars of the reasoning before a constrained answer."""

from qserve.output_parsing.grammars.markers import MarkerToken, first_token, lark_text, no_token
from qserve.output_parsing.notations import harmony
from qserve.output_parsing.reasoning_formats import CLOSED, POSSIBLE, ReasoningFormat

SPACE = r"/[ \t\r\n]{0,4}/"
ANY = r"(.|\n)*"


def grammar_prefix(
    form: ReasoningFormat,
    prompt_end: str,
    *,
    marker_token: MarkerToken = no_token,
    thinks: bool = True,
) -> str:
    """Return Lark of the reasoning before a constrained answer; "" if reasoning is impossible.

    `thinks`: the model was trained to reason. If it was not, reasoning is not offered: the model
    would start it only because the grammar forbids its other words, and would never end it.
    """
    state, ends = form.opened(prompt_end)
    if state == CLOSED or (state == POSSIBLE and not thinks):
        return ""
    is_optional = state == POSSIBLE
    start, end = (form.start if is_optional else ""), (form.end if is_optional else ends[0])
    space = "" if form.is_harmony else SPACE
    prefix = f"prefix: (thought {space})?" if is_optional else f"prefix: thought {space}"
    after = ""
    if form.is_harmony:
        after = lark_text(f"{harmony.START}assistant", marker_token)
    if first_token(end, marker_token) == 0:
        begun = f"{space} {lark_text(start, marker_token)} " if start else ""
        return f"{prefix}\nthought: {begun}/{ANY}/ {lark_text(end, marker_token)} {after}"
    escaped = "".join("\\" + char if char in r"[](){}|.*+?^$\/" else char for char in start)
    escaped = escaped.replace("\n", "\\n")
    begun = f"{SPACE[1:-1]}{escaped}" if start else ""
    return f"{prefix}\nthought: ended {after}\nended[suffix={_quoted(end)}]: /{begun}{ANY}/"


def answer_opening(form: ReasoningFormat, marker_token: MarkerToken = no_token) -> str:
    """Return Lark of the text between the reasoning and a constrained answer; "" if none."""
    if not form.is_harmony:
        return ""
    return f"opening: {lark_text(f'{harmony.CHANNEL}final{harmony.MESSAGE}', marker_token)}"


def _quoted(text: str) -> str:
    return f'"{text}"'
