"""qserve: quantize a language model, prove the file right, serve it fast.

Importing it loads no torch: `LLM` and the others are fetched when first used.
"""

import importlib
import importlib.util
from pathlib import Path

__version__ = "0.1.0"

_SIBLINGS = ("formats", "qkernels", "calibrate")
_LAZY = {
    "LLM": "qserve.llm",
    "LLMEngine": "qserve.llm_engine",
    "AsyncLLM": "qserve.async_llm",
    "EngineConfig": "qserve.config",
    "BeamSearchParams": "qserve.beam_search_params",
    "SamplingParams": "qserve.sampling_params",
    "LoRARequest": "qserve.lora.request",
    "PoolingParams": "qserve.pooling_params",
    "RequestOutput": "qserve.outputs",
    "CompletionOutput": "qserve.outputs",
    "EngineDeadError": "qserve.outputs",
    "save_quantized": "formats.save",
}


def _check_siblings() -> None:
    """Raise ImportError where another package of the same name shadows one of ours."""
    home = Path(__file__).resolve().parent.parent
    for name in _SIBLINGS:
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec else None
        if origin is None or Path(origin).resolve().parent != home / name:
            found = origin or (list(spec.submodule_search_locations) if spec else "nothing")
            raise ImportError(
                f"qserve needs its own package {name!r} from {home / name}, but Python finds"
                f" {found} (uninstall or rename what shadows it, or start from another folder)"
            )


_check_siblings()


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'qserve' has no attribute {name!r}")
