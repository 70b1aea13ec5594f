"""Programmatic dependent launch (PDL, sm_90): a kernel starts before the previous one ends.

A kernel that is launched with `pdl_options` must call `pdl_launch_and_wait`

- before it writes anything,
- before it reads what another kernel may have written (unless its caller says `inputs_ready`),
- before any of its blocks returns.

A grid that does not wait could complete before the previous one, and the next grid waits only for
this one.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.device import has_pdl

# Kernels over more rows fill the GPU and leave no room for blocks of the next kernel.
PDL_MAX_ROWS = 128


def pdl_options(x: torch.Tensor, rows: int) -> dict[str, bool]:
    """Return the PDL launch options of a kernel over this many rows."""
    starts = rows <= PDL_MAX_ROWS and has_pdl(x.device)
    return {"PDL": starts, **({"launch_pdl": True} if starts else {})}


@triton.jit
def pdl_launch_and_wait(LAUNCH_FIRST: tl.constexpr = True):
    """Execute griddepcontrol.launch_dependents and griddepcontrol.wait, in this or the other order.

    LAUNCH_FIRST lets the next kernel's blocks become resident while the previous kernel and this
    one run: a decode step of an 8B model at one row takes 2.36 ms, 2.42 ms with the wait first, and
    2.60 ms without PDL. Let the wait come first if the next kernel's loads of weights would compete
    with the loads that this kernel waits for.
    """
    if LAUNCH_FIRST:
        tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    if not LAUNCH_FIRST:
        tl.extra.cuda.gdc_launch_dependents()
