"""Calls of sums over ranks. The peers are all in this process.

Legend: n ranks, M rows, C channels.
"""

import functools

import torch

from formats.scheme import ActivationSpec
from qkernels.collective import ops
from qkernels.collective.channels import PeerLayout, Peers
from qkernels.collective.config import KIB, Algorithm, Limits
from qkernels.operands.codes import InputRounding
from qkernels.operands.limbs import LimbForm
from qkernels.operands.split_k import SplitKPartials
from qkernels.rowwise.spec import Branch, NormSpec
from tests.qkernels.compile.cards import empty
from tests.qkernels.compile.cases.case import (
    ASYMMETRIC,
    FLOATS,
    FP32,
    INTEGERS,
    SM90,
    SYMMETRIC,
    Case,
)
from tests.qkernels.virtual_ranks import virtual_ranks

LIMITS = Limits(one_shot=256 * KIB, two_shot=512 * KIB, rows=8)


@functools.cache
def peers(ranks: int, C: int) -> Peers:
    layout = PeerLayout.of_model(ranks, C, LIMITS)
    return Peers(virtual_ranks(ranks, layout.num_bytes, torch.device("cpu"))[ranks // 2], layout)


def all_reduce(ranks: int, how: Algorithm, dtype: torch.dtype = torch.bfloat16) -> None:
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


RANKS: dict[str, Case] = {
    "all-reduce of 2, one shot": Case(run=lambda: all_reduce(2, "one_shot")),
    "all-reduce of 8, one shot": Case(
        run=lambda: all_reduce(8, "one_shot"), quick=("sm_80", "sm_100")
    ),
    "all-reduce of 8, one shot, float32": Case(run=lambda: all_reduce(8, "one_shot", FP32)),
    "all-reduce of 2, two shots": Case(run=lambda: all_reduce(2, "two_shot")),
    "all-reduce of 8, two shots": Case(run=lambda: all_reduce(8, "two_shot"), quick=SM90),
    "norm over 2 ranks": Case(run=lambda: norm(2)),
    "norm over 2 ranks, more rows": Case(run=lambda: norm(2, M=8)),
    "norm over 2 ranks, widest": Case(run=lambda: norm(2, M=8, C=2**14)),
    "norm of split-K sums over 2 ranks": Case(run=lambda: norm(2, M=8, splits=4)),
    "norm of split-K sums over 4 ranks": Case(run=lambda: norm(4, M=8, splits=7)),
    "norm over 8 ranks": Case(run=lambda: norm(8)),
    "norm of split-K sums over 8 ranks": Case(
        run=lambda: norm(8, M=8, splits=4), quick=("sm_80", "sm_100")
    ),
    "norm of split-K sums over 4 ranks, widest": Case(run=lambda: norm(4, M=8, C=2**14, splits=4)),
    "norm of a norm over 2 ranks and quantize": Case(
        run=lambda: norm(2, M=8, form=INTEGERS, branch=True), quick=SM90
    ),
    "norm over 2 ranks and quantize to float8": Case(run=lambda: norm(2, form=FLOATS), least=89),
    "norm over 2 ranks to limbs": Case(run=lambda: norm(2, form=SYMMETRIC)),
    "norm of split-K sums over 8 ranks to limbs, asymmetric": Case(
        run=lambda: norm(8, M=4, splits=2, form=ASYMMETRIC)
    ),
}
