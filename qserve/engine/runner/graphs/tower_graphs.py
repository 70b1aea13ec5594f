"""TowerGraphs: CUDA graphs of a vision tower, one for each image size that occurs again.

A call of the tower for few patches is bound by kernel launches: 27 layers of nine kernels take more
time on the host than on the device. The first call of a size runs kernel by kernel; the second call
is captured.

B: images of one size. N: patches of an image. M: embeddings of an image.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from qserve.engine.runner.graphs.capture import capture
from qserve.multimodal.qwen_tower import GridPlan, QwenTower

MAX_PATCHES = 4096  # per call, an image of 1024 x 1024; larger calls keep the device busy
NUM_GRAPHS = 32  # maximum number of graphs, and of sizes that were seen once


class CallSize(NamedTuple):
    """Size of a call that a graph can replay: number of images, rows and columns of patches."""

    batch: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    plan: GridPlan  # its tables are read at each replay
    out_shape: torch.Size


class TowerGraphs:
    """A QwenTower that replays a CUDA graph for call sizes that occurred before.

    Graphs share their memory, inputs and outputs; they run one at a time.
    """

    def __init__(self, tower: QwenTower) -> None:
        self._tower = tower
        # in both dicts the most recently used size is last
        self._seen: dict[CallSize, None] = {}  # sizes that occurred once
        self._captured: dict[CallSize, _Captured] = {}
        self._pool: object = None
        self._patches: torch.Tensor | None = None
        self._embeddings: torch.Tensor | None = None

    @property
    def buffer_bytes(self) -> int:
        """Device memory of the inputs and outputs, which the first capture allocates."""
        return sum(self._sizes) * self._tower.dtype.itemsize

    def encode(self, patches_BNP: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Return embeddings [B, M, W], as QwenTower.encode does."""
        batch, count, _ = patches_BNP.shape
        size = CallSize(batch, rows, columns)
        if batch * count > MAX_PATCHES:
            return self._tower.encode(patches_BNP, rows, columns)
        captured = self._captured.pop(size, None)
        if captured is None:
            if size not in self._seen:
                self._note(size)
                return self._tower.encode(patches_BNP, rows, columns)
            del self._seen[size]
            captured = self._capture(patches_BNP, size)
        self._keep(size, captured)
        self._inputs(patches_BNP).copy_(patches_BNP)
        captured.graph.replay()
        return self._outputs(captured.out_shape).clone()

    def close(self) -> None:
        """Free all graphs and their memory. Later calls capture them again."""
        for captured in self._captured.values():
            captured.graph.reset()
        self._captured.clear()
        self._seen.clear()
        self._pool = self._patches = self._embeddings = None

    def _note(self, size: CallSize) -> None:
        """Record a size that occurs for the first time."""
        self._seen[size] = None
        if len(self._seen) > NUM_GRAPHS:
            del self._seen[next(iter(self._seen))]

    def _keep(self, size: CallSize, captured: _Captured) -> None:
        """Keep the graph that is used now. If there are too many, free the least recently used."""
        self._captured[size] = captured
        if len(self._captured) > NUM_GRAPHS:
            self._captured.pop(next(iter(self._captured))).graph.reset()

    def _capture(self, patches_BNP: torch.Tensor, size: CallSize) -> _Captured:
        tower, grid = self._tower, (size.rows, size.columns)
        plan = tower.plan(*grid)  # made outside the graph, because it copies tables to the device
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._allocate(patches_BNP.device)
        inputs = self._inputs(patches_BNP)
        graph = torch.cuda.CUDAGraph()
        with capture(graph, self._pool):
            rows_BMW = tower.encode(inputs, *grid)
            self._outputs(rows_BMW.shape).copy_(rows_BMW)
        return _Captured(graph, plan, rows_BMW.shape)

    def _allocate(self, device: torch.device) -> None:
        """Make the buffers that all graphs share."""
        in_count, out_count = self._sizes
        self._patches = torch.empty(in_count, dtype=self._tower.dtype, device=device)
        self._embeddings = torch.empty(out_count, dtype=self._tower.dtype, device=device)

    @property
    def _sizes(self) -> tuple[int, int]:
        """Values of the largest inputs and outputs."""
        tower = self._tower
        return MAX_PATCHES * tower.in_features, MAX_PATCHES * tower.out_features // tower.square

    def _inputs(self, patches_BNP: torch.Tensor) -> torch.Tensor:
        assert self._patches is not None
        return self._patches[: patches_BNP.numel()].view(patches_BNP.shape)

    def _outputs(self, shape: torch.Size) -> torch.Tensor:
        assert self._embeddings is not None
        return self._embeddings[: shape.numel()].view(shape)
