"""Routes for browsers: the chat page, the docs page, and the OpenAPI document."""

import base64
import functools
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from qserve.server.http.errors import json_response
from qserve.server.http.route_list import RouteList
from qserve.server.service import service_of

FOLDER = Path(__file__).parent
INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)

routes = RouteList()


@routes.read("/openapi.json")
async def openapi(request: Request) -> Response:
    # Imports the request models of all APIs, so only when the document is first requested.
    from qserve.server.page.openapi import document

    root, client = request.scope.get("root_path", ""), service_of(request).client
    found = document(client.max_model_len, client.vocab_size)
    return json_response(found | ({"servers": [{"url": root}]} if root else {}))


@routes.read("/")
async def chat(request: Request) -> Response:
    return _page("index.html")


@routes.read("/docs")
async def docs(request: Request) -> Response:
    return _page("docs.html")


@functools.cache
def _page(name: str) -> Response:
    """Return a page. Its security policy allows its inline script and style, and this server."""
    text = (FOLDER / name).read_text()
    hashes = {"script": "", "style": ""}
    for kind, content in INLINE.findall(text):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[kind] += f" 'sha256-{digest}'"
    policy = (
        f"default-src 'none'; connect-src 'self'; script-src{hashes['script']};"
        f" style-src{hashes['style']}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return Response(text, headers=headers, media_type="text/html; charset=utf-8")
