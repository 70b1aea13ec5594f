"""Speculator: the device side of speculation: the drafter, its KV pages, and tables of tokens.

The tables have, for each running request, the newest token, the drafts, and the number of drafts
that the last verify rejected. The host plans a step as if all drafts were accepted. The step
(speculative_step.py) fills in the tokens, and moves positions back by the rejected drafts.

Suffixes of tensor names: N rows of the tables, K drafts.
"""

from dataclasses import replace

import torch

from qkernels.drafts.chunks import DraftTables
from qkernels.gpu.launch import launches_nothing
from qserve.config import EngineConfig
from qserve.engine.runner.graphs.cuda_graphs import StepGraphs
from qserve.engine.runner.graphs.step_buffers import GraphKey
from qserve.engine.scheduling.plan import Drafting
from qserve.engine.step.device_step import Batch
from qserve.engine.step.step_input import StepInput
from qserve.engine.step.transfer import all_to_device, to_device
from qserve.model.cache_spec import Cache, CacheSpec, KvFormat, make_caches
from qserve.model.decoder import Decoder
from qserve.parallel.ranks import Ranks
from qserve.speculation.acceptance import synthetic_rates
from qserve.speculation.config import SpeculativeConfig
from qserve.speculation.drafter import BuildContext, DeviceDrafter, build_device_drafter
from qserve.speculation.graphs import SpeculativeGraphs
from qserve.speculation.speculative_step import Rows, SpeculativeStep, State, starts


class Speculator:
    """The device side of speculation of one worker."""

    def __init__(
        self,
        config: SpeculativeConfig,
        drafter: DeviceDrafter | None,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self.drafter = drafter
        probs = None
        if drafter is not None and config.draws_drafts:
            shape = max_num_seqs + 1, config.most_tokens, vocab_size
            probs = torch.zeros(shape, dtype=torch.float32, device=device)
        self.device = device
        self.state = State(
            config=config,
            drafter=drafter,
            # the last row is for padding
            tables=DraftTables(
                tokens_NK1=torch.zeros(
                    max_num_seqs + 1, 1 + config.most_tokens, dtype=torch.int64, device=device
                ),
                rejected_N=torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device),
            ),
            max_model_len=max_model_len,
            page_size=page_size,
            draft_probs=probs,
            synthetic_rates_K=synthetic_rates(config, device),
        )
        self.graphs: SpeculativeGraphs | None = None

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return () if self.drafter is None else self.drafter.aux_layers

    @property
    def drafting(self) -> Drafting:
        """Drafting with the maximum number of drafts."""
        has_drafter = self.drafter is not None
        return Drafting(self.state.config.most_tokens if has_drafter else 0, has_drafter)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Possible numbers of rows of a decoding request."""
        return tuple(1 + count for count in (0, *self.state.config.depths))

    @property
    def max_rows(self) -> int:
        """Maximum number of rows of a step with drafts."""
        return self.state.config.max_rows

    @property
    def looks_ahead(self) -> bool:
        return self.drafter is not None and self.drafter.looks_ahead

    @property
    def reads_images(self) -> bool:
        return self.drafter is not None and self.drafter.reads_images

    @property
    def caches(self) -> list[Cache]:
        """Caches of the drafter's layers."""
        return self.state.caches

    def bytes_per_page(self, kv_format: KvFormat) -> int:
        """Return the bytes of one page, for all of the drafter's layers."""
        return sum(spec.bytes_per_page for spec in self.cache_specs(kv_format))

    def allocate_pages(self, num_pages: int, kv_format: KvFormat) -> None:
        """Allocate the drafter's pages. They have the same numbers as the model's pages."""
        specs = self.cache_specs(kv_format)
        self.state.caches[:] = make_caches(specs, num_pages, 0, self.device)

    @property
    def first_kv_heads(self) -> tuple[int, ...] | None:
        """This rank's first KV head in each of the drafter's layers; None: not known."""
        return () if self.drafter is None else self.drafter.first_kv_heads

    def cache_specs(self, kv_format: KvFormat) -> list[CacheSpec]:
        """Return the specs of the drafter's layers."""
        mixers = () if self.drafter is None else self.drafter.attentions
        # Only the model's checkpoint has static scales.
        kv_format = replace(kv_format, static_scales=False)
        return [mixer.cache_spec(kv_format, self.state.page_size) for mixer in mixers]

    def begin(self, step: StepInput, batch: Batch, key: GraphKey | None) -> SpeculativeStep:
        """Prepare the speculative part of a step. `key`: CUDA graph of the step; None: eager."""
        rows = step.draft_rows
        if self.graphs is not None and key is not None and rows.is_uniform and not key.is_chunk:
            return self.graphs.begin(key, step, batch)
        found = all_to_device([getattr(rows, name) for name in Rows.ARRAYS], self.device)
        found = Rows(
            **dict(zip(Rows.ARRAYS, found, strict=True)),
            logits_rows_S=to_device(step.logits_rows_S, self.device),
            starts_D1=starts(len(rows.chunk_D), self.device),
            max_sampled=rows.max_sampled,
            # If launches are only recorded, act as in a step with unknown tokens.
            has_unknown=launches_nothing() or bool(rows.known_R.sum() < step.num_tokens),
            has_pending=not rows.known_R.all(),
        )
        return SpeculativeStep(self.state, found, rows, batch)

    def use_graphs(self, graphs: StepGraphs) -> None:
        """Run the speculative part of steps in CUDA graphs as well, if the method supports it."""
        if self.drafter is not None and not self.state.config.judges_by_row:
            self.graphs = SpeculativeGraphs(self.state, graphs, self.device)

    @property
    def can_capture_next(self) -> bool:
        """True if a graph is left to capture while idle."""
        return self.graphs is not None and self.graphs.can_capture_next

    def capture_next(self) -> bool:
        """Capture one more graph. Returns False if none is left."""
        return self.graphs is not None and self.graphs.capture_next()

    def close(self) -> None:
        """Free the CUDA graphs."""
        if self.graphs is not None:
            self.graphs.close()


def make_speculator(
    config: SpeculativeConfig,
    engine: EngineConfig,
    target: Decoder,
    *,
    max_model_len: int,
    ranks: Ranks,
) -> Speculator:
    """Create the speculator of one rank.

    Each rank that samples has a whole drafter; only `mtp` is sharded like the model.
    """
    context = BuildContext(
        config=config,
        target=target,
        target_folder=engine.model,
        tokenizer_folder=engine.tokenizer_folder,
        device=target.device,
        dtype=target.dtype,
        max_model_len=max_model_len,
        block_size=engine.block_size,
        kernels=engine.kernels,
        ranks=ranks,
        activation_bits=engine.activation_bits,
        dummy_seed=engine.seed if engine.load_format == "dummy" else None,
    )
    return Speculator(
        config,
        build_device_drafter(context) if target.head is not None else None,
        vocab_size=target.config.vocab_size,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=max_model_len,
        page_size=engine.block_size,
        device=target.device,
    )
