"""Two sets of weights, and the tokens that a freshly started engine computes with each."""

import shutil
from pathlib import Path

from safetensors.torch import save_file
from server import Server, Wrong

from formats.checkpoint import CheckpointReader

OLD, NEW = 0, 1


class Weights:
    """Two sets of weights, each as a folder, as tensors and in a server that never changes."""

    def __init__(self, model: Path, scratch: Path, device: str, flags: list[str]) -> None:
        reader = CheckpointReader(model)
        old = {name: entry.read() for name, entry in reader.entries.items()}
        new = {
            name: each.flip(-1).contiguous() if ".layers." in name and each.ndim > 1 else each
            for name, each in old.items()
        }
        folder = scratch / "new"
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file(new, folder / "model.safetensors", metadata={"format": "pt"})
        self.folders = [str(model), str(folder)]
        self.tensors = [{name: t.to(device) for name, t in each.items()} for each in (old, new)]
        self._servers = [Server([each], flags) for each in self.folders]
        self._known: dict[tuple, list[int]] = {}
        self.digests = [self.digest(server) for server in self._servers]
        if self.digests[OLD] == self.digests[NEW]:
            raise Wrong("both sets of weights have the same digest")

    @staticmethod
    def digest(server: Server) -> str:
        return server.json("/weights/digest", method="GET")["total"]

    def tokens(self, which: int, given: list[int], count: int) -> list[int]:
        """Greedy tokens that an unchanged engine computes after the given ones."""
        key = which, *given
        if len(self._known.get(key, ())) < count:
            self._known[key] = self._servers[which].complete(given, count).tokens
        return self._known[key][:count]

    def explain(self, given: list[int], found: list[int], order: list[int], count: int) -> bool:
        """Return True if these tokens can result from sets of weights in use in this order.

        At each change the next set computes the KV pages of all earlier tokens again and continues.
        """
        rest = self.tokens(order[0], given, count)[: len(found)]
        if rest == found:
            return True
        if len(order) == 1:
            return False
        same = next(i for i, (a, b) in enumerate(zip(found, rest, strict=True)) if a != b)
        return any(
            self.explain(given + found[:i], found[i:], order[1:], count - i)
            for i in range(same, -1, -1)
        )

    def close(self) -> None:
        for server in self._servers:
            server.close()
