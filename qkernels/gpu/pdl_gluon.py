"""Programmatic dependent launch (PDL) for Gluon kernels, as gpu/pdl.py is for Triton kernels."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def griddepcontrol_wait():
    """Wait until the previous kernel has completed and its writes are visible.

    Weights may be read before the wait, because no kernel writes them.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r,~{memory}", [], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def launch_dependents():
    """Let the next kernel start once each block of this kernel has called this or ended."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0",
        "=r,~{memory}",
        [],
        gl.int32,
        is_pure=False,
        pack=1,
    )
