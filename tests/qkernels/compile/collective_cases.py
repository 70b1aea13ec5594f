"""Sums over ranks, as cases.py asks every card to compile them. The peers are all in this process.

Legend: n ranks, M rows, C channels.
"""

import functools

import torch

from formats.scheme import ActivationSpec
from qkernels.collective import ops
from qkernels.collective.channels import PeerLayout, Peers
from qkernels.collective.config import KIB, Limits, Way
from qkernels.operands.codes import InputRounding
from qkernels.operands.limbs import LimbForm
from qkernels.operands.split_k import SplitKPartials
from qkernels.rowwise.spec import Branch, NormSpec
from tests.qkernels.compile.cards import empty
from tests.qkernels.virtual_ranks import virtual_ranks

LIMITS = Limits(one_shot=256 * KIB, two_shot=512 * KIB, rows=8)


@functools.cache
def peers(ranks: int, C: int) -> Peers:
    layout = PeerLayout.of_model(ranks, C, LIMITS)
    return Peers(virtual_ranks(ranks, layout.num_bytes, torch.device("cpu"))[ranks // 2], layout)


def all_reduce(ranks: int, how: Way, dtype: torch.dtype = torch.bfloat16) -> None:
    ops.all_reduce(empty(3, 8192, dtype=dtype), peers(ranks, 8192), how)


def norm(
    ranks: int,
    M: int = 1,
    C: int = 8192,
    splits: int = 0,
    form: LimbForm | ActivationSpec | None = None,
    branch: bool = False,
) -> None:
    x = empty(M, C)
    if splits:
        x = SplitKPartials(parts=empty(splits, M, C, dtype=torch.float32), dtype=x.dtype)
    if isinstance(form, ActivationSpec):
        form = InputRounding(form, None if form.dynamic else torch.ones(()))
    spec = NormSpec(weight_C=empty(C), eps=1e-5)
    behind = Branch(norm=NormSpec(weight_C=empty(C), eps=1e-5), factor=0.5) if branch else Branch()
    ops.all_reduce_norm(x, empty(M, C), spec, peers(ranks, C), form, behind)
