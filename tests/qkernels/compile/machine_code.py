"""Facts about a compiled kernel's machine code: registers, shared memory, spills, products."""

import functools
import re
import subprocess
import tempfile
from pathlib import Path

import triton

from tests.qkernels.compile import sass


@functools.cache
def facts(compiled: object) -> dict[str, object]:
    """Return the facts; without cuobjdump, which some packages lack, those of the PTX."""
    ptx = compiled.asm["ptx"]
    found = {
        "shared": compiled.metadata.shared,
        "threads": 32 * compiled.metadata.num_warps,
        "max_registers": getattr(compiled.metadata, "maxnreg", None),
        "wgmma": "wgmma.mma_async" in ptx,
        "tensor_core": bool(re.search(r"mma\.sync|wgmma|tcgen05\.mma", ptx)),
        "integer_mma": ptx.count("mma.sync.aligned.m16n8k32"),
        "polled_vectors": ptx.count("ld.volatile.global.v4.b32"),
        "polled_words": len(re.findall(r"ld\.volatile\.global\.b?[su]?32", ptx)),
        "local_in_ptx": bool(re.search(r"\.local\s", ptx)),
    }
    if (needed := re.search(r"\.reqntid (\d+)", ptx)) is not None:
        found["threads"] = int(needed[1])  # with those of a Gluon kernel's other partitions
    if cuobjdump() is None:
        return found
    code = dump(compiled)
    found["registers"] = int(re.search(r"REG:(\d+)", code)[1])
    found["local"] = int(re.search(r"LOCAL:(\d+)", code)[1])
    found["stack"] = int(re.search(r"STACK:(\d+)", code)[1])
    found["spill_stores"] = len(re.findall(r"\bSTL\b", code))
    found["instructions"] = len(sass.instructions(code))
    loops = sass.product_loops(code)
    if loops:
        found["hgmma"] = len(re.findall(r"\b[HIQ]GMMA\b", code))
        found["loop_spills"] = sum(bool(re.search(r"\b(STL|LDL)\b", t)) for b in loops for t in b)
        found["waits_in_loops"] = max(sum("WARPGROUP.DEPBAR" in t for t in b) for b in loops)
        found["overlapped"] = sass.overlapped(code)
        found["overwritten_in_flight"] = sass.overwritten_in_flight(code)
    return found


@functools.cache
def cuobjdump() -> Path | None:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return path if path.exists() else None


def dump(compiled: object) -> str:
    """Return cuobjdump's output: resource usage, then instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(cuobjdump()), "--dump-resource-usage", "--dump-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
