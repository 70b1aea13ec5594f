"""send_weights: sends a trainer's tensors to a server on the same host, through shared memory."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping

import msgspec
import torch

from formats.errors import InputError
from qserve.engine.control.commands import WAIT
from qserve.engine.control.shared_tensors import (
    PART_BYTES,
    NamedTensors,
    in_parts,
    shared_tensors,
)

ROUTE = "/update_weights_from_ipc"


def send_weights(
    url: str,
    tensors: Mapping[str, torch.Tensor] | NamedTensors,
    *,
    api_key: str,
    version: str | int | None = None,
    mode: str = WAIT,
    digests: bool = True,
    part_bytes: int | None = PART_BYTES,
    timeout: float = 600.0,
) -> str:
    """Replace all weights of a server (`qserve serve --enable-admin-routes`).

    tensors: tensors by their names in save_pretrained; or an iterable that yields (name, tensor)
    part_bytes: size of the parts in which tensors are shared. The server copies a part to host
        memory before the next one. None: share all tensors together, and the server does not copy
        them
    mode, digests: as in /update_weights_from_ipc

    Tensors on a GPU of the server are shared by CUDA IPC, others through a file in shared memory.
    Returns the new version. Raises InputError if the server refuses; then its old weights stay.
    """
    named = tensors.items() if isinstance(tensors, Mapping) else tensors
    given = {"weight_version": version, "mode": mode, "digests": digests}
    is_first = True
    for part, is_last in in_parts(named, part_bytes):
        with shared_tensors(part) as shared:
            body = {"tensors": shared, "is_first": is_first, "is_last": is_last, **given}
            reply = post(url.rstrip("/") + ROUTE, msgspec.json.encode(body), api_key, timeout)
        is_first = False
    return reply["weight_version"]


def post(url: str, body: bytes, api_key: str, timeout: float) -> dict:
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, body, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        raise InputError(
            url, f"answered {error.code}: {_message(error.read())}", "see the server's log"
        ) from None
    except urllib.error.URLError as error:
        raise InputError(
            url, f"cannot be reached: {error.reason}", "start the server, or check the URL"
        ) from None


def _message(data: bytes) -> str:
    """Return the message in a server's error, or the start of any other reply."""
    try:
        return json.loads(data)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return data[:200].decode(errors="replace")
