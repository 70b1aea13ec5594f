"""Kernels compiled for sm_90 without a GPU, and what their machine code uses."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

BF16 = "*bf16"
LAUNCH = {"PDL": True, "LAUNCH_FIRST": True, "INTERPRETED": False}
ELEMENTS = {
    "i8": gl.int8,
    "i32": gl.int32,
    "fp8e4nv": gl.int8,  # as wide
    "fp16": gl.float16,
    "bf16": gl.bfloat16,
    "fp32": gl.float32,
}


def boxes(kind: str, block: list[int]) -> str:
    """The type of a descriptor of boxes of `block`: Gluon's carry their layouts."""
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[kind])
    return f"tensordesc<{kind}[{', '.join(map(str, block))}],{layout!r}>"


def compile_kernel(kernel, pointers: dict, scalars: dict, constants: dict, options: dict) -> dict:
    return facts(compiled_kernel(kernel, pointers, scalars, constants, options))


def compiled_kernel(kernel, pointers: dict, scalars: dict, constants: dict, options: dict):
    """`pointers` and `scalars` map argument names to types; constants includes absent pointers."""
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        signature[name] = pointers.get(name) or scalars.get(name) or "constexpr"
        aligned = name in ("N", "K", "C", "I") or name.startswith("stride_")
        aligned = aligned or signature[name].startswith("*")
        if signature[name] != "constexpr" and aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source_of = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = source_of(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def facts(compiled) -> dict:
    found = {
        "shared": compiled.metadata.shared,
        "wgmma": "wgmma.mma_async" in compiled.asm["ptx"],
        "integer_mma": compiled.asm["ptx"].count("mma.sync.aligned.m16n8k32"),
        "local_in_ptx": bool(re.search(r"\.local\s", compiled.asm["ptx"])),
    }
    usage, sass = dump(compiled, "--dump-resource-usage"), dump(compiled, "--dump-sass")
    if sass is not None:
        found["registers"] = int(re.search(r"REG:(\d+)", usage).group(1))
        found["local"] = int(re.search(r"LOCAL:(\d+)", usage).group(1))
        found["stack"] = int(re.search(r"STACK:(\d+)", usage).group(1))
        found["spill_stores"] = len(re.findall(r"\bSTL\b", sass))
        found["hgmma"] = len(re.findall(r"\b[HIQ]GMMA\b", sass))
        found["loop_spills"] = spills_in_product_loops(sass)
        found["instructions"] = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", sass, re.MULTILINE))
    return found


def product_loops(sass: str) -> list[list[str]]:
    """The instructions of each innermost loop with products."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass, re.MULTILINE)
    index = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    loops = []  # first and last line; a branch without a condition returns from a wait
    for i, (address, text) in enumerate(lines):
        target = re.match(r"@!?U?P\d BRA(?:\.\w+)? 0x([0-9a-f]+)$", text)
        if target and int(target[1], 16) < int(address, 16):
            loops.append((index[int(target[1], 16)], i))
    found = []
    for first, last in loops:
        body = [text for _, text in lines[first : last + 1]]
        inner = any(first < other and end < last for other, end in loops)
        if not inner and any("GMMA" in text for text in body):
            found.append(body)
    return found


def spills_in_product_loops(sass: str) -> int:
    """Registers stored to or loaded from local memory in the innermost loops with products."""
    bodies = product_loops(sass)
    return sum(bool(re.search(r"\b(STL|LDL)\b", text)) for body in bodies for text in body)


def most_waits_in_product_loops(sass: str) -> int:
    return max(sum("WARPGROUP.DEPBAR" in text for text in body) for body in product_loops(sass))


def dump(compiled, what: str) -> str | None:
    """What cuobjdump says of the machine code; None: this triton came without it."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not cuobjdump.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return _run(cuobjdump, what, file.name)


def _run(*command) -> str:
    return subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, check=True
    ).stdout
