"""Calls of the operations on rows: norms, activations, conversions, sampling."""

import torch

from formats.scheme import ActivationSpec
from qkernels import ops
from qkernels.operands.codes import InputRounding
from qkernels.operands.forms import InputForm
from qkernels.operands.limbs import LimbForm
from qkernels.operands.split_k import SplitKPartials
from qkernels.rowwise.spec import PLAIN, ActKind
from qkernels.sampling.settings import SampleSettings
from qkernels.sampling.words import SampleRow
from tests.qkernels.compile.cards import empty
from tests.qkernels.compile.cases.case import (
    ASYMMETRIC,
    BF16,
    FLOATS,
    FP32,
    INTEGERS,
    ROUNDED,
    SM90,
    SYMMETRIC,
    Case,
)


def norm(
    C: int,
    splits: int = 0,
    rounding: ActivationSpec | None = None,
    M: int = 1,
    branch: ops.Branch = PLAIN,
    weighted: bool = True,
    dtype: torch.dtype = BF16,
    addend: bool = False,
) -> None:
    x = empty(M, C)
    if splits:
        x = SplitKPartials(parts=empty(splits, M, C, dtype=FP32), dtype=BF16)
    spec = ops.NormSpec(weight_C=empty(C, dtype=dtype), eps=1e-5) if weighted else None
    form = None if rounding is None else InputRounding(rounding, None)
    ops.norm(x, empty(M, C), spec, form, branch, addend=empty(M, C) if addend else None)


def layer_norm(C: int, form: InputForm = None, M: int = 1) -> None:
    spec = ops.NormSpec(kind="layer", weight_C=empty(C), bias_C=empty(C), eps=1e-5)
    ops.norm(empty(M, C), empty(M, C), spec, form)


def norm_behind(C: int, dtype: torch.dtype = BF16) -> ops.Branch:
    """A norm of what is added."""
    return ops.Branch(norm=ops.NormSpec(weight_C=empty(C, dtype=dtype), eps=1e-5))


def norm_to_limbs(
    form: LimbForm, M: int = 4, K: int = 4096, splits: int = 0, branch: ops.Branch = PLAIN
) -> None:
    x = empty(M, K)
    if splits:
        x = SplitKPartials(parts=empty(splits, M, K, dtype=FP32), dtype=BF16)
    ops.norm(x, empty(M, K), ops.NormSpec(weight_C=empty(K), eps=1e-5), form, branch)


def activate(kind: ActKind, M: int, width: int, form: InputForm = None, gated: bool = True) -> None:
    ops.activate(empty(M, width), ops.ActSpec(kind=kind, gated=gated), form)


def quantize(C: int, spec: ActivationSpec = INTEGERS) -> None:
    ops.quantize_input(empty(1, C), spec)


def sample() -> None:
    rows = [SampleRow(temperature=0.7, top_k=50, top_p=0.9, num_logprobs=3)] * 2
    ops.sample_(empty(2, 128256), SampleSettings.of(rows))


ROWWISE: dict[str, Case] = {
    "quantize": Case(run=lambda: quantize(4096), quick=("sm_120",)),
    "quantize, widest": Case(run=lambda: quantize(2**15)),
    "quantize to float8": Case(run=lambda: quantize(2**14, FLOATS), least=89),
    "norm": Case(run=lambda: norm(4096), quick=("sm_89", "sm_100")),
    "norm of split-K sums": Case(run=lambda: norm(4096, 7)),
    "norm of split-K sums, widest": Case(run=lambda: norm(8192, 4), quick=SM90),
    "norm of most split-K sums": Case(run=lambda: norm(2048, 16)),
    "norm and quantize": Case(run=lambda: norm(2**13, rounding=INTEGERS)),
    "norm and quantize, widest": Case(run=lambda: norm(2**14, rounding=INTEGERS)),
    "norm of split-K sums and quantize": Case(run=lambda: norm(2**12, 7, INTEGERS)),
    "norm of two ranks' sum": Case(run=lambda: norm(8192, M=8000, addend=True), quick=SM90),
    "norm of two ranks' sum and quantize, widest": Case(
        run=lambda: norm(2**14, M=8000, rounding=INTEGERS, addend=True)
    ),
    "norm of a norm": Case(run=lambda: norm(4096, 7, branch=norm_behind(4096))),
    "norm of a norm, widest, float32": Case(
        run=lambda: norm(8192, 4, branch=norm_behind(8192, FP32), dtype=FP32)
    ),
    "sum of a norm": Case(run=lambda: norm(4096, branch=norm_behind(4096), weighted=False)),
    "norm of a product": Case(run=lambda: norm(4096, 7, branch=ops.Branch(factor=0.22))),
    "norm of a norm and quantize, widest": Case(
        run=lambda: norm(2**14, rounding=INTEGERS, branch=norm_behind(2**14))
    ),
    "norm of a norm to limbs": Case(run=lambda: norm_to_limbs(SYMMETRIC, branch=norm_behind(4096))),
    "gelu": Case(run=lambda: activate("gelu_tanh", 1, 28672)),
    "gelu and quantize": Case(run=lambda: activate("gelu_tanh", 1000, 28672, ROUNDED)),
    "gelu to limbs": Case(run=lambda: activate("gelu_tanh", 4, 8192, SYMMETRIC)),
    "silu": Case(run=lambda: activate("silu", 1, 28672)),
    "silu and quantize": Case(run=lambda: activate("silu", 1000, 28672, ROUNDED)),
    "silu and quantize, few rows": Case(run=lambda: activate("silu", 1, 28672, ROUNDED)),
    "silu and quantize, widest": Case(
        run=lambda: activate("silu", 1, 2**16, ROUNDED), quick=("sm_80", "sm_120")
    ),
    "limbs": Case(run=lambda: ops.to_limbs(empty(4, 4096), SYMMETRIC)),
    "limbs, asymmetric": Case(run=lambda: ops.to_limbs(empty(4, 4096), ASYMMETRIC)),
    "norm to limbs": Case(run=lambda: norm_to_limbs(SYMMETRIC)),
    "norm of parts to limbs": Case(run=lambda: norm_to_limbs(SYMMETRIC, K=2048, splits=16)),
    "norm of parts to limbs, wide": Case(run=lambda: norm_to_limbs(SYMMETRIC, splits=16)),
    "norm to limbs, asymmetric": Case(run=lambda: norm_to_limbs(ASYMMETRIC)),
    "silu to limbs": Case(run=lambda: activate("silu", 4, 8192, SYMMETRIC)),
    "silu to limbs, asymmetric": Case(run=lambda: activate("silu", 4, 8192, ASYMMETRIC)),
    "layer norm": Case(run=lambda: layer_norm(4096), quick=SM90),
    "layer norm and quantize": Case(run=lambda: layer_norm(4096, ROUNDED)),
    "layer norm to limbs": Case(run=lambda: layer_norm(4096, SYMMETRIC)),
    "relu, not gated": Case(run=lambda: activate("relu", 1, 16384, gated=False), quick=SM90),
    "gelu by erf and quantize": Case(
        run=lambda: activate("gelu", 1000, 16384, ROUNDED, gated=False)
    ),
    "relu to limbs": Case(run=lambda: activate("relu", 4, 4096, SYMMETRIC, gated=False)),
    "sampling": Case(run=sample, quick=SM90),
}
