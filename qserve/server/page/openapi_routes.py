"""Table of the routes in the OpenAPI document, and the schemas of their errors."""

from qserve.server.admin.adapters import LoadAdapterRequest, UnloadAdapterRequest
from qserve.server.anthropic.errors import PREFIX as ANTHROPIC
from qserve.server.requests.anthropic.fields import CountTokensRequest, MessagesRequest
from qserve.server.requests.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    EmbedRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from qserve.server.requests.protocol import Body, ChatCompletionRequest, CompletionRequest
from qserve.server.requests.responses import ResponsesRequest
from qserve.server.requests.stored import (
    ConversationItems,
    ConversationRequest,
    ConversationUpdate,
)
from qserve.server.requests.tokenize import DetokenizeRequest, TokenizeRequest

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
ANTHROPIC_ERROR = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
        "request_id": {"type": "string"},
    },
    "required": ["type", "error", "request_id"],
}
STATUSES = {
    400: "The request is invalid; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The request comes from another site's web page, or its Host is unknown.",
    404: "The model or route does not exist.",
    408: "The body took too long to arrive, or the request exceeded its deadline.",
    413: "The body is too large.",
    415: "The Content-Type is not application/json, or there is a Content-Encoding.",
    429: "The rate limit is exceeded; see Retry-After.",
    500: "Internal server error.",
    503: "The server is busy or stopping; see Retry-After.",
    504: "The body took too long to arrive, or the request exceeded its deadline.",
    507: "The response store is full or cannot be written.",
    529: "The server is busy or stopping; see Retry-After.",
}
OF_BODIES = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
OF_STORED = (400, 401, 403, 404, 500, 503)
OF_MESSAGES = (400, 401, 403, 404, 413, 415, 429, 500, 504, 529)
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

# (path, method): summary, request model, whether the response may be a stream, error statuses
ROUTES: dict[tuple[str, str], tuple[str, type[Body] | None, bool, tuple[int, ...]]] = {
    ("/v1/completions", "post"): ("Complete prompts.", CompletionRequest, True, OF_BODIES),
    ("/v1/chat/completions", "post"): (
        "Complete a chat.",
        ChatCompletionRequest,
        True,
        OF_BODIES,
    ),
    ("/v1/responses", "post"): (
        "Create a response (OpenAI's Responses API).",
        ResponsesRequest,
        True,
        OF_BODIES,
    ),
    ("/v1/responses/input_tokens", "post"): (
        "Count the input tokens of a response.",
        ResponsesRequest,
        False,
        OF_BODIES,
    ),
    ("/v1/responses/{id}", "get"): ("Return a stored response.", None, False, OF_STORED),
    ("/v1/responses/{id}", "delete"): ("Delete a stored response.", None, False, OF_STORED),
    ("/v1/responses/{id}/input_items", "get"): (
        "List the input items of a stored response.",
        None,
        False,
        OF_STORED,
    ),
    ("/v1/conversations", "post"): (
        "Create a conversation (--response-store).",
        ConversationRequest,
        False,
        (*OF_BODIES, 507),
    ),
    ("/v1/conversations/{id}", "get"): ("Return a conversation.", None, False, OF_STORED),
    ("/v1/conversations/{id}", "post"): (
        "Replace the metadata of a conversation.",
        ConversationUpdate,
        False,
        (*OF_BODIES, 507),
    ),
    ("/v1/conversations/{id}", "delete"): ("Delete a conversation.", None, False, OF_STORED),
    ("/v1/conversations/{id}/items", "get"): (
        "List the items of a conversation.",
        None,
        False,
        OF_STORED,
    ),
    ("/v1/conversations/{id}/items", "post"): (
        "Append items to a conversation.",
        ConversationItems,
        False,
        (*OF_BODIES, 507),
    ),
    ("/v1/conversations/{id}/items/{item}", "get"): (
        "Return an item of a conversation.",
        None,
        False,
        OF_STORED,
    ),
    ("/v1/conversations/{id}/items/{item}", "delete"): (
        "Delete an item of a conversation.",
        None,
        False,
        OF_STORED,
    ),
    ("/v1/messages", "post"): (
        "Create a message (Anthropic's Messages API).",
        MessagesRequest,
        True,
        OF_MESSAGES,
    ),
    ("/v1/messages/count_tokens", "post"): (
        "Count the tokens of a conversation (Anthropic's Messages API).",
        CountTokensRequest,
        False,
        OF_MESSAGES,
    ),
    ("/v1/embeddings", "post"): ("Embed texts.", EmbeddingRequest, False, OF_BODIES),
    ("/v2/embed", "post"): ("Embed texts (Cohere's API).", EmbedRequest, False, OF_BODIES),
    **{
        (path, "post"): ("Classify texts.", ClassifyRequest, False, OF_BODIES)
        for path in ("/classify", "/v1/classify")
    },
    ("/pooling", "post"): (
        "Return pooled or per-token hidden states of texts.",
        PoolingRequest,
        False,
        OF_BODIES,
    ),
    **{
        (path, "post"): ("Score pairs of texts.", ScoreRequest, False, OF_BODIES)
        for path in ("/score", "/v1/score")
    },
    **{
        (path, "post"): ("Rank documents by relevance to a query.", RerankRequest, False, OF_BODIES)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    },
    ("/tokenize", "post"): ("Tokenize a prompt or chat.", TokenizeRequest, False, OF_BODIES),
    ("/detokenize", "post"): ("Detokenize token ids.", DetokenizeRequest, False, OF_BODIES),
    ("/reset_prefix_cache", "post"): (
        "Empty the prefix cache (--enable-cache-reset, or an operator's key).",
        None,
        False,
        (401, 404, 503),
    ),
    ("/v1/load_lora_adapter", "post"): (
        "Load a LoRA adapter from a folder in --lora-folder.",
        LoadAdapterRequest,
        False,
        OF_BODIES,
    ),
    ("/v1/unload_lora_adapter", "post"): (
        "Unload a LoRA adapter (--lora-folder).",
        UnloadAdapterRequest,
        False,
        OF_BODIES,
    ),
    ("/v1/models", "get"): (
        "List the names of the models and of the loaded adapters.",
        None,
        False,
        (401,),
    ),
    ("/v1/models/{name}", "get"): ("Describe one model.", None, False, (401, 404)),
    ("/health", "get"): ("Liveness of the engine.", None, False, (503,)),
    ("/ready", "get"): ("Readiness to accept requests.", None, False, (503,)),
    ("/ping", "get"): ("As /health.", None, False, (503,)),
    ("/ping", "post"): ("As /health.", None, False, (503,)),
    ("/version", "get"): ("Version of qserve.", None, False, (401,)),
    ("/load", "get"): ("Number of outputs running or queued.", None, False, (401,)),
    ("/metrics", "get"): ("Prometheus metrics.", None, False, (401,)),
}
TEXT_ROUTES = ("/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
OPEN_ROUTES = ("/health", "/ready", "/ping")
EMPTY_ROUTES = (*OPEN_ROUTES, "/reset_prefix_cache")


def error_schema(path: str) -> str:
    """Return the name of the error schema of a route."""
    return "AnthropicError" if path.startswith(ANTHROPIC) else "Error"
