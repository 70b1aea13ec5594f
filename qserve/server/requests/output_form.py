"""The requested form of an output: `response_format` or `structured_outputs`."""

from typing import Any

from qserve.errors import ParameterError
from qserve.server.http.errors import ApiError
from qserve.server.requests.protocol import GenerationRequest
from qserve.server.requests.served_model import ServedModel
from qserve.structured.grammar import check_grammar, unenforced
from qserve.structured.params import FIELD, StructuredOutputsParams, as_structured_outputs

PARAM = "response_format"
TYPES = ("text", "json_object", "json_schema", "structural_tag")


def output_form(request: GenerationRequest) -> StructuredOutputsParams | None:
    """Read the form and run the checks that take milliseconds; None: any text.

    Raises ApiError(400), and InputError where llguidance is not installed.
    """
    asked, form = request.response_format, None
    if asked is not None:
        form = _of_response_format(asked)
        if form is not None and request.structured_outputs is not None:
            message = "response_format and structured_outputs cannot both be set."
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


def form_param(request: GenerationRequest) -> str:
    """Name of the field with the form."""
    return PARAM if request.structured_outputs is None else FIELD


def form_warnings(
    model: ServedModel, form: StructuredOutputsParams | None, param: str
) -> list[str]:
    """Keywords of a form that are not enforced, each with its field.

    Raises ApiError(400) where the server refuses such forms.
    """
    found = [f"{param}: {each}" for each in (unenforced(form) if form else ())]
    if found and model.structured_output_strict:
        raise ApiError(
            400,
            f"{found[0]:.600}. This server refuses such schemas (--structured-output-strict). Leave"
            " the keyword out.",
            param,
        )
    return found


def _of_response_format(asked: dict[str, Any]) -> StructuredOutputsParams | None:
    """Read OpenAI's field. Schemas are always enforced, whatever `strict` says."""
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
