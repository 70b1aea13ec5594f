"""EngineOwner: the constructor that LLM and AsyncLLM share."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, Unpack

from qserve.command_line.vllm_settings import VllmSettings, check_keywords
from qserve.config import EngineConfig, engine_config


class EngineOwner(ABC):
    """Base class of LLM and AsyncLLM: the constructor takes a model and the engine's settings."""

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        revision: str | None = None,
        subfolder: str | None = None,
        download_dir: str | Path | None = None,
        dtype: Literal["auto", "bfloat16", "float16", "float32", "half", "float"] = "auto",
        device: Literal["auto", "cuda", "cpu"] = "auto",
        model_impl: Literal["auto", "native", "transformers", "vllm"] = "auto",
        max_model_len: int | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        prefill_context_parallel_size: int = 1,
        prefill_context_parallel_min_tokens: int = 1024,
        data_parallel_size: int = 1,
        data_parallel_rank: int | None = None,
        data_parallel_address: str | None = None,
        prefill_engines: int = 0,
        prefill_tensor_parallel_size: int | None = None,
        prefill_engine_min_tokens: int = 256,
        gpu_offset: int = 0,
        distributed_executor_backend: Literal["mp", "ray", "uni"] = "mp",
        all_reduce: Literal["auto", "nccl"] = "auto",
        enable_expert_parallel: bool = False,
        expert_placement_strategy: str = "linear",
        record_expert_loads: str | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        gpu_memory_utilization: float = 0.9,
        block_size: int = 16,
        kv_cache_dtype: Literal["auto", "int8", "fp8", "int4", "fp8_e4m3"] = "auto",
        kv_cache_memory: float | None = None,
        num_gpu_blocks_override: int | None = None,
        cpu_kv_cache_memory: float = 1.0,
        cpu_threads: int | None = None,
        num_state_snapshots: int | None = None,
        enable_prefix_caching: bool = True,
        kv_offload_gb: float = 0.0,
        kv_transfer_config: str | dict[str, Any] | None = None,
        scheduling_policy: str = "fcfs",
        admission: Literal["forecast", "fits"] = "forecast",
        prefill_batch_size: int = 1,
        target_itl_ms: float | None = None,
        batch_invariant: bool = False,
        enforce_eager: bool = False,
        language_model_only: bool = False,
        mm_encoder_quantization: Literal["w8a8", "w8a8-fp8"] | None = None,
        max_seq_len_to_capture: int | None = None,
        async_scheduling: bool = True,
        compile_processes: int | None = None,
        plain_kernel_launch: bool = False,
        kernel: Sequence[str] = (),
        enable_lora: bool = False,
        lora_modules: Sequence[str] = (),
        max_loras: int = 4,
        max_lora_rank: int = 16,
        lora_experts: bool = False,
        max_cpu_loras: int | None = None,
        speculative_config: str | dict[str, Any] | None = None,
        spec_acceptance: Literal["exact", "rejection", "typical"] = "exact",
        activation_bits: Literal[8, 16] | None = None,
        quantization: str | None = None,
        quantization_config: str | dict[str, Any] | None = None,
        lm_head_quantization: Literal["w8a16", "w4a16"] | None = None,
        load_format: Literal[
            "auto", "dummy", "safetensors", "gguf", "bitsandbytes", "mistral"
        ] = "auto",
        seed: int = 0,
        **others: Unpack[VllmSettings],
    ) -> None:
        """Load a model from a folder or from the hub (ORG/NAME). Raises InputError.

        The settings are the fields of EngineConfig. `qserve serve --help` explains them: each is a
        flag of the same name. `others`: keywords of vLLM's `LLM` that change nothing here.
        """
        settings = {name: value for name, value in locals().items() if name != "self"}
        for note in check_keywords(settings.pop("others"), settings):
            logging.getLogger(__name__).info(note)
        self._start_on(engine_config(settings))

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> Self:
        """Start with settings that are already checked. The name is vLLM's."""
        owner = cls.__new__(cls)
        owner._start_on(engine_args)
        return owner

    @abstractmethod
    def _start_on(self, config: EngineConfig) -> None: ...
