"""What a launch needs to know of its device: architecture, SMs, shared memory."""

import functools
import importlib.metadata
import os

import torch

# Triton's own switch, read by it at import: its interpreter knows no inline assembly.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# The first triton whose Gluon has what the kernels for Hopper use.
GLUON_TRITON = (3, 6)

# In Triton's interpreter there are no SMs; any small number exercises the same choices.
INTERPRETER_SM_COUNT = 4
INTERPRETER_SHARED_BYTES = 227 * 1024


@functools.cache
def sm_count(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETER_SM_COUNT
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one block may have."""
    if device.type != "cuda":
        return INTERPRETER_SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends: sm_90 and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def lacks_gluon(device: torch.device) -> str | None:
    """Why kernels in Gluon for Hopper cannot run on `device`; None: they can.

    Where torch sees no GPU, a "cuda" device is taken for a Hopper one: only `explain` asks there.
    """
    if INTERPRETED:
        return "triton's interpreter knows no Gluon"
    if device.type != "cuda":
        return f"runs on cuda, not on {device.type}"
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        if capability != (9, 0):
            return f"written for sm_90, not sm_{capability[0]}{capability[1]}"
    version = importlib.metadata.version("triton")
    if tuple(int(part) for part in version.split(".")[:2]) < GLUON_TRITON:
        return f"written for triton {GLUON_TRITON[0]}.{GLUON_TRITON[1]} and later, not {version}"
    return None
