"""WeightBroadcast: sends a trainer's tensors to a server by NCCL or gloo, also between hosts."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch

from qserve.engine.control.commands import WAIT, JoinWeightGroup
from qserve.engine.control.shared_tensors import PART_BYTES, NamedTensors, in_parts
from qserve.engine.control.weight_group import NCCL, WeightGroup
from qserve.training.send import post

GROUP = "weight_update_group"


class WeightBroadcast:
    """Process group of this trainer and one server. Use it in a `with` block.

    The server (`qserve serve --enable-admin-routes`) connects to `address`, where this process
    listens. After an error during an update, create a new group.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str,
        address: str = "127.0.0.1",
        port: int = 29600,
        backend: str = NCCL,
        device: torch.device | str = "cuda",
        name: str = GROUP,
        timeout: float = 300.0,
    ) -> None:
        """Create the group, and wait until the server has joined. Raises InputError.

        `device`: GPU of this process, for NCCL.
        """
        self._url, self._key, self._timeout, self._name = url.rstrip("/"), api_key, timeout, name
        self._posts = ThreadPoolExecutor(1)
        command = JoinWeightGroup(
            name=name,
            address=address,
            port=port,
            rank=1,
            world_size=2,
            backend=backend,
            timeout=timeout,
        )
        self._device = torch.device(device if backend == NCCL else "cpu")
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": name,
            "backend": backend,
            "timeout": timeout,
        }
        joined = self._posts.submit(self._post, "/init_weights_update_group", body)
        try:
            self._group = WeightGroup(command, 0, self._device)
        except Exception:
            joined.result()  # raises the server's error, if any, which is more precise
            raise
        joined.result()

    def __enter__(self) -> "WeightBroadcast":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(
        self,
        tensors: Mapping[str, torch.Tensor] | NamedTensors,
        *,
        version: str | int | None = None,
        mode: str = WAIT,
        digests: bool = True,
        part_bytes: int = PART_BYTES,
    ) -> str:
        """Replace all weights of the server. Returns the new version. Raises InputError.

        The arguments are as in `send_weights`.
        """
        named = tensors.items() if isinstance(tensors, Mapping) else tensors
        is_first = True
        for part, is_last in in_parts(named, part_bytes):
            body = {
                "names": [name for name, _ in part],
                "dtypes": [str(each.dtype).removeprefix("torch.") for _, each in part],
                "shapes": [list(each.shape) for _, each in part],
                "group_name": self._name,
                "is_first": is_first,
                "is_last": is_last,
                "weight_version": version,
                "mode": mode,
                "digests": digests,
            }
            reply = self._posts.submit(self._post, "/update_weights_from_distributed", body)
            for _, tensor in part:
                self._group.broadcast(tensor.detach().to(self._device).contiguous())
            version_now = reply.result()["weight_version"]
            is_first = False
        return version_now

    def close(self) -> None:
        """Destroy the group on the server."""
        self._posts.submit(
            self._post, "/destroy_weights_update_group", {"group_name": self._name}
        ).result()
        self._posts.shutdown()

    def _post(self, route: str, body: dict[str, Any]) -> dict:
        data = msgspec.json.encode(body)
        return post(self._url + route, data, self._key, 2 * self._timeout)
