"""The server's own description, /openapi.json: what each route takes and may answer.

Made of the requests' models, whose ranges and forms are added here. Knows no running server.
"""

import functools
import json
from typing import Any

from qserve import __version__
from qserve.beam_search_params import MAX_BEAMS
from qserve.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_REPETITION_PENALTY,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from qserve.server.content_parts import ASSISTANT, INPUT_KINDS, REFUSAL
from qserve.server.lora_protocol import LoadAdapterRequest, UnloadAdapterRequest
from qserve.server.pooling_protocol import (
    MAX_INPUTS,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from qserve.server.protocol import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_PROMPTS,
    MAX_TEMPLATE_SETTINGS,
    REQUEST_ID,
    ROLES,
    Body,
    ChatCompletionRequest,
    CompletionRequest,
)
from qserve.server.responses_protocol import PASSED_ON, REFUSED, ResponsesRequest
from qserve.server.token_job import DetokenizeRequest, TokenizeRequest
from qserve.server.tool_fields import ARGUMENTS, CALL_ID, MAX_CALLS, MAX_TOOLS, NAME
from qserve.server.tool_use import MODES
from qserve.server.unsupported import TABLES

NULL = {"type": "null"}
POOLED = "input to pool"  # another form than the input of a response
_TEXT = {"type": "string", "minLength": 1}
STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}


def _number(low: float, high: float) -> dict:
    return {"type": "number", "minimum": low, "maximum": high}


def _integer(low: int, high: int | None = None) -> dict:
    return {"type": "integer", "minimum": low} | ({} if high is None else {"maximum": high})


def _array(items: dict, low: int, high: int) -> dict:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def _parts(kinds: tuple[str, ...], *, with_refusals: bool = False) -> dict:
    names = [(list(kinds), "text"), *[([REFUSAL], REFUSAL)] * with_refusals]
    parts = [
        {
            "type": "object",
            "properties": {"type": {"enum": kinds_of_one}, name: {"type": "string"}},
            "required": ["type", name],
        }
        for kinds_of_one, name in names
    ]
    part = {"anyOf": parts} if with_refusals else parts[0]
    return {"anyOf": [{"type": "string"}, _array(part, 0, MAX_PARTS)]}


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
    """A message, or one of the assistant with calls, which needs no content."""
    message = _message(("text",))
    optional = {
        "tool_call_id": {"anyOf": [{"type": "string", "pattern": f"^{CALL_ID.pattern}$"}, NULL]},
        "reasoning_content": {"type": ["string", "null"]},
    }
    message["properties"] |= optional | {"tool_calls": NULL}
    call = {"$ref": "#/components/schemas/ToolCall"}
    parts = _parts(("text",), with_refusals=True)
    own = message["properties"] | {
        "role": {"const": ASSISTANT},
        "content": {"anyOf": [parts, NULL]},
    }
    further = (
        ("content", parts),
        ("refusal", {"type": "string"}),
        ("tool_calls", _array(call, 1, MAX_CALLS)),
    )
    answers = [
        {"type": "object", "properties": own | {name: form}, "required": ["role", name]}
        for name, form in further
    ]
    return {"anyOf": [message, *answers]}


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
    """A message, or a call of a tool and what it said."""
    call_id = {"type": "string", "pattern": f"^{CALL_ID.pattern}$"}
    called = {"call_id": call_id, "name": {"type": "string", "pattern": f"^{NAME.pattern}$"}}
    called |= {"arguments": ARGUMENTS}
    output = {"call_id": call_id, "output": _parts(INPUT_KINDS)}
    answer = _message(INPUT_KINDS)
    parts = _parts(INPUT_KINDS, with_refusals=True)
    answer["properties"] |= {"role": {"const": ASSISTANT}, "content": parts}
    items = [_message(INPUT_KINDS), answer]
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
    """What a field holds, beyond what its type says; null is allowed beside, but of REQUIRED."""
    tokens = {"type": "array", "items": _integer(0, vocab_size - 1)}
    to_pool = {"anyOf": [_TEXT, tokens | {"minItems": 1}]}
    return {
        "add_special_tokens": {"type": "boolean"},
        "chat_template_kwargs": {
            "type": "object",
            "maxProperties": MAX_TEMPLATE_SETTINGS,
            "additionalProperties": {"type": ["boolean", "integer", "number", "string", "null"]},
            "description": "What the model's chat template reads, such as enable_thinking.",
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
        "temperature": _number(0, 2),
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

# forms that differ on one route
FORMS_OF: dict[tuple[type[Body], str], dict] = {
    (EmbeddingRequest, "dimensions"): _integer(1),
    (PoolingRequest, "dimensions"): _integer(1),
    (RerankRequest, "documents"): _TEXTS,
    (RerankRequest, "query"): _DOCUMENT,
    (RerankRequest, "top_n"): _integer(0),
    (ScoreRequest, "text_1"): _TEXTS,
    (ScoreRequest, "text_2"): _TEXTS,
    (CompletionRequest, "logprobs"): _integer(0, MAX_LOGPROBS),
    (CompletionRequest, "max_tokens"): _integer(0),
    (ResponsesRequest, "tool_choice"): _response_tool_choice(),
    (ResponsesRequest, "tools"): _array(
        {"$ref": "#/components/schemas/ResponseTool"}, 0, MAX_TOOLS
    ),
    (TokenizeRequest, "prompt"): {"type": "string"},
}
# fields of a body, by its route, that may only have values that change nothing
NEUTRAL = TABLES | {ResponsesRequest.route: REFUSED}
# of these fields one must be there, and be no null
ALTERNATIVES: dict[type[Body], dict] = {
    TokenizeRequest: {
        "oneOf": [
            {"required": [name], "properties": {name: {"type": kind}, other: {"type": "null"}}}
            for name, kind, other in (
                ("prompt", "string", "messages"),
                ("messages", "array", "prompt"),
            )
        ]
    }
}
REQUIRED = {"documents", "query", "text_1", "text_2", "input", "messages", "prompt", "tokens"}

ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
STATUSES = {
    400: "The request is wrong; `param` names the field.",
    401: "The key is missing or wrong.",
    404: "There is no such model or route.",
    408: "The body came too slowly, or the answer took longer than the deadline.",
    413: "The body is too long.",
    415: "The body is no JSON, or packed.",
    429: "The key has used up its share; Retry-After says when there is more.",
    500: "The server failed.",
    503: "The server is busy or stopping; Retry-After says when to come again.",
}
OF_BODIES = (400, 401, 404, 408, 413, 415, 429, 500, 503)
MODELS = {
    "type": "object",
    "properties": {
        "object": {"const": "list"},
        "data": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"id": {"type": "string"}, "max_model_len": {"type": "integer"}},
                "required": ["id", "max_model_len"],
            },
        },
    },
    "required": ["object", "data"],
}
FIRST_MODEL = {"parameters": {"name": "$response.body#/data/0/id"}}
STREAM = {"text/event-stream": {"schema": {"type": "string"}}}
ANY = {"application/json": {"schema": {"type": "object"}}}

# (path, method): summary, the body's model, whether the answer may be a stream, other answers
ROUTES: dict[tuple[str, str], tuple[str, type[Body] | None, bool, tuple[int, ...]]] = {
    ("/v1/completions", "post"): ("Continue prompts.", CompletionRequest, True, OF_BODIES),
    ("/v1/chat/completions", "post"): (
        "Answer a conversation.",
        ChatCompletionRequest,
        True,
        OF_BODIES,
    ),
    ("/v1/responses", "post"): (
        "Answer a conversation in OpenAI's newer form; nothing is stored.",
        ResponsesRequest,
        True,
        OF_BODIES,
    ),
    ("/v1/embeddings", "post"): ("Vectors of texts.", EmbeddingRequest, False, OF_BODIES),
    ("/pooling", "post"): ("Hidden states of texts.", PoolingRequest, False, OF_BODIES),
    **{
        (path, "post"): ("How well pairs of texts match.", ScoreRequest, False, OF_BODIES)
        for path in ("/score", "/v1/score")
    },
    **{
        (path, "post"): ("Documents, the best first.", RerankRequest, False, OF_BODIES)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    },
    ("/tokenize", "post"): ("The tokens of a prompt or chat.", TokenizeRequest, False, OF_BODIES),
    ("/detokenize", "post"): ("The text of tokens.", DetokenizeRequest, False, OF_BODIES),
    ("/reset_prefix_cache", "post"): (
        "Forget the KV pages of earlier requests (--enable-cache-reset).",
        None,
        False,
        (401, 404, 503),
    ),
    ("/v1/load_lora_adapter", "post"): (
        "Load an adapter from a folder in --lora-folder.",
        LoadAdapterRequest,
        False,
        OF_BODIES,
    ),
    ("/v1/unload_lora_adapter", "post"): (
        "Forget an adapter (--lora-folder).",
        UnloadAdapterRequest,
        False,
        OF_BODIES,
    ),
    ("/v1/models", "get"): (
        "The model, under each of its names, and its adapters.",
        None,
        False,
        (401,),
    ),
    ("/v1/models/{name}", "get"): ("The model of one name.", None, False, (401, 404)),
    ("/health", "get"): ("Whether the engine lives.", None, False, (503,)),
    ("/ready", "get"): ("Whether a request would be taken.", None, False, (503,)),
    ("/ping", "get"): ("As /health.", None, False, (503,)),
    ("/ping", "post"): ("As /health.", None, False, (503,)),
    ("/version", "get"): ("The version of qserve.", None, False, (401,)),
    ("/load", "get"): ("How many outputs are under way.", None, False, (401,)),
    ("/metrics", "get"): ("Prometheus metrics.", None, False, (401,)),
}
TEXT_ROUTES = ("/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
OPEN_ROUTES = ("/health", "/ready", "/ping")
EMPTY_ROUTES = (*OPEN_ROUTES, "/reset_prefix_cache")


@functools.cache
def document(max_model_len: int, vocab_size: int) -> dict:
    """The OpenAPI document of a server whose model has these limits."""
    forms = _forms(max_model_len, vocab_size)
    paths: dict[str, dict] = {}
    for (path, method), (summary, body, streams, errors) in ROUTES.items():
        operation: dict[str, Any] = {
            "summary": summary,
            "operationId": _operation(method, path),
            "responses": {"200": _answer(path, streams)} | {str(c): _error(c) for c in errors},
        }
        if path in OPEN_ROUTES:
            operation["security"] = []
        if body is not None:
            schema = {"$ref": f"#/components/schemas/{body.__name__}"}
            content = {"application/json": {"schema": schema}}
            operation["requestBody"] = {"required": True, "content": content}
        if "{name}" in path:
            operation["parameters"] = [
                {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
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
            "schemas": {**schemas, "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _schemas(body: type[Body], forms: dict[str, dict]) -> dict[str, dict]:
    """The schemas of a body and of its parts: the models', with the forms above."""
    found = body.model_json_schema(ref_template="#/components/schemas/{model}")
    properties = {}
    for name, schema in found["properties"].items():
        named = POOLED if name == "input" and body in (EmbeddingRequest, PoolingRequest) else name
        form = FORMS_OF.get((body, name)) or forms.get(named)
        if form is not None:
            is_required = name in REQUIRED and name in found.get("required", ())
            schema = form if is_required else {"anyOf": [form, NULL]}
        properties[name] = {key: value for key, value in schema.items() if key != "title"}
    # Fields that are known and not done may only have the values that change nothing.
    for name, neutral in NEUTRAL.get(getattr(body, "route", ""), {}).items():
        properties.setdefault(name, {"enum": [*neutral, None]})
    if body is ResponsesRequest:
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
    # Only those that are still referred to: a form may have taken the place of one.
    while named := {name for name in parts if f'schemas/{name}"' in json.dumps(schemas)} - {
        *schemas
    }:
        schemas |= {name: parts[name] for name in named}
    return schemas


def _operation(method: str, path: str) -> str:
    return method + path.replace("/", "_")


def _answer(path: str, streams: bool) -> dict:
    if path in EMPTY_ROUTES:
        return {"description": "Yes."}
    if path == "/v1/models":
        links = {"model": {"operationId": _operation("get", "/v1/models/{name}")} | FIRST_MODEL}
        content = {"application/json": {"schema": MODELS}}
        return {"description": "The models.", "content": content, "links": links}
    if path in TEXT_ROUTES:
        return {"description": "The page.", "content": {"text/plain": {}}}
    return {"description": "The answer.", "content": ANY | (STREAM if streams else {})}


def _error(status: int) -> dict:
    schema = {"$ref": "#/components/schemas/Error"}
    content = {"application/json": {"schema": schema}}
    return {"description": STATUSES[status], "content": content}
