"""Properties of a device that a launch depends on: architecture, SM count, shared memory."""

import functools
import importlib.metadata
import os

import torch

# Triton reads this switch at import. Its interpreter cannot run inline assembly.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# First version of Triton whose Gluon has the functions that our sm_90 kernels use.
GLUON_TRITON = (3, 6)

# Triton's interpreter has no SMs; any small number leads to the same choices.
INTERPRETER_SM_COUNT = 4
INTERPRETER_SHARED_BYTES = 227 * 1024


@functools.cache
def sm_count(device: torch.device) -> int:
    """Return the number of SMs of a GPU; a small number for Triton's interpreter."""
    if device.type != "cuda":
        return INTERPRETER_SM_COUNT
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Return the most shared memory that a block may have, in bytes."""
    if device.type != "cuda":
        return INTERPRETER_SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.cache
def arch(device: torch.device) -> str:
    """Return the device's architecture as compilers name it: "sm_90", "gfx942", "cpu".

    A "cuda" device counts as sm_90 if torch sees no GPU: only `explain` asks then.
    """
    if device.type != "cuda":
        return device.type
    if not torch.cuda.is_available():
        return "sm_90"
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Return True if a kernel may start before the previous one ends (PDL: sm_90 and later)."""
    name = arch(device)
    return name.startswith("sm_") and int(name[3:]) >= 90


@functools.cache
def uses_ptx(device: torch.device) -> bool:
    """Return True if kernels may contain inline PTX: NVIDIA GPUs, but not Triton's interpreter."""
    return arch(device).startswith("sm_") and not INTERPRETED


@functools.cache
def has_tma(device: torch.device) -> bool:
    """Return True if the hardware has TMA tensor descriptors (sm_90 and later).

    On other GPUs Triton emulates descriptors with pointers. Triton's interpreter counts as
    hardware.
    """
    name = arch(device)
    return name == "cpu" or (name.startswith("sm_") and int(name[3:]) >= 90)


@functools.cache
def lacks_arch(device: torch.device, wanted: str) -> str | None:
    """Return why Gluon kernels for `wanted` cannot run on `device`; None: they can."""
    if INTERPRETED:
        return "triton's interpreter does not run Gluon"
    if device.type != "cuda":
        return f"runs on cuda, not on {device.type}"
    if arch(device) != wanted:
        return f"written for {wanted}, not {arch(device)}"
    version = importlib.metadata.version("triton")
    if tuple(int(part) for part in version.split(".")[:2]) < GLUON_TRITON:
        return f"written for triton {GLUON_TRITON[0]}.{GLUON_TRITON[1]} and later, not {version}"
    return None
