"""ModelRunner: launches steps on the device.

`launch()` returns a handle immediately; `StepHandle.result()` waits for the sampled tokens. Input
tokens that the host does not know yet are read on the device, from the samples of the in-flight
step.
"""

import functools
from dataclasses import replace

import torch

from qkernels.moe.experts import PreparedExperts
from qserve.config import EngineConfig
from qserve.engine.runner.encoder import Encoder
from qserve.engine.runner.graphs.cuda_graphs import CHUNK_SIZES, LONG_CHUNK_SIZES, StepGraphs
from qserve.engine.runner.graphs.media_buffers import MediaBuffers
from qserve.engine.runner.graphs.step_buffers import GraphKey, StepOutputs
from qserve.engine.runner.layer_caches import LayerCaches
from qserve.engine.runner.microbatches import microbatches
from qserve.engine.runner.pooling import launch_pooling
from qserve.engine.runner.prompt_logprobs import SLICE_BYTES, launch_prompt_logprobs
from qserve.engine.runner.sampler import Sampler
from qserve.engine.runner.senders import Senders
from qserve.engine.runner.speculator import DraftedStep, Speculator
from qserve.engine.runner.step_handle import LaunchedForward, StepHandle
from qserve.engine.runner.warm_up import warm_up_shapes
from qserve.engine.scheduling.plan import Drafting
from qserve.engine.step.context_parallel import divide, is_divided
from qserve.engine.step.device_step import Batch, BatchForm
from qserve.engine.step.split_step import long_pairs
from qserve.engine.step.step_input import StepInput
from qserve.engine.step.transfer import to_device
from qserve.lora.slot_memory import SlotMemory
from qserve.model.cache_spec import Cache, StepLimits, WarmUpShape
from qserve.model.decoder import Decoder
from qserve.model.kv_format import pick_kv_format
from qserve.model.layer_kinds import sample_of_layers
from qserve.parallel.ranks import ALONE, Ranks


class ModelRunner:
    """A decoder, its caches, and the in-flight step."""

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        device: torch.device,
        speculator: Speculator | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.decoder = decoder
        self.speculator = speculator
        self.config = config
        self.device = device
        self._ranks = ranks
        self.kv_format = pick_kv_format(config.kv_cache_dtype, decoder, device)
        page_size = config.block_size
        # maximum number of rows of a verification, which are not applied to states; 0: no drafts
        self.most_rows = 0 if speculator is None else max(speculator.row_counts)
        self.cache_specs = [
            layer.attention.cache_spec(self.kv_format, page_size).with_drafts(self.most_rows)
            for layer in decoder.layers
        ]
        self.layer_caches = LayerCaches(
            self.cache_specs,
            self.kv_format,
            device,
            speculator=speculator,
            most_rows=self.most_rows if self.has_states else 0,
        )
        # One state slot per request of a step, then the slots of snapshots. If memory determines
        # the number of snapshots, Worker.prepare sets it.
        self.num_state_slots = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.num_snapshots = 0
        if config.enable_prefix_caching:
            self.num_snapshots = config.num_state_snapshots or 0
        self._under_way: LaunchedForward | None = None
        self.sampler = Sampler(config.max_num_seqs, decoder.config.vocab_size, device)
        self.graphs: StepGraphs | None = None
        self.senders = Senders()  # of pages and states to other engines; set later
        self.adapters: SlotMemory | None = None  # set by the worker
        self.encoder: Encoder | None = None  # encodes media; set by the worker
        # Layers whose hidden states the drafter reads. Only the first stage has a drafter.
        self.aux_layers = () if speculator is None else speculator.aux_layers

    @property
    def drafting(self) -> Drafting | None:
        """Maximum number of drafts of a step; None without speculation."""
        return None if self.speculator is None else self.speculator.drafting

    @property
    def looks_ahead(self) -> bool:
        """True if the contents of a page also depend on the token after it."""
        return self.speculator is not None and self.speculator.looks_ahead

    @property
    def drafts_read_images(self) -> bool:
        """True if a drafter reads embeddings of images."""
        return self.speculator is not None and self.speculator.reads_images

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page in all layers, including the drafter's."""
        size = sum(spec.bytes_per_page for spec in self.cache_specs)
        if self.speculator is not None:
            size += self.speculator.bytes_per_page(self.kv_format)
        return size

    @property
    def bytes_of_states(self) -> int:
        """Bytes of all state slots in all layers, including slots of snapshots."""
        return (self.num_state_slots + self.num_snapshots) * self.bytes_per_state

    @functools.cached_property
    def bytes_per_state(self) -> int:
        """Bytes of one state slot in all layers."""
        return sum(spec.bytes_per_slot for spec in self.cache_specs)

    @functools.cached_property
    def has_states(self) -> bool:
        """True if a layer keeps a recurrent state per request."""
        return self.bytes_per_state > 0

    @property
    def chooses_snapshots(self) -> bool:
        """True if the available memory determines the number of snapshots."""
        config = self.config
        is_asked_for = config.enable_prefix_caching and config.num_state_snapshots is None
        return is_asked_for and self.has_states

    @functools.cached_property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Token counts of the chunk graphs."""
        has_experts = any(
            isinstance(weight, PreparedExperts) for weight, _ in self.decoder.products()
        )
        return LONG_CHUNK_SIZES if has_experts or self.has_states else CHUNK_SIZES

    @functools.cached_property
    def batch_form(self) -> BatchForm:
        """Which optional tensors a batch has. This depends on the layers' caches."""
        rules = (spec.split_rule for spec in self.cache_specs)
        divides = any(spec.divides_decodes for spec in self.cache_specs)
        return BatchForm(
            with_states=self.has_states,
            split_rule=next((rule for rule in rules if rule is not None), None),
            page_size=self.config.block_size,
            decode_query_len=max(1, self.most_rows) if divides else 0,
        )

    @property
    def deferred_bytes(self) -> int:
        """Bytes of device memory that may still be allocated later, outside of steps."""
        of_encoder = 0 if self.encoder is None else self.encoder.deferred_bytes
        of_layer = max((spec.deferred_bytes for spec in self.cache_specs), default=0)
        return self.sampler.history.deferred_bytes + SLICE_BYTES + of_encoder + of_layer

    def allocate_pages(self, num_pages: int) -> None:
        """Allocate the KV pages and, if the model has them, the states."""
        self.layer_caches.allocate(num_pages, self.num_state_slots + self.num_snapshots)

    @property
    def caches(self) -> list[Cache]:
        """The caches of the decoder's layers."""
        return self.layer_caches.layers

    def close_graphs(self) -> None:
        """Free every CUDA graph."""
        for each in (self.graphs, self.speculator):
            if each is not None:
                each.close()
        if self.encoder is not None:
            self.encoder.close_graphs()
        self.graphs = None

    def sample(self) -> "ModelRunner":
        """Return a runner with the fewest layers that launch every kernel.

        It shares weights and KV pages with this runner. Its steps are not divided among ranks, so
        its largest step needs as much memory as one that cannot be divided.
        """
        decoder, numbers = sample_of_layers(self.decoder)
        ranks = replace(self._ranks, context=None)
        runner = ModelRunner(decoder, self.config, self.device, self.speculator, ranks)
        runner.layer_caches.layers = [self.caches[number] for number in numbers if self.caches]
        runner.layer_caches.covered = self.layer_caches.covered
        runner.adapters, runner.aux_layers = self.adapters, self.aux_layers
        return runner

    def warm_up_shapes(self, max_num_seqs: int, max_model_len: int) -> list[WarmUpShape]:
        """Return step shapes that together launch every kernel that steps can launch."""
        communicator, model = self._ranks.communicator, self.decoder.config
        sums = []
        if communicator is not None:
            sums = communicator.row_boundaries(model.hidden_size, self.decoder.dtype)
        limits = StepLimits(
            max_tokens=min(max_model_len, self.config.max_num_batched_tokens),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        specs, adapters = self.cache_specs, self.adapters
        return list(warm_up_shapes(self.decoder, specs, limits, sums=sums, adapters=adapters))

    def check_graphs(self) -> None:
        """Raise InputError if a cache is read by plain torch, which CUDA graphs do not support."""
        for spec in dict.fromkeys(self.cache_specs):
            spec.check_graphs(self.decoder.dtype, self.device.type)

    @torch.inference_mode()
    def capture_graphs(self, max_num_seqs: int, max_model_len: int) -> None:
        """Create the CUDA graphs of steps. KV pages must be at their final addresses."""
        longest, speculator = self.config.max_seq_len_to_capture, self.speculator
        pipeline = self._ranks.pipeline  # ranks without a head have no whole steps
        self.graphs = StepGraphs(
            self._captured,
            warm_up=self.sample().forward_logits,
            counts=(1,) if speculator is None else speculator.row_counts,
            max_rows=0 if speculator is None else speculator.max_rows,
            max_num_seqs=max_num_seqs,
            max_num_tokens=self.config.max_num_batched_tokens,
            max_context_len=max_model_len if longest is None else min(longest, max_model_len),
            page_size=self.config.block_size,
            device=self.device,
            with_adapters=self.adapters is not None,
            with_states=self.has_states,
            with_rope_shifts=speculator is not None
            and self.encoder is not None
            and self.encoder.has_axes,
            chunk_sizes=self.chunk_sizes,
            decode_query_len=self.batch_form.decode_query_len,
            media=self.media_buffers(),
            in_step=self._ranks.are_many,
            with_whole=speculator is None and pipeline is None and self.device.type == "cuda",
        )
        if speculator is not None and pipeline is None:
            speculator.use_graphs(self.graphs)

    def media_buffers(self) -> MediaBuffers | None:
        """Create input buffers for graphs of steps with media. None: such steps use no graph."""
        if self.encoder is None or self.encoder.is_mutual:
            return None
        if self.speculator is not None or self._ranks.pipeline is not None:
            return None
        most = min(self.chunk_sizes[-1], self.config.max_num_batched_tokens)
        return self.encoder.make_buffers(self.decoder, most)

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture one more graph while the engine is idle. Returns False if none is left."""
        if self.graphs is None:
            return False
        speculator = self.speculator
        return self.graphs.capture_next() or (speculator is not None and speculator.capture_next())

    @property
    def can_capture_next(self) -> bool:
        """True if a graph is left to capture."""
        graphs, speculator = self.graphs, self.speculator
        if graphs is None or graphs.num_captured < graphs.num_keys:
            return graphs is not None
        return speculator is not None and speculator.can_capture_next

    @torch.inference_mode()
    def launch(self, step: StepInput) -> StepHandle:
        """Start a step on the device. Does not wait for it."""
        key = self.graph_key_for(step, whole=True)
        if key is None:
            self.launch_forward(step)
            return self.launch_sampling(step)
        with self.senders.around_forward(self.layer_caches.num_of_drafter):
            self._move(step)
            tokens = self.graphs.replay_whole(key, step, self.sampler.last_samples)
        self.sampler.last_samples = self.graphs.whole.samples_R
        return StepHandle(tokens=tokens)

    @torch.inference_mode()
    def launch_forward(self, step: StepInput) -> None:
        """Start the forward pass of a step. Call `launch_sampling` next, before another step.

        On a rank without logits, `launch_sampling` then does nothing.
        """
        if self._ranks.exchange is not None:
            self._ranks.exchange.begin(step.num_tokens)
        with self.senders.around_forward(self.layer_caches.num_of_drafter):
            self._launch_forward(step)

    def _move(self, step: StepInput) -> None:
        """Start the copies of pages and states that a step needs first, and send states."""
        self.layer_caches.move(step)
        self.senders.send_states()

    def _launch_forward(self, step: StepInput) -> None:
        self._move(step)
        prompts = pools = None
        key = self.graph_key_for(step)
        if key is not None:
            batch = self.graphs.fill_(key, step)
            drafting = self._fill_pending(step, batch, key)
            if key.has_media:
                self.encoder.fill_(self.graphs.media, batch, step)
            outputs = self.graphs.replay(key)
            if outputs is None:
                return
            logits_SV = outputs.logits_SV
            if not key.is_chunk and step.num_sampled < step.num_requests:
                logits_SV = logits_SV[to_device(step.logits_rows_S, self.device)]
            logits_SV = logits_SV[: step.num_sampled]
        else:
            step, batch = self.own_batch(step)
            drafting = self._fill_pending(step, batch)
            if step.has_media:
                batch, media = self.encoder.with_media(batch, step)
                if drafting is not None:
                    drafting.media = media
            outputs = self.forward_logits(batch, step)
            if outputs is None:
                return
            logits_SV, hidden_TC = outputs.logits_SV, outputs.hidden_TC
            if step.prompt_rows is not None:
                prompts = launch_prompt_logprobs(self.decoder.logits, hidden_TC, step.prompt_rows)
            if step.pool_rows is not None:
                pools = launch_pooling(self.decoder, hidden_TC, step.pool_rows)
        done = None
        if step.awaits_masks and self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        self._under_way = LaunchedForward(outputs, logits_SV, prompts, pools, drafting, done)

    def graph_key_for(self, step: StepInput, *, whole: bool = False) -> GraphKey | None:
        """Return the key of the graph for a step's forward pass; None: the step uses no graph.

        `whole`: look for a graph of the whole step.
        """
        needs_hidden = step.prompt_rows is not None or step.pool_rows is not None
        if self.graphs is None or needs_hidden or self._splits(step):
            return None
        if self._is_divided(step):
            return None
        return self.graphs.key_for(step, whole=whole)

    def _splits(self, step: StepInput) -> bool:
        """Return True if the step is faster split (split_step.py) than in a CUDA graph."""
        rule = self.batch_form.split_rule
        return rule is not None and long_pairs(step, rule) >= rule.pairs_of_graph

    @property
    def is_computing(self) -> bool:
        """True while the device runs a forward pass whose step awaits masks. False on a CPU."""
        under_way = self._under_way
        return under_way is not None and under_way.done is not None and not under_way.done.query()

    @torch.inference_mode()
    def launch_sampling(self, step: StepInput) -> StepHandle:
        """Start sampling for the step of `launch_forward`. `step` may now have its masks."""
        forward, self._under_way = self._under_way, None
        if forward is None:
            return StepHandle()
        with self.senders.around_sampling():
            return self.sampler.launch(step, forward)

    @property
    def _draws(self) -> bool:
        """True if this rank samples. Every rank of the first pipeline stage samples."""
        return self.decoder.head is not None

    def _hidden(
        self, step: StepInput | None, batch: Batch
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run Decoder.forward_with_aux, in microbatches if pipeline stages can overlap them."""
        pipeline = self._ranks.pipeline
        batch = batch.with_rope_positions()
        if pipeline is None:
            batch = self.layer_caches.advance_(batch)
            self._adapt(batch)
            return self.decoder.forward_with_aux(
                batch.token_ids_T, batch, self.caches, self.aux_layers
            )
        # rows that a verification may have; without states it may be divided
        whole = 0 if self.layer_caches.covered is None else self.most_rows
        parts = [] if step is None else microbatches(step, pipeline, whole)
        batches = [part.batch_of(batch, self.batch_form) for part in parts] or [batch]
        batches = [self.layer_caches.advance_(each) for each in batches]
        token_ids = [each.token_ids_T for each in batches]
        return self.decoder.forward_parts(
            token_ids, batches, self.caches, self.aux_layers, self._adapt
        )

    def _captured(self, batch: Batch) -> StepOutputs | None:
        """`forward_logits` without unused outputs, since a graph keeps its outputs allocated."""
        outputs = self.forward_logits(batch)
        if outputs is None:
            return None
        if self.speculator is None or not self.speculator.drafting.runs_drafter:
            return replace(outputs, hidden_TC=None)
        return outputs

    def forward_logits(self, batch: Batch, step: StepInput | None = None) -> StepOutputs | None:
        """Compute the logits of the rows that sample. Returns None on a rank without logits.

        `step`: the step of the batch; if given, microbatches may be used.
        """
        hidden_TC, aux_states = self._hidden(step, batch)
        if not self._draws:
            return None
        logits_SV = self.decoder.logits(hidden_TC[batch.logits_rows_S])
        return StepOutputs(logits_SV=logits_SV, hidden_TC=hidden_TC, aux_states=aux_states)

    def batch_of(self, step: StepInput) -> Batch:
        """Copy a step to the device."""
        return Batch.of(step, self.device, self.batch_form)

    def own_batch(self, step: StepInput) -> tuple[StepInput, Batch]:
        """Return a step and its batch, or this rank's part of both if ranks divide the step."""
        context, least = self._ranks.context, self.config.prefill_context_parallel_min_tokens
        divided = None if context is None else divide(step, context.rank, context.size, least)
        exchange = None
        if divided is not None:
            step, exchange = divided.step, divided.exchange(context, self.device)
        batch = self.batch_of(step)
        on_written = None
        sender = self.senders.pages
        if sender is not None and sender.is_sending:
            on_written = sender.send_layer
        if exchange is None and on_written is None:
            return step, batch
        return step, replace(batch, exchange=exchange, on_written=on_written)

    def _is_divided(self, step: StepInput) -> bool:
        """Return True if ranks divide the step."""
        context, least = self._ranks.context, self.config.prefill_context_parallel_min_tokens
        return context is not None and is_divided(step, context.size, least)

    def _fill_pending(
        self, step: StepInput, batch: Batch, key: GraphKey | None = None
    ) -> DraftedStep | None:
        """Fill in tokens of the in-flight step, which the host does not know yet.

        Returns the step's speculative work, or None.
        """
        if step.draft_rows is not None and self.speculator is not None:
            drafting = self.speculator.begin(step, batch, key)
            drafting.fill_(self._ranks.pipeline)
            return drafting
        if self._draws:
            self.sampler.fill_pending_(step, batch.token_ids_T)
        return None

    @torch.inference_mode()
    def logits(self, step: StepInput) -> torch.Tensor:
        """Return float32 logits [T, V] after every token of a step. No token may be pending."""
        if self._ranks.exchange is not None:
            self._ranks.exchange.begin(step.num_tokens)
        self.layer_caches.move(step)
        batch = self.batch_of(step)
        if not step.has_media:
            hidden_TC, _ = self._hidden(step, batch)
        else:
            with self.encoder.borrowed():
                batch, _ = self.encoder.with_media(batch, step)
                hidden_TC, _ = self._hidden(step, batch)
        return self.decoder.logits(hidden_TC).float() if self._draws else hidden_TC

    @torch.inference_mode()
    def compute_for_others(self) -> None:
        """Take part, without own tokens, in a step of other engines that share the experts."""
        if self._ranks.exchange.begin(0):
            self.decoder.compute_for_others()

    def _adapt(self, batch: Batch) -> None:
        """Set the adapter of each row for the decoder's linears."""
        if self.adapters is not None:
            self.adapters.rows.slots_T = batch.adapter_slots_T
