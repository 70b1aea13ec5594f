"""The OpenAPI document, /openapi.json.

pydantic generates the schemas from the request models. This module adds ranges and unions.
"""

import functools
import json
import re
from typing import Any

from qserve import __version__
from qserve.params.beam_search_params import MAX_BEAMS
from qserve.params.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKEN_IDS,
)
from qserve.server.page.openapi_routes import (
    ANTHROPIC_ERROR,
    ANY,
    EMPTY_ROUTES,
    ERROR,
    FIRST_MODEL,
    MODELS,
    OPEN_ROUTES,
    ROUTES,
    STATUSES,
    STREAM,
    TEXT_ROUTES,
    error_schema,
)
from qserve.server.requests.anthropic.fields import CountTokensRequest, MessagesRequest
from qserve.server.requests.content_parts import (
    ASSISTANT,
    DETAILS,
    INPUT_KINDS,
    REFUSAL,
    THINKING,
    USER,
)
from qserve.server.requests.pooling import (
    MAX_INPUTS,
    PAIR_NAMES,
    ClassifyRequest,
    EmbeddingRequest,
    EmbedRequest,
    InputRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from qserve.server.requests.protocol import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_PROMPTS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TEMPERATURE,
    MAX_TEMPLATE_SETTINGS,
    REQUEST_ID,
    ROLES,
    TOOL,
    Body,
    ChatCompletionRequest,
    CompletionRequest,
)
from qserve.server.requests.responses import PASSED_ON, REFUSED, ResponsesRequest
from qserve.server.requests.tokenize import TokenizeRequest
from qserve.server.requests.tool_fields import MAX_CALLS, MAX_TOOLS
from qserve.server.requests.tool_use import MODES
from qserve.server.requests.unsupported import TABLES

NULL = {"type": "null"}
PATH_NAMES = re.compile(r"\{(\w+)\}")  # parameters in a path
POOLED = "input to pool"  # key for the `input` of pooling requests, unlike that of responses
_TEXT = {"type": "string", "minLength": 1}
STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}


def _number(low: float, high: float) -> dict:
    return {"type": "number", "minimum": low, "maximum": high}


def _integer(low: int, high: int | None = None) -> dict:
    return {"type": "integer", "minimum": low} | ({} if high is None else {"maximum": high})


def _array(items: dict, low: int, high: int) -> dict:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def _parts(kinds: tuple[str, ...], further: tuple[str, ...] = ()) -> dict:
    """Return the schema of a text, or of parts of the given types.

    kinds: types of parts with a field `text`
    further: types of parts with a field of the same name as the type
    """
    names = [(list(kinds), "text"), *(([name], name) for name in further)]
    parts = [
        {
            "type": "object",
            "properties": {"type": {"enum": kinds_of_one}, name: {"type": "string"}},
            "required": ["type", name],
        }
        for kinds_of_one, name in names
    ]
    part = {"anyOf": parts} if further else parts[0]
    return {"anyOf": [{"type": "string"}, _array(part, 0, MAX_PARTS)]}


def _parts_with_media(*media: dict) -> dict:
    """Return the schema of a text, or of parts that include images or videos."""
    text, parts = _parts(INPUT_KINDS)["anyOf"]
    return {"anyOf": [text, parts | {"items": {"anyOf": [parts["items"], *media]}}]}


_DETAIL = {"enum": [*DETAILS, None]}
_CHAT_IMAGE = {
    "type": "object",
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "type": "object",
            "properties": {"url": _TEXT, "detail": _DETAIL},
            "required": ["url"],
        },
    },
    "required": ["type", "image_url"],
}
_CHAT_VIDEO = {
    "type": "object",
    "properties": {
        "type": {"const": "video_url"},
        "video_url": {"type": "object", "properties": {"url": _TEXT}, "required": ["url"]},
    },
    "required": ["type", "video_url"],
}
_RESPONSE_IMAGE = {
    "type": "object",
    "properties": {"type": {"const": "input_image"}, "image_url": _TEXT, "detail": _DETAIL},
    "required": ["type", "image_url"],
}
_RESPONSE_VIDEO = {
    "type": "object",
    "properties": {"type": {"const": "input_video"}, "video_url": _TEXT},
    "required": ["type", "video_url"],
}


def _pictured(message: dict, *media: dict) -> dict:
    """Return the schema of a user's message, which may have images or videos."""
    own = {"role": {"const": USER}, "content": _parts_with_media(*media)}
    return message | {"properties": message["properties"] | own}


def _message(kinds: tuple[str, ...]) -> dict:
    return {
        "type": "object",
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": _parts(kinds),
            "name": {"anyOf": [{"type": "string", "maxLength": 256}, NULL]},
        },
        "required": ["role", "content"],
    }


def _chat_message() -> dict:
    """Return the schema of a message. Messages of the assistant and of tools need no content."""
    message = _message(INPUT_KINDS)
    message["properties"] |= {
        "tool_call_id": {"type": ["string", "null"]},
        "reasoning_content": {"type": ["string", "null"]},
        "tool_calls": NULL,
    }
    nothing = {"content": {"anyOf": [_parts(INPUT_KINDS), NULL]}}
    result = message["properties"] | {"role": {"const": TOOL}} | nothing
    calls = _array({"$ref": "#/components/schemas/ToolCall"}, 0, MAX_CALLS)
    answer = message["properties"] | {
        "role": {"const": ASSISTANT},
        "content": {"anyOf": [_parts(INPUT_KINDS, (REFUSAL, THINKING)), NULL]},
        "refusal": {"type": ["string", "null"]},
        "tool_calls": {"anyOf": [calls, NULL]},
    }
    further = [
        {"type": "object", "properties": properties, "required": ["role"]}
        for properties in (result, answer)
    ]
    return {"anyOf": [message, _pictured(message, _CHAT_IMAGE, _CHAT_VIDEO), *further]}


def _tool_choice() -> dict:
    kind, name = {"const": "function"}, {"type": "string"}
    function = {"type": "object", "properties": {"name": name}, "required": ["name"]}
    named = {
        "type": "object",
        "properties": {"type": kind, "function": function},
        "required": ["type", "function"],
    }
    return {"anyOf": [{"enum": list(MODES)}, named]}


def _response_item() -> dict:
    """Return the schema of an input item: a message, a tool call, or a tool's output."""
    call_id = {"type": "string"}
    called = {"call_id": call_id, "name": {"type": "string"}, "arguments": {"type": "string"}}
    output = {"call_id": call_id, "output": {"anyOf": [_parts(INPUT_KINDS), NULL]}}
    answer = _message(INPUT_KINDS)
    parts = _parts(INPUT_KINDS, (REFUSAL,))
    answer["properties"] |= {"role": {"const": ASSISTANT}, "content": parts}
    items = [_message(INPUT_KINDS), answer]
    items.append(_pictured(_message(INPUT_KINDS), _RESPONSE_IMAGE, _RESPONSE_VIDEO))
    for kind, fields in (("function_call", called), ("function_call_output", output)):
        properties = {"type": {"const": kind}} | fields
        items.append({"type": "object", "properties": properties, "required": [*properties]})
    return {"anyOf": items}


def _response_tool_choice() -> dict:
    named = {
        "type": "object",
        "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
        "required": ["type", "name"],
    }
    return {"anyOf": [{"enum": list(MODES)}, named]}


def _forms(max_model_len: int, vocab_size: int) -> dict[str, dict]:
    """Return field name -> schema with constraints. Null is also allowed, except for REQUIRED."""
    tokens = {"type": "array", "items": _integer(0, vocab_size - 1)}
    to_pool = {"anyOf": [_TEXT, tokens | {"minItems": 1}]}
    return {
        "add_special_tokens": {"type": "boolean"},
        "chat_template_kwargs": {
            "type": "object",
            "maxProperties": MAX_TEMPLATE_SETTINGS,
            "description": "Variables for the model's chat template, such as enable_thinking.",
        },
        "frequency_penalty": _number(-2, 2),
        POOLED: {"anyOf": [*to_pool["anyOf"], _array(to_pool, 1, MAX_INPUTS)]},
        "input": {"anyOf": [{"type": "string"}, _array(_response_item(), 1, MAX_MESSAGES)]},
        "logit_bias": {
            "type": "object",
            "maxProperties": MAX_LOGIT_BIAS,
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": _number(-100, 100),
        },
        "max_completion_tokens": _integer(1, max_model_len),
        "max_output_tokens": _integer(1, max_model_len),
        "max_tokens": _integer(1, max_model_len),
        "messages": _array(_chat_message(), 1, MAX_MESSAGES),
        "min_p": _number(0, 1),
        "min_tokens": _integer(0, max_model_len),
        "n": _integer(1, MAX_N),
        "presence_penalty": _number(-2, 2),
        "prompt_logprobs": _integer(0, MAX_LOGPROBS),
        "prompt": {
            "anyOf": [
                {"type": "string", "minLength": 1},
                tokens | {"minItems": 1},
                _array({"type": "string", "minLength": 1}, 1, MAX_PROMPTS),
                _array(tokens | {"minItems": 1}, 1, MAX_PROMPTS),
            ]
        },
        "repetition_penalty": _number(1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        "request_id": {"type": "string", "pattern": f"^{REQUEST_ID.pattern}$"},
        "seed": _integer(-(2**63), 2**63 - 1),
        "stop": {"anyOf": [STOP, _array(STOP, 0, MAX_STOP_STRINGS)]},
        "stop_token_ids": tokens | {"maxItems": MAX_STOP_TOKEN_IDS},
        "best_of": _integer(1, MAX_BEAMS),
        "length_penalty": _number(-100, 100),
        "temperature": _number(0, MAX_TEMPERATURE),
        "tokens": tokens,
        "tool_choice": _tool_choice(),
        "tools": _array({"$ref": "#/components/schemas/Tool"}, 1, MAX_TOOLS),
        "top_k": _integer(-1, 2**63 - 1),
        "top_logprobs": _integer(0, MAX_LOGPROBS),
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "truncate_prompt_tokens": {"anyOf": [{"const": -1}, _integer(1, max_model_len - 1)]},
    }


_DOCUMENT = {
    "anyOf": [_TEXT, {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}]
}
_TEXTS = {"anyOf": [_TEXT, _array(_DOCUMENT, 1, MAX_INPUTS)]}

# schemas of fields that differ on one route
FORMS_OF: dict[tuple[type[Body], str], dict] = {
    (EmbeddingRequest, "dimensions"): _integer(1),
    (PoolingRequest, "dimensions"): _integer(1),
    (RerankRequest, "documents"): _TEXTS,
    (RerankRequest, "query"): _DOCUMENT,
    (RerankRequest, "top_n"): _integer(0),
    **{(ScoreRequest, name): _TEXTS for pair in PAIR_NAMES for name in pair},
    (ScoreRequest, "max_tokens_per_doc"): _integer(0),
    (RerankRequest, "max_tokens_per_doc"): _integer(0),
    (EmbedRequest, "max_tokens"): _integer(0),
    (EmbedRequest, "output_dimension"): _integer(1),
    (EmbedRequest, "texts"): _TEXTS,
    (CompletionRequest, "logprobs"): _integer(0, MAX_LOGPROBS),
    (CompletionRequest, "max_tokens"): _integer(0),
    (ResponsesRequest, "tool_choice"): _response_tool_choice(),
    (ResponsesRequest, "tools"): _array(
        {"$ref": "#/components/schemas/ResponseTool"}, 0, MAX_TOOLS
    ),
    (TokenizeRequest, "prompt"): {"type": "string"},
}
# fields that keep the schema that pydantic generates
OWN_FORMS = {
    (body, name)
    for body in (CountTokensRequest, MessagesRequest)
    for name in ("messages", "tools", "tool_choice", "max_tokens")
}
# route -> unsupported fields, which may only have values without effect
NEUTRAL = TABLES | {ResponsesRequest.route: REFUSED}
# fields of /v1/responses that need --response-store
STORED = {
    "previous_response_id": {"type": ["string", "null"]},
    "conversation": {
        "anyOf": [
            {"type": ["string", "null"]},
            {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
        ]
    },
}


def _one_of(*groups: tuple[str, ...]) -> dict:
    """Return a schema that requires one group of fields; other groups must be absent or null."""
    fields = {name for group in groups for name in group}
    forms = [
        {
            "required": [*group],
            "properties": {name: {"not": NULL} for name in group}
            | dict.fromkeys(sorted(fields - {*group}), NULL),
        }
        for group in groups
    ]
    return {"oneOf": forms}


# request models with alternative fields: exactly one alternative must be present and not null
ALTERNATIVES: dict[type[Body], dict] = {
    TokenizeRequest: {
        "oneOf": [
            {"required": [name], "properties": {name: {"type": kind}, other: {"type": "null"}}}
            for name, kind, other in (
                ("prompt", "string", "messages"),
                ("messages", "array", "prompt"),
            )
        ]
    },
    **dict.fromkeys(
        (EmbeddingRequest, PoolingRequest, ClassifyRequest), _one_of(("input",), ("messages",))
    ),
    ScoreRequest: _one_of(*PAIR_NAMES),
    EmbedRequest: _one_of(("texts",), ("inputs",)),
}
REQUIRED = {"documents", "query", "input", "messages", "prompt", "tokens"}


@functools.cache
def document(max_model_len: int, vocab_size: int) -> dict:
    """Return the OpenAPI document for a model with these limits."""
    forms = _forms(max_model_len, vocab_size)
    paths: dict[str, dict] = {}
    for (path, method), (summary, body, streams, errors) in ROUTES.items():
        operation: dict[str, Any] = {
            "summary": summary,
            "operationId": _operation(method, path),
            "responses": {"200": _answer(path, streams)}
            | {str(c): _error(path, c) for c in errors},
        }
        if path in OPEN_ROUTES:
            operation["security"] = []
        if body is not None:
            schema = {"$ref": f"#/components/schemas/{body.__name__}"}
            content = {"application/json": {"schema": schema}}
            operation["requestBody"] = {"required": True, "content": content}
        if names := PATH_NAMES.findall(path):
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in names
            ]
        paths.setdefault(path, {})[method] = operation
    bodies = {body for _, body, *_ in ROUTES.values() if body is not None}
    schemas: dict[str, dict] = {}
    for body in sorted(bodies, key=lambda each: each.__name__):
        schemas |= _schemas(body, forms)
    return {
        "openapi": "3.1.0",
        "info": {"title": "qserve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": ERROR, "AnthropicError": ANTHROPIC_ERROR},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"key": []}, {"x-api-key": []}, {}],
    }


def _schemas(body: type[Body], forms: dict[str, dict]) -> dict[str, dict]:
    """Return the schemas of a request model and its parts, with the constraints of this module."""
    found = body.model_json_schema(ref_template="#/components/schemas/{model}")
    properties = {}
    for name, schema in found["properties"].items():
        is_pooled = name == "input" and issubclass(body, InputRequest)
        named = POOLED if is_pooled else name
        form = FORMS_OF.get((body, name)) or forms.get(named)
        if (body, name) in OWN_FORMS:
            form = None
        if form is not None:
            is_required = name in REQUIRED and name in found.get("required", ())
            schema = form if is_required else {"anyOf": [form, NULL]}
        properties[name] = {key: value for key, value in schema.items() if key != "title"}
    # Unsupported fields may only have values without effect.
    for name, neutral in NEUTRAL.get(getattr(body, "route", ""), {}).items():
        properties.setdefault(name, {"enum": [*neutral, None]})
    if body is ResponsesRequest:
        properties |= STORED
        of_chat = _schemas(ChatCompletionRequest, forms)["ChatCompletionRequest"]["properties"]
        properties |= {name: of_chat[name] for name in PASSED_ON}
    schema = {
        "type": "object",
        "description": body.__doc__,
        "properties": properties,
        "required": found.get("required", []),
        **ALTERNATIVES.get(body, {}),
    }
    schemas, parts = {body.__name__: schema}, found.get("$defs", {})
    # Drop schemas that are no longer referenced, since a constraint replaced them.
    while named := {name for name in parts if f'schemas/{name}"' in json.dumps(schemas)} - {
        *schemas
    }:
        schemas |= {name: parts[name] for name in named}
    return schemas


def _operation(method: str, path: str) -> str:
    return method + path.replace("/", "_")


def _answer(path: str, streams: bool) -> dict:
    if path in EMPTY_ROUTES:
        return {"description": "Success."}
    if path == "/v1/models":
        links = {"model": {"operationId": _operation("get", "/v1/models/{name}")} | FIRST_MODEL}
        content = {"application/json": {"schema": MODELS}}
        return {"description": "The models.", "content": content, "links": links}
    if path in TEXT_ROUTES:
        return {"description": "A text.", "content": {"text/plain": {}}}
    return {"description": "The reply.", "content": ANY | (STREAM if streams else {})}


def _error(path: str, status: int) -> dict:
    schema = {"$ref": f"#/components/schemas/{error_schema(path)}"}
    content = {"application/json": {"schema": schema}}
    return {"description": STATUSES[status], "content": content}
