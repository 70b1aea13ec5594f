"""Model list in Anthropic's form: the reply to GET /v1/models with the header anthropic-version."""

from datetime import UTC, datetime
from typing import Any

from qserve.server.http.errors import ApiError
from qserve.server.service import Service

DEFAULT_LIMIT, MAX_LIMIT = 20, 1000


def model_list(service: Service, query: dict[str, str]) -> dict[str, Any]:
    """Return one page of the list of model names and loaded adapters. Raises ApiError(400)."""
    names = [*service.model_names, *service.adapters.of_name]
    start, end = 0, len(names)
    if "after_id" in query:
        start = _place(names, query, "after_id") + 1
    if "before_id" in query:
        end = _place(names, query, "before_id")
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_LIMIT:
        raise ApiError(
            400,
            f"limit: expected 1 to {MAX_LIMIT}, found {limit[:50]!r}.",
            "Give such a number, or leave limit out.",
            "limit",
        )
    shown = names[start:end][: int(limit)]
    return {
        "data": [model_info(service, name) for name in shown],
        "has_more": len(shown) < len(names[start:end]),
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
    }


def model_info(service: Service, name: str) -> dict[str, Any]:
    """Return the description of one model. Raises ApiError(404)."""
    service.model.check_name(name)
    most = service.client.max_model_len
    return {
        "id": name,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": most,
        "max_tokens": most,
    }


def _place(names: list[str], query: dict[str, str], field: str) -> int:
    if query[field] not in names:
        raise ApiError(
            400,
            f"{field}: expected the id of a model of this server.",
            "GET /v1/models lists the ids.",
            field,
        )
    return names.index(query[field])
