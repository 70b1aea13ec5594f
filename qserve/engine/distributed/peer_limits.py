"""Checks of features that do not work with the KV connectors `peer` and `nixl`."""

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.runner.model_runner import ModelRunner
from qserve.kv_transfer.config import FLAG


def check_peer(config: EngineConfig, runner: ModelRunner) -> None:
    """Raise InputError if the connector cannot send all KV pages of this model."""
    subject = f"{FLAG} peer or nixl, or --prefill-engines"
    if config.pipeline_parallel_size > 1:
        raise InputError(
            subject,
            "does not work with --pipeline-parallel-size",
            "use --tensor-parallel-size, or the connector folder",
        )
    if runner.speculator is not None and runner.speculator.first_kv_heads is None:
        raise InputError(
            subject,
            "sends the KV pages of no drafter but mtp, because other drafters do not state which KV"
            " heads a rank has",
            "use the drafters mtp, ngram or suffix, or the connector folder",
        )
