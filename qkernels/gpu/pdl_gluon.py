"""Dependent launch in Gluon, as gpu/pdl.py has it in Triton. Knows no operation."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def griddepcontrol_wait():
    """Until it has ended and its writes are seen. Weights may be read before: they never change."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r,~{memory}", [], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def launch_dependents():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0",
        "=r,~{memory}",
        [],
        gl.int32,
        is_pure=False,
        pack=1,
    )
