"""Checks of settings that do not work together, or not with recurrent states or latent attention.

A state summarizes all tokens before it. Features that share a prefix or move a request need copies
of states. Latents are stored in pages, like keys.
"""

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.kv_cache.host_tier import HostTier
from qserve.engine.kv_cache.state_slots import StatePool
from qserve.engine.kv_cache.state_snapshots import StateSnapshots
from qserve.engine.runner.memory import GIB
from qserve.engine.runner.model_runner import ModelRunner
from qserve.model.model_config import ModelConfig
from qserve.parallel.pipeline import stage_layers

logger = logging.getLogger(__name__)


class Limit(NamedTuple):
    flag: str
    is_asked_for: Callable[[EngineConfig], bool]
    reason: str


LIMITS = (
    Limit(
        "--kv-transfer-config with --num-state-snapshots 0",
        lambda config: config.kv_transfer is not None and config.num_state_snapshots == 0,
        "pages are useful only with state snapshots",
    ),
    Limit(
        "--prefill-context-parallel-size",
        lambda config: config.prefill_context_parallel_size > 1,
        "a recurrent state depends on all earlier tokens",
    ),
)


STATES_ALONE_LIMITS = (
    Limit(
        "--kv-offload-gb",
        lambda config: config.kv_offload_gb > 0,
        "without keys and values there are no pages to offload",
    ),
    Limit(
        "--kv-transfer-config or --prefill-engines",
        lambda config: config.kv_transfer is not None,
        "without keys and values there are no pages to send",
    ),
)


# for mixers that only convolve what other linears compute
CONVOLUTION_LIMITS = (
    Limit(
        "--kv-transfer-config peer or nixl, or --prefill-engines",
        lambda config: config.kv_transfer is not None and config.kv_transfer.is_peer,
        "which channels of its convolutions a rank has is not described",
    ),
    Limit(
        "--pipeline-parallel-size",
        lambda config: config.pipeline_parallel_size > 1,
        "its convolutions are not implemented for pipeline stages",
    ),
)


OUTPUT_WINDOW_LIMITS = (
    Limit(
        "--speculative-config",
        lambda config: config.speculative_config is not None,
        "a refused draft's keys have already replaced those of an earlier token",
    ),
    Limit(
        "--kv-transfer-config",
        lambda config: config.kv_transfer is not None,
        "the keys of its output are not in the order of their tokens",
    ),
)


LATENT_LIMITS = (
    Limit(
        "--enable-lora with --batch-invariant",
        lambda config: config.enable_lora and config.batch_invariant,
        "the order of sums in products with kv_b_proj adapters depends on the batch",
    ),
)


CONTEXT_PARALLEL = "--prefill-context-parallel-size"
CONTEXT_LIMITS = (
    Limit(
        "--pipeline-parallel-size",
        lambda config: config.pipeline_parallel_size > 1,
        "it is not implemented for pipeline stages",
    ),
    Limit(
        "--speculative-config",
        lambda config: config.speculation is not None,
        "a drafter reads the hidden states of all tokens of a prompt",
    ),
    Limit(
        "--kv-transfer-config",
        lambda config: config.kv_transfer is not None,
        "every set of ranks would send the same pages",
    ),
    Limit(
        "--distributed-executor-backend ray",
        lambda config: config.distributed_executor_backend == "ray",
        "it is not tested on several nodes",
    ),
)


def check_limits(
    limits: Iterable[Limit],
    config: EngineConfig,
    other: str,
    remedy: str = "remove it, or serve another model",
) -> None:
    """Raise InputError for the first setting that does not work with `other`."""
    for limit in limits:
        if limit.is_asked_for(config):
            raise InputError(limit.flag, f"does not work with {other}: {limit.reason}", remedy)


def check_latents(config: EngineConfig, model: ModelConfig, max_model_len: int) -> None:
    """Raise InputError for a setting that latent attention or an indexer does not support."""
    if model.family.latent:
        other = f"{model.family.architecture}, which has latent attention"
        check_limits(LATENT_LIMITS, config, other)
    indexer, blocks = model.family.indexer, model.family.block_indexer
    most = max_model_len if indexer is None else model.values[indexer.count_key]
    if blocks is not None:
        most = blocks.most_keys(model.values)
    windows = [each for each in model.windows if each is not None]
    if config.batch_invariant and model.family.latent and windows and max_model_len > windows[0]:
        raise InputError(
            "--batch-invariant",
            f"does not work with {model.family.architecture} beyond {windows[0]} tokens: no kernel"
            " for windows of latent attention adds in an order that does not depend on the batch",
            f"use --max-model-len {windows[0]}, or remove it",
        )
    if config.batch_invariant and max_model_len > most:
        raise InputError(
            "--batch-invariant",
            f"does not work with {model.family.architecture} beyond {most} tokens: an indexer"
            " then selects keys by scores, whose bits depend on the batch",
            f"use --max-model-len {most}, or remove it",
        )


COMPRESSED_LIMITS = (
    Limit(
        "--pipeline-parallel-size",
        lambda config: config.pipeline_parallel_size > 1,
        "stages do not send its streams of hidden states, nor token ids",
    ),
    Limit(
        "--prefill-context-parallel-size",
        lambda config: config.prefill_context_parallel_size > 1,
        "a window of tokens may be on two ranks",
    ),
    Limit(
        "--enable-lora",
        lambda config: config.enable_lora,
        "adapters of its linears are not implemented",
    ),
    Limit(
        "--speculative-config",
        lambda config: (
            config.speculation is not None and config.speculation.method not in ("ngram", "suffix")
        ),
        "only drafts of ngram and suffix are implemented, which read no hidden states",
    ),
    Limit(
        "--batch-invariant",
        lambda config: config.batch_invariant,
        "plain torch computes its attention, in an order that depends on the rows",
    ),
)


def check_compressed(config: EngineConfig, model: ModelConfig) -> None:
    """Raise InputError for a setting that does not work with compressed attention and streams."""
    if model.family.merge_tensors:
        check_limits(COMPRESSED_LIMITS, config, model.family.architecture)


def check_context_parallel(config: EngineConfig) -> None:
    """Raise InputError for a setting that does not work with context parallelism."""
    size = config.prefill_context_parallel_size
    if size > 1:
        check_limits(CONTEXT_LIMITS, config, f"{CONTEXT_PARALLEL} {size}", "remove one")


def check_states(config: EngineConfig, model: ModelConfig) -> None:
    """Raise InputError for a setting that the model's states, or its output's window, rule out."""
    name = model.family.architecture
    if model.has_states:
        check_limits(LIMITS, config, f"{name}, whose layers have states")
        if model.family.state_mixer.out is None:
            check_limits(CONVOLUTION_LIMITS, config, name)
        _check_stages(config, model)
    if model.has_states and not model.has_attention:
        check_limits(STATES_ALONE_LIMITS, config, f"{name}, which has no attention")
    if model.output_window:
        check_limits(OUTPUT_WINDOW_LIMITS, config, f"{name}, whose output has a window")


def _check_stages(config: EngineConfig, model: ModelConfig) -> None:
    """Raise InputError if a pipeline stage has no states, or no attention as other stages have."""
    stages, layers = config.pipeline_parallel_size, model.num_layers
    for stage in range(stages if stages > 1 else 0):
        numbers = stage_layers(stage, stages, layers)
        kinds = {"states": any(model.state_layers[number] for number in numbers)}
        if model.has_attention:
            kinds["attention"] = any(
                model.family.blocks(model.values, number).attention for number in numbers
            )
        for kind, is_there in kinds.items():
            if not is_there:
                raise InputError(
                    f"--pipeline-parallel-size {stages}",
                    f"does not work with {model.family.architecture}: no layer of stage"
                    f" {stage + 1}, {numbers.start} to {numbers.stop - 1}, has {kind}",
                    "use fewer stages",
                )


def finds_prefixes(config: EngineConfig, runner: ModelRunner) -> bool:
    """Return True if requests share prefixes. Models with states need snapshots for it, because a
    request's state covers exactly the tokens up to its last one."""
    return config.enable_prefix_caching and bool(not runner.has_states or runner.num_snapshots)


def make_states(config: EngineConfig, runner: ModelRunner) -> StatePool:
    """Create the pool of a runner's state slots, and log its size."""
    if not runner.has_states:
        return StatePool(None)
    count, num_snapshots = runner.num_state_slots, runner.num_snapshots
    size = runner.bytes_of_states / GIB
    text = "States: %d slots for requests, %d for snapshots (--num-state-snapshots), %.2f GiB%s"
    more = (count + num_snapshots) * _bytes_of_drafts(runner) / GIB
    logger.info(text, count, num_snapshots, size, f", {more:.2f} of them for drafts" * bool(more))
    if config.enable_prefix_caching and not num_snapshots:
        logger.info("Prefix cache: off (the model has states; set --num-state-snapshots)")
    return StatePool(count)


def _bytes_of_drafts(runner: ModelRunner) -> int:
    """Return the bytes of a state slot that serve verifications: the inputs of its newest rows."""
    specs = runner.cache_specs
    return sum(spec.bytes_per_slot - spec.with_drafts(0).bytes_per_slot for spec in specs)


def make_snapshots(
    config: EngineConfig, runner: ModelRunner, host: HostTier | None = None
) -> StateSnapshots | None:
    """Create the pool of snapshot slots, which are numbered after the slots of requests.

    Returns None if there are no snapshots. `host`: receives evicted snapshots.
    """
    if not (runner.has_states and runner.num_snapshots):
        return None
    slots = runner.num_state_slots, runner.num_snapshots
    return StateSnapshots(*slots, config.block_size, host)
