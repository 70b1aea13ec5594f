"""EngineParts: the components of an engine. `start` runs the startup stages in order."""

import logging
from dataclasses import dataclass

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine import media_limits, state_limits
from qserve.engine.distributed.executors import WaitingRanks
from qserve.engine.distributed.worker_group import WorkerGroup
from qserve.engine.fallback_limits import check_fallback
from qserve.engine.invariance_limits import check_invariance
from qserve.engine.kv_cache.block_pool import BlockPool
from qserve.engine.kv_cache.host_tier import HostTier
from qserve.engine.kv_cache.memory_split import split_memory
from qserve.engine.pending.peer_kv import PeerKv
from qserve.engine.pending.pending import GrammarQueue, PendingRequests
from qserve.engine.pending.remote_kv import RemoteKv, host_bytes
from qserve.engine.runner.memory import GIB, Fit
from qserve.engine.scheduling.itl_control import ItlControl
from qserve.engine.scheduling.policies import Policy, make_policy
from qserve.engine.scheduling.scheduler import Scheduler
from qserve.engine.sizes import largest_step, pick_length, read_model
from qserve.engine.step.step_input import StepInput
from qserve.lora.adapter_table import AdapterTable, make_table
from qserve.model.expert_loads import check_loads
from qserve.model.model_config import ModelConfig
from qserve.model.rank_shards import check_ranks
from qserve.model.tp_plan import place_experts

logger = logging.getLogger(__name__)

UNMEASURED_SNAPSHOTS = 32  # used if a flag gives the number of pages, so no memory is measured
HOST_SNAPSHOT_SHARE = 0.5  # fraction of the host tier's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """A loaded model and the components of its engine."""

    model: ModelConfig
    max_model_len: int  # at most the tokens that the KV cache holds
    num_positions: int  # length for which the model was loaded
    workers: WorkerGroup
    scheduler: Scheduler
    transfers: RemoteKv | PeerKv | None  # None: KV pages are not exchanged
    adapters: AdapterTable | None  # None: LoRA is disabled
    pending: PendingRequests

    @classmethod
    def start(cls, config: EngineConfig, ranks: WaitingRanks | None = None) -> "EngineParts":
        """Load the model. Raises InputError."""
        # Created before the model loads, so that a mistyped policy name fails early.
        policy = make_policy(config.scheduling_policy, prefill_batch_size=config.prefill_batch_size)
        model = read_model(config)
        if model.rounding is not None:
            logger.info("Quantizing while loading: %s", model.rounding.to_text())
        max_model_len = pick_length(config, model)
        model.check_length(max_model_len)
        state_limits.check_states(config, model)
        state_limits.check_compressed(config, model)
        check_fallback(config, model)
        check_invariance(config, model)
        state_limits.check_latents(config, model, max_model_len)
        placement = place_experts(model, config)
        stages = config.pipeline_parallel_size
        check_ranks(model, config.tensor_parallel_size, stages, placement)
        if placement is not None:
            logger.info("%s", placement.to_text())
        state_limits.check_context_parallel(config)
        check_loads(model, config.record_expert_loads)
        workers = WorkerGroup(config, model, max_model_len, ranks)
        try:
            return cls._around(workers, config, model, max_model_len, policy)
        except BaseException:
            workers.close()  # otherwise the ranks run for as long as the error is referenced
            raise

    @classmethod
    def _around(
        cls,
        workers: WorkerGroup,
        config: EngineConfig,
        model: ModelConfig,
        max_model_len: int,
        policy: Policy,
    ) -> "EngineParts":
        num_pages = _prepare(workers, config, max_model_len)
        host_pages, host_states = _host_tiers(workers, config, max_model_len)
        scheduler = Scheduler(
            BlockPool(num_pages, config.block_size, host_pages),
            max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
            max_num_batched_tokens=config.max_num_batched_tokens,
            policy=policy,
            states=state_limits.make_states(config, workers.runner),
            snapshots=state_limits.make_snapshots(config, workers.runner, host_states),
            prefix_caching=state_limits.finds_prefixes(config, workers.runner),
            pace=ItlControl(config.target_itl_ms / 1e3) if config.target_itl_ms else None,
            window=model.longest_window,
            encoder=media_limits.make_budget(
                config, model, looks_ahead=workers.runner.drafts_read_images
            ),
            forecasts=config.admission == "forecast",
            speculation=config.speculation
            and config.speculation.make_speculation(
                max_model_len=max_model_len, looks_ahead=workers.runner.looks_ahead
            ),
        )
        transfers = None
        if config.kv_transfer is not None:
            make_transfers = PeerKv.make if config.kv_transfer.is_peer else RemoteKv.make
            transfers = make_transfers(config, model, max_model_len, workers, scheduler)
        adapters = make_table(config, workers.adapters)
        return cls(
            model=model,
            max_model_len=_length_in_pages(model, max_model_len, num_pages * config.block_size),
            num_positions=max_model_len,
            workers=workers,
            scheduler=scheduler,
            transfers=transfers,
            adapters=adapters,
            pending=PendingRequests(
                scheduler, GrammarQueue(config.tokenizer_folder, model), adapters, transfers
            ),
        )


def _prepare(workers: WorkerGroup, config: EngineConfig, max_model_len: int) -> int:
    """Compile kernels, allocate KV pages and warm up. Returns the number of KV pages."""
    largest = largest_step(config, max_model_len, workers.runner.drafting)
    workers.compile_kernels(largest)
    fit = _pick_num_pages(workers, config, max_model_len, largest)
    num_pages = fit.num_pages
    num_tokens = num_pages * config.block_size
    logger.info(
        "KV cache: %d tokens in %d pages, %.2f GiB (%s)",
        num_tokens,
        num_pages,
        num_pages * workers.runner.bytes_per_page / GIB,
        workers.runner.kv_format,
    )
    text = "Maximum concurrency for %d tokens per request: %.2fx"
    logger.info(text, max_model_len, num_tokens / max_model_len)
    workers.prepare(fit, min(max_model_len, config.max_num_batched_tokens, num_tokens))
    return num_pages


def _length_in_pages(model: ModelConfig, max_model_len: int, num_tokens: int) -> int:
    """Return the length of a request that fits into KV pages for `num_tokens` tokens."""
    if num_tokens >= max_model_len or model.output_window:  # then an output needs few pages
        return max_model_len
    logger.warning(
        "Using max model len %d instead of %d: the KV cache holds no more tokens. For longer"
        " requests give it more memory (--gpu-memory-utilization, --kv-cache-memory; on a CPU"
        " --cpu-kv-cache-memory), or use --kv-cache-dtype int8",
        num_tokens,
        max_model_len,
    )
    return num_tokens


def _pick_num_pages(
    workers: WorkerGroup, config: EngineConfig, max_model_len: int, largest: StepInput
) -> Fit:
    runner = workers.runner
    if config.num_gpu_blocks_override is not None:
        of_memory = runner.chooses_snapshots
        num_snapshots = UNMEASURED_SNAPSHOTS if of_memory else runner.num_snapshots
        return Fit(config.num_gpu_blocks_override, num_snapshots)
    # Running requests can never use more pages than this.
    max_pages = config.max_num_seqs * -(-max_model_len // config.block_size)
    fit = workers.num_pages_that_fit(largest, max_pages)
    return fit._replace(num_pages=min(fit.num_pages, max_pages))


def _host_tiers(
    workers: WorkerGroup, config: EngineConfig, max_model_len: int
) -> tuple[HostTier | None, HostTier | None]:
    """Create the host tiers of KV pages and of state snapshots; None for a tier that is disabled.

    Raises InputError.
    """
    page_bytes, state_bytes = workers.bytes_per_page, workers.bytes_per_state
    room = host_bytes(config, page_bytes, state_bytes, max_model_len)
    if not state_limits.finds_prefixes(config, workers.runner):
        if config.kv_transfer is not None:
            raise InputError(
                "--kv-transfer-config",
                "the memory for KV pages has no room for a state snapshot; pages are useful only"
                " with one",
                "add memory for KV pages, or set --num-state-snapshots",
            )
        return None, None
    if not room:
        return None, None
    sizes = {"page_bytes": page_bytes, "state_bytes": state_bytes}
    num_pages, num_states = split_memory(
        room, **sizes, page_size=config.block_size, share=HOST_SNAPSHOT_SHARE
    )
    if state_bytes and num_states < 2:
        raise InputError(
            "--kv-offload-gb",
            f"{room / GIB:.3g} GiB do not hold two snapshots of states of {state_bytes / GIB:.3g}"
            " GiB, and pages on the host are useful only with them",
            "raise it, or remove it",
        )
    logger.info("KV pages on the host: %d, %.2f GiB", num_pages, num_pages * page_bytes / GIB)
    if num_states:
        size = num_states * state_bytes / GIB
        logger.info("State snapshots on the host: %d, %.2f GiB", num_states, size)
    workers.offload_pages(num_pages, num_states)
    return HostTier(num_pages), HostTier(num_states) if num_states else None
