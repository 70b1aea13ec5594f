"""Limits of the KV connectors `peer` and `nixl`."""

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.runner.model_runner import ModelRunner
from qserve.kv_transfer.config import FLAG


def check_peer(config: EngineConfig, runner: ModelRunner, first_kv_head: int) -> None:
    """Raise InputError where the connector cannot send all that a page holds.

    `first_kv_head`: of this rank.
    """
    subject = f"{FLAG} peer or nixl, or --prefill-engines"
    if config.pipeline_parallel_size > 1:
        raise InputError(
            subject,
            "does not work with --pipeline-parallel-size",
            "use --tensor-parallel-size, or the connector folder",
        )
    if runner.speculator is not None and (runner.looks_ahead or runner.speculator.caches):
        raise InputError(
            subject,
            "does not send the KV pages of draft models and draft heads",
            "use the drafters ngram or suffix, or the connector folder",
        )
    heads = {
        cache.page_tensors[0].shape[1 + spec.heads_axis]
        for spec, cache in zip(runner.cache_specs, runner.caches, strict=True)
        if spec.heads_axis is not None and cache.page_tensors
    }
    if len(heads) > 1 and first_kv_head:
        raise InputError(
            subject,
            f"does not work with --tensor-parallel-size {config.tensor_parallel_size}: the layers"
            " of this model have different numbers of KV heads",
            "use --tensor-parallel-size 1, or the connector folder",
        )
