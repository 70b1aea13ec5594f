"""Device, dtype and number of CPU threads of a rank."""

import os

import torch

from formats.errors import InputError
from qkernels.gpu.launch import set_plain_launches
from qserve.config import EngineConfig
from qserve.engine.cpu_threads import SET_BY_USER
from qserve.model.model_config import ModelConfig


def pick_device(config: EngineConfig, index: int = 0, num_here: int = 1) -> torch.device:
    """Return the device with this index. Raises InputError if there are fewer than `num_here`."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda", "torch finds no CUDA GPU", "use --device cpu")
    is_only = config.num_ranks == 1 and config.data_parallel_size == 1 and not config.gpu_offset
    if name == "cpu" or is_only:
        return torch.device(name)
    found, needed = torch.cuda.device_count(), config.first_device + num_here
    if found < needed:
        engine = ""
        if config.data_parallel_rank:
            engine += f" --data-parallel-rank {config.data_parallel_rank}"
        if config.gpu_offset:
            engine += f" --gpu-offset {config.gpu_offset}"
        number = config.prefill_context_parallel_size
        contexts = f" --prefill-context-parallel-size {number}" if number > 1 else ""
        raise InputError(
            f"--tensor-parallel-size {config.tensor_parallel_size}"
            f" --pipeline-parallel-size {config.pipeline_parallel_size}{contexts}{engine}",
            f"needs {needed} GPUs on this machine, torch finds {found}",
            "use fewer ranks or engines, or check CUDA_VISIBLE_DEVICES",
        )
    return torch.device(name, config.first_device + index)


def use_device(device: torch.device, config: EngineConfig) -> None:
    """Set the process's device, kernel launcher and number of CPU threads."""
    set_plain_launches(config.plain_kernel_launch)
    num_processes = config.num_ranks * config.data_parallel_size
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)
    elif config.cpu_threads is not None:
        torch.set_num_threads(max(1, config.cpu_threads // num_processes))
    elif num_processes > 1 and not os.environ.get(SET_BY_USER):
        # If each rank computed on all cores, the ranks would slow each other down.
        num_cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, num_cores // num_processes))


def pick_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    if name != "auto":
        return getattr(torch, name)
    # On a CPU float32 is at least as fast, and gives exactly the reference's results.
    return torch.float32 if device.type == "cpu" else model.dtype
