"""Errors of the fields of a body: those of validators, and their reply."""

import re

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from qserve.params.parameter_types import (
    A_FLAG,
    A_LIST,
    A_NUMBER,
    A_TEXT,
    AN_INTEGER,
    AN_OBJECT,
    shown,
    type_error,
)
from qserve.server.http.errors import ApiError

REMEDY = "remedy"  # key of an error's context
# pydantic's error type -> expected type, in our words
EXPECTED = {
    "bool_type": A_FLAG,
    "dict_type": AN_OBJECT,
    "float_type": A_NUMBER,
    "int_from_float": AN_INTEGER,
    "int_type": AN_INTEGER,
    "list_type": A_LIST,
    "model_type": AN_OBJECT,
    "string_type": A_TEXT,
}
# pydantic's error type -> remedy; other types are limits of numbers and lengths
REMEDIES = {
    "json_invalid": "check the quotes, commas and brackets",
    "literal_error": "use one of these",
    "union_tag_invalid": "use one of these",
    "union_tag_not_found": "add the field",
}
SHOULD = re.compile(r"^(Input|String|List|Value) should (be|have)")  # in pydantic's messages


def field_error(problem: str, remedy: str) -> PydanticCustomError:
    """Return a validator's error. The reply names the field before it, and what was found after."""
    return PydanticCustomError("field", problem, {REMEDY: remedy})


def as_field_error(error: ValidationError) -> ApiError:
    """Return the reply to the first error of a body."""
    first = error.errors(include_url=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    problem = _problem(first, param)
    return ApiError.relayed(400, problem if param is None else f"{param}: {problem}", param)


def _problem(first: ErrorDetails, param: str | None) -> str:
    """Return the problem and its remedy."""
    kind, value = first["type"], first["input"]
    if kind == "missing":
        return "required, but missing. Add the field."
    if kind in EXPECTED:
        wrong = type_error(param or "", EXPECTED[kind], value)
        return f"{wrong.problem} ({wrong.remedy})"
    problem = SHOULD.sub("expected", first["msg"], count=1)
    if isinstance(value, str | int | float) and "found" not in problem:
        problem += f", found {shown(value)}"
    remedy = first.get("ctx", {}).get(REMEDY) or REMEDIES.get(kind, "give such a value")
    return f"{problem} ({remedy})"
