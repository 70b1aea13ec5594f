"""system_fingerprint: a short text that changes whenever the bits of outputs may change.

With --batch-invariant and equal fingerprints, a request with a seed has the same output bits.
Without that flag the bits also depend on the other requests in the batch.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import qserve
from qkernels.tuning.table import tuning_table_of
from qserve.config import EngineConfig
from qserve.engine.control.commands import FINGERPRINT_PREFIX
from qserve.parallel.expert_placement import LINEAR, ROUND_ROBIN

# Settings on which the bits of a request depend.
SETTINGS = (
    *("dtype", "model_impl", "tensor_parallel_size", "pipeline_parallel_size", "all_reduce"),
    *("kv_cache_dtype", "kernel", "batch_invariant", "activation_bits", "quantization"),
    *("quantization_config", "spec_acceptance", "enable_lora", "lora_experts"),
    "enable_expert_parallel",
    *("prefill_context_parallel_size", "prefill_context_parallel_min_tokens"),
    *("mm_encoder_quantization", "lm_head_quantization"),
)
# More settings on which the bits depend, unless --batch-invariant is on.
SETTINGS_OF_BATCHES = (
    *("max_num_seqs", "max_num_batched_tokens", "prefill_batch_size", "enforce_eager"),
    *("block_size", "speculative_config", "enable_prefix_caching", "max_seq_len_to_capture"),
)


def system_fingerprint(settings: Mapping[str, Any], weights: str, device: torch.device) -> str:
    """Return the fingerprint of a loaded engine: weights, settings, kernels, device and versions.

    `settings`: the result of `settings_of`. `weights`: the result of WorkerGroup.checksum, which
    covers the weights of the first rank.
    """
    parts = {
        "weights": weights,
        "settings": settings,
        "tuned": _tuned(device),
        "device": _device(device),
        "versions": _versions(),
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return FINGERPRINT_PREFIX + hashlib.sha256(text.encode()).hexdigest()[:16]


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """Return the settings on which bits depend. A file counts by its contents, not its path."""
    names = SETTINGS if config.batch_invariant else (*SETTINGS, *SETTINGS_OF_BATCHES)
    found = {name: getattr(config, name) for name in names}
    return found | {"expert_placement": _placement(config.expert_placement_strategy)}


def _placement(strategy: str) -> str:
    """Return the strategy's name, or the digest of its file with expert loads."""
    if strategy in (LINEAR, ROUND_ROBIN):
        return strategy
    return hashlib.sha256(Path(strategy).read_bytes()).hexdigest()


def _tuned(device: torch.device) -> str:
    """Return the digest of the tuning table's file; the table chooses kernel configs."""
    path = tuning_table_of(device).path
    if path is None or not path.exists():
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def _versions() -> dict[str, str]:
    versions = {"qserve": qserve.__version__, "torch": torch.__version__}
    if torch.version.cuda is not None:
        import triton

        versions |= {"triton": triton.__version__, "cuda": torch.version.cuda}
    return versions
