"""Speculator: the runner's interface to speculative decoding (qserve/speculation)."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from qkernels.sampling.settings import Samples, SampleSettings
from qserve.engine.runner.graphs.cuda_graphs import StepGraphs
from qserve.engine.runner.graphs.step_buffers import GraphKey, StepOutputs
from qserve.engine.scheduling.plan import Drafting
from qserve.engine.step.device_step import Batch, DraftMedia
from qserve.engine.step.step_input import StepInput
from qserve.engine.step.transfer import HostCopy
from qserve.model.cache_spec import Cache, CacheSpec, KvFormat
from qserve.parallel.pipeline import Pipeline


class DraftedStep(Protocol):
    """Speculative work of one step: `fill_`, then the model runs, then `draw`, then `propose`."""

    tokens: HostCopy | None  # tokens of all rows that sample; set by `draw`
    num_emitted: HostCopy | None  # emitted tokens per chunk that samples; None: all; set by `draw`
    media: DraftMedia | None  # images of the step; set by the runner

    def fill_(self, pipeline: Pipeline | None = None) -> None:
        """Fill in tokens that only the device knows, and correct positions."""

    def draw(
        self,
        logits_SV: torch.Tensor,
        settings: SampleSettings,
        draw_rows: Callable[[torch.Tensor, SampleSettings], Samples],
        history_WV: torch.Tensor | None,
    ) -> Samples:
        """Sample all rows and verify the drafts."""

    def propose(self, outputs: StepOutputs) -> HostCopy | None:
        """Run the drafter. Returns its drafts [D, K] if the host needs them."""


class Speculator(Protocol):
    """Drafter of one worker, with its caches and the requests' tokens on the device."""

    @property
    def aux_layers(self) -> Sequence[int]:
        """Layers whose auxiliary hidden states the drafter reads."""

    @property
    def drafting(self) -> Drafting:
        """Maximum number of drafts of a step."""

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Possible numbers of rows of a decoding request."""

    @property
    def max_rows(self) -> int:
        """Maximum number of rows of a step whose requests have drafts."""

    @property
    def looks_ahead(self) -> bool:
        """True if the drafter's keys at a position also depend on the next token."""

    @property
    def reads_images(self) -> bool:
        """True if the drafter reads embeddings of images."""

    @property
    def caches(self) -> list[Cache]:
        """Caches of the drafter's layers."""

    @property
    def first_kv_heads(self) -> Sequence[int] | None:
        """This rank's first KV head in each of the drafter's layers; None: not known."""

    def cache_specs(self, kv_format: KvFormat) -> list[CacheSpec]:
        """Specs of the drafter's layers."""

    def bytes_per_page(self, kv_format: KvFormat) -> int:
        """Bytes of one page of the drafter's layers."""

    def allocate_pages(self, num_pages: int, kv_format: KvFormat) -> None:
        """Allocate the caches. They use the page numbers of the model's cache."""

    def begin(self, step: StepInput, batch: Batch, key: GraphKey | None) -> DraftedStep:
        """Prepare the speculative work of a step. `key`: CUDA graph in which the step runs."""

    def use_graphs(self, graphs: StepGraphs) -> None:
        """Run the speculative work of steps in CUDA graphs too."""

    @property
    def can_capture_next(self) -> bool:
        """True if a graph is left to capture while the engine is idle."""

    def capture_next(self) -> bool:
        """Capture one more graph. Returns False if none is left."""

    def close(self) -> None:
        """Free the CUDA graphs."""
