"""Routes for stored responses and conversations. Without --response-store they answer 404."""

import secrets
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

from starlette.requests import Request
from starlette.responses import Response

from qserve.server.http.api_key import key_digest
from qserve.server.http.body import Body
from qserve.server.http.clients import client_key
from qserve.server.http.errors import ApiError, json_response
from qserve.server.http.large_response import LargeResponse
from qserve.server.http.route_list import RouteList
from qserve.server.requests.stored import (
    AnyStored,
    ConversationItems,
    ConversationRequest,
    ConversationUpdate,
    item_fields,
    page_limit,
    read_stored,
)
from qserve.server.service import service_of
from qserve.server.store.items import stored_item
from qserve.server.store.records import (
    ASCENDING,
    CONVERSATION,
    DESCENDING,
    RESPONSE,
    Page,
    Records,
)

ID_BYTES = 24
DELETE = ("DELETE",)
Arguments = ParamSpec("Arguments")

routes = RouteList()


@routes.read("/v1/responses/{id}")
async def get_response(request: Request) -> Response:
    if request.query_params.get("stream", "false") != "false":
        raise ApiError(
            400, "stream: a stored response cannot be streamed.", "Leave stream out.", "stream"
        )
    return await _json(request, Records.response, request.path_params["id"])


@routes.route("/v1/responses/{id}", DELETE)
async def delete_response(request: Request) -> Response:
    name = request.path_params["id"]
    await _run(request, Records.delete, name, RESPONSE)
    return json_response({"id": name, "object": "response", "deleted": True})


@routes.read("/v1/responses/{id}/input_items")
async def input_items(request: Request) -> Response:
    return await _json(request, Records.input_items, request.path_params["id"], _page(request))


@routes.post("/v1/conversations")
async def create_conversation(request: Request) -> Response:
    asked = await _read(request, ConversationRequest)
    name = f"conv_{secrets.token_hex(ID_BYTES)}"
    items = [stored_item(item) for item in item_fields(asked.items)]
    return await _json(request, Records.create_conversation, name, asked.metadata or {}, items)


@routes.read("/v1/conversations/{id}")
async def get_conversation(request: Request) -> Response:
    return await _json(request, Records.conversation, request.path_params["id"])


@routes.post("/v1/conversations/{id}")
async def update_conversation(request: Request) -> Response:
    asked = await _read(request, ConversationUpdate)
    name = request.path_params["id"]
    return await _json(request, Records.update_conversation, name, asked.metadata)


@routes.route("/v1/conversations/{id}", DELETE)
async def delete_conversation(request: Request) -> Response:
    name = request.path_params["id"]
    await _run(request, Records.delete, name, CONVERSATION)
    return json_response({"id": name, "object": "conversation.deleted", "deleted": True})


@routes.read("/v1/conversations/{id}/items")
async def get_items(request: Request) -> Response:
    return await _json(request, Records.page, request.path_params["id"], _page(request))


@routes.post("/v1/conversations/{id}/items")
async def add_items(request: Request) -> Response:
    asked = await _read(request, ConversationItems)
    items = [stored_item(item) for item in item_fields(asked.items)]
    return await _json(request, Records.add_items, request.path_params["id"], items)


@routes.read("/v1/conversations/{id}/items/{item}")
async def get_item(request: Request) -> Response:
    path = request.path_params
    return await _json(request, Records.item, path["id"], path["item"])


@routes.route("/v1/conversations/{id}/items/{item}", DELETE)
async def delete_item(request: Request) -> Response:
    path = request.path_params
    return await _json(request, Records.delete_item, path["id"], path["item"])


async def _json(
    request: Request,
    operation: Callable[Concatenate[Records, str, Arguments], bytes],
    *arguments: Arguments.args,
    **options: Arguments.kwargs,
) -> Response:
    """Reply with the JSON that an operation on the client's records returns."""
    return LargeResponse([await _run(request, operation, *arguments, **options)])


async def _run(
    request: Request,
    operation: Callable[Concatenate[Records, str, Arguments], Any],
    *arguments: Arguments.args,
    **options: Arguments.kwargs,
) -> Any:
    store = service_of(request).store
    if store is None:
        raise ApiError(
            404,
            "This server stores nothing: it was started without --response-store.",
            "Restart it with this flag.",
        )
    return await store.run(operation, key_digest(request.scope), *arguments, **options)


async def _read(request: Request, kind: type[AnyStored]) -> AnyStored:
    """Read a request's body, within the server's limits. Raises ApiError."""
    service, client = service_of(request), client_key(request.scope)
    with Body(request, client, service) as body:
        content = await body.read()
        return await service.preparation.run(client, read_stored, content, kind)


def _page(request: Request) -> Page:
    query = request.query_params
    order = query.get("order", DESCENDING)
    if order not in (ASCENDING, DESCENDING):
        raise ApiError(
            400,
            f"order: expected asc or desc, found {order[:50]!r}.",
            "Use one of the two, or leave order out.",
            "order",
        )
    return Page(after=query.get("after"), limit=page_limit(query, 20), order=order)
