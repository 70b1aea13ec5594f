"""What form a request asks its text to have: `response_format`, or `structured_outputs`."""

from typing import Any

from qserve.errors import ParameterError
from qserve.server.errors import ApiError
from qserve.server.protocol import GenerationRequest
from qserve.structured.grammar import check_grammar
from qserve.structured.params import StructuredOutputsParams, as_structured_outputs

PARAM = "response_format"
TYPES = ("text", "json_object", "json_schema", "structural_tag")


def output_form(request: GenerationRequest) -> StructuredOutputsParams | None:
    """The form, checked as far as that takes milliseconds; None: any text.

    Raises ApiError(400), and InputError where llguidance is not installed.
    """
    asked, form = request.response_format, None
    if asked is not None:
        form = _of_response_format(asked)
        if form is not None and request.structured_outputs is not None:
            message = "response_format and structured_outputs exclude each other."
            raise ApiError(400, message, PARAM)
    try:
        if form is None:
            form = as_structured_outputs(request.structured_outputs)
        if form is not None:
            check_grammar(form)
    except ParameterError as error:
        param = error.subject if request.structured_outputs is not None else PARAM
        raise ApiError(400, f"{param}: {error.problem}.", param) from None
    return form


def _of_response_format(asked: dict[str, Any]) -> StructuredOutputsParams | None:
    """OpenAI's field. A schema holds whatever `strict` says: that is no more work here."""
    kind = asked.get("type")
    if kind not in TYPES:
        known = ", ".join(TYPES)
        raise ApiError(
            400, f"response_format.type: expected one of {known}, found {kind!r:.100}.", PARAM
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "structural_tag":
        fields = {name: value for name, value in asked.items() if name != "type"}
        try:
            return StructuredOutputsParams(structural_tag=fields)
        except ParameterError as error:
            raise ApiError(400, f"{PARAM}: {error.problem}.", PARAM) from None
    named = asked.get("json_schema")
    if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
        raise ApiError(
            400, "response_format.json_schema: expected an object with a name and a schema.", PARAM
        )
    try:
        return StructuredOutputsParams(json=named["schema"])
    except ParameterError as error:
        raise ApiError(400, f"response_format.json_schema: {error.problem}.", PARAM) from None
