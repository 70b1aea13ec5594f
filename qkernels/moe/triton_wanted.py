"""The experts that some token wants, for kernels whose blocks go from one to the next, in Triton.

Legend: M tokens, E experts, k experts of a token, P = M k pairs, D experts that are wanted.
"""

import torch
import triton
import triton.language as tl

from qkernels.gpu.config import power_of_two
from qkernels.gpu.launch import launch, on_device
from qkernels.gpu.pdl import pdl_launch_and_wait, pdl_options

PAIRS_AT_ONCE = 16


def wanted_experts(ids_Mk: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int32 [1 + min(E, P)]: D, then the experts in order. Of one token its experts as they are.

    What follows the D-th expert is unspecified.
    """
    M, P = ids_Mk.shape[0], ids_Mk.numel()
    if M == 1:
        return ids_Mk.view(-1)
    wanted = torch.empty(1 + min(num_experts, P), dtype=torch.int32, device=ids_Mk.device)
    with on_device(ids_Mk):
        launch(
            _wanted_experts,
            (1,),
            ids_Mk,
            wanted,
            P,
            SLOTS=power_of_two(num_experts),
            CHUNK=PAIRS_AT_ONCE,
            num_warps=4,
            **pdl_options(ids_Mk, 1),
        )
    return wanted


@triton.jit(do_not_specialize=["P"])
def _wanted_experts(
    ids_ptr,  # [P]
    wanted_ptr,
    P,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        pdl_launch_and_wait()
    e = tl.arange(0, SLOTS)
    found = tl.zeros((SLOTS,), tl.int32)
    for start in tl.range(0, P, CHUNK):
        p = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + p, mask=p < P, other=-1)
        found |= tl.max((ids[None, :] == e[:, None]).to(tl.int32), 1)
    place = tl.cumsum(found, 0)
    tl.store(wanted_ptr + place, e, mask=found > 0)
    tl.store(wanted_ptr, tl.sum(found, 0))
