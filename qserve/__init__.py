"""qserve: quantize a language model, verify the checkpoint, serve it fast.

`import qserve` loads no torch: `LLM` and the other public names are imported on first use.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from formats.errors import InputError
    from formats.save import save_quantized
    from qserve.async_llm import AsyncLLM
    from qserve.config import EngineConfig
    from qserve.library.beam_outputs import BeamSearchOutput, BeamSearchSequence
    from qserve.library.llm_engine import LLMEngine
    from qserve.library.llm_pooling import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from qserve.library.logprobs import Logprob
    from qserve.library.outputs import CompletionOutput, EngineDeadError, RequestOutput
    from qserve.library.prompts import PromptType, TextPrompt, TokensPrompt
    from qserve.llm import LLM
    from qserve.lora.request import LoRARequest
    from qserve.params.beam_search_params import BeamSearchParams
    from qserve.params.sampling_params import SamplingParams
    from qserve.pooling.params import PoolingParams
    from qserve.structured.params import StructuredOutputsParams

__version__ = "0.2.0"

_SIBLINGS = ("formats", "qkernels", "calibrate")
_MODULES = {
    "AsyncLLM": "qserve.async_llm",
    "BeamSearchOutput": "qserve.library.beam_outputs",
    "BeamSearchParams": "qserve.params.beam_search_params",
    "BeamSearchSequence": "qserve.library.beam_outputs",
    "ClassificationRequestOutput": "qserve.library.llm_pooling",
    "CompletionOutput": "qserve.library.outputs",
    "EmbeddingRequestOutput": "qserve.library.llm_pooling",
    "EngineConfig": "qserve.config",
    "EngineDeadError": "qserve.library.outputs",
    "InputError": "formats.errors",
    "LLM": "qserve.llm",
    "LLMEngine": "qserve.library.llm_engine",
    "LoRARequest": "qserve.lora.request",
    "Logprob": "qserve.library.logprobs",
    "PoolingParams": "qserve.pooling.params",
    "PoolingRequestOutput": "qserve.library.llm_pooling",
    "PromptType": "qserve.library.prompts",
    "RequestOutput": "qserve.library.outputs",
    "SamplingParams": "qserve.params.sampling_params",
    "ScoringRequestOutput": "qserve.library.llm_pooling",
    "StructuredOutputsParams": "qserve.structured.params",
    "TextPrompt": "qserve.library.prompts",
    "TokensPrompt": "qserve.library.prompts",
    "save_quantized": "formats.save",
}
__all__ = [
    "__version__",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "EngineDeadError",
    "InputError",
    "LLM",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "save_quantized",
]


def _check_siblings() -> None:
    """Raise ImportError if another package of the same name shadows one of this project."""
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


if not TYPE_CHECKING:  # a type checker reads the imports above, and reports other names

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return getattr(importlib.import_module(_MODULES[name]), name)
        raise AttributeError(f"module 'qserve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
