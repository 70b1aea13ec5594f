"""Start-up check: refuses a model whose logits differ from those stored in its folder.

`qserve quantize` stores logits of a few tokens and checksums of the scales (quality.json). The
stored logits are those of the quantized model, so a model of low accuracy passes the check.
"""

import logging
from pathlib import Path
from typing import Any

import torch

from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.quality.checksums import damaged
from formats.quality.probe import Probe
from formats.quality.record import QUALITY, read_quality
from formats.table import names_text
from qkernels import QuantLinear

REMEDY = "quantize the model again, or download the folder again; --no-check skips this check"
logger = logging.getLogger(__name__)


def check_start(engine: Any, folder: str) -> None:
    """Compare an idle engine with its folder's quality.json. Raises InputError if they differ."""
    quality = read_quality(folder)
    if quality is None:
        logger.debug("No start-up check: %s has no %s", folder, QUALITY)
        return
    if quality.checksums:
        names = damaged(CheckpointReader(Path(folder)), quality.checksums)
        if names:
            raise InputError(
                folder,
                f"start-up check: {names_text(names)} differ from what `qserve quantize` wrote",
                REMEDY,
            )
    if quality.probe is None:
        logger.debug("No start-up check of logits: %s has none", QUALITY)
        return
    _check_logits(engine, quality.probe, folder)


def _check_logits(engine: Any, probe: Probe, folder: str) -> None:
    """Compare logits of the whole probe, as in a prompt, and of its first token, as in a decode."""
    count = min(len(probe.token_ids), engine.max_model_len)
    if max(probe.token_ids) >= engine.vocab_size:
        raise InputError(
            folder,
            f"start-up check: the stored tokens exceed the vocabulary of {engine.vocab_size}",
            REMEDY,
        )
    limit = probe.limit(_is_exact(engine))
    for length in (count, 1):
        logits_TV = engine.logits(list(probe.token_ids[:length]))
        distance = probe.distance(logits_TV)
        logger.debug("Start-up check: %d tokens differ by %.4f nats", length, distance)
        if not distance <= limit:
            raise InputError(
                folder,
                f"start-up check: after {length} tokens, log-probabilities differ by"
                f" {distance:.3g} nats from those that `qserve quantize` stored, expected at most"
                f" {limit}; the scales are intact, so codes, other tensors or a kernel differ"
                f" (kernels of the linears: {_kernels(engine, length)})",
                f"choose another kernel with --kernel, or {REMEDY}",
            )


def _is_exact(engine: Any) -> bool:
    """Return True if the engine computes in float32 and its KV pages are float32."""
    runner = engine.runner
    return runner.decoder.dtype == torch.float32 and engine.config.kv_cache_dtype == "auto"


def _kernels(engine: Any, rows: int) -> str:
    """Return the names of the kernels that quantized linears use for `rows` rows."""
    linears = [m for m in engine.runner.decoder.modules() if isinstance(m, QuantLinear)]
    return ", ".join(sorted({linear.plan(rows).variant for linear in linears})) or "none"
