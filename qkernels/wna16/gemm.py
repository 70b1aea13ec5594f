"""y = x W^T with 4- or 8-bit weights and 16-bit activations: choose a plan and run it.

Legend: M rows of x, K inputs, N outputs.
"""

import functools
import importlib
from dataclasses import replace
from types import ModuleType

import torch

from formats.in_memory.fp4 import Fp4Weight
from formats.in_memory.k_weight import KWeight
from formats.in_memory.packed import PackedWeight
from qkernels.choice import parse_choice
from qkernels.errors import KernelError
from qkernels.gpu import device as gpu_device
from qkernels.linear.plan import GemmPlan, GemmProblem
from qkernels.linear.prepared import PreparedWeight
from qkernels.lora.term import LoraTerm, tiles_fault
from qkernels.operands.limbs import LimbForm, Limbs
from qkernels.operands.split_k import Consumer, LinearOutput, SplitKPartials, reduced
from qkernels.tuning import table as tuning_table
from qkernels.wna16 import prepack
from qkernels.wna16.layout import GroupedSpec
from qkernels.wna16.sm90_gemv_imma_config import GemvImmaConfig
from qkernels.wna16.sm90_large_m_config import (
    LargeMConfig,
    default_large_m_config,
    large_m_time,
    other_time,
)
from qkernels.wna16.sm90_small_m_config import (
    SMALL_M_ROWS,
    SmallMConfig,
    default_small_m_config,
    split_k_config,
)
from qkernels.wna16.triton_gemm import dequantize
from qkernels.wna16.tuned import TUNED
from qkernels.wna16.unpack.fp4_layout import prepare_fp4
from qkernels.wna16.variants import (
    ANY,
    CUBLAS,
    LARGE_M,
    Shape,
    WNA16Config,
    default_config,
    usable_config,
    variant_of,
)


def prepare_weight(
    packed: PackedWeight | KWeight | Fp4Weight,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> PreparedWeight:
    """Prepack a weight for all variants."""
    if isinstance(packed, Fp4Weight):
        return prepare_fp4(packed, dtype, device)
    if isinstance(packed, KWeight):
        return prepack.prepare_blocks(packed, dtype, device)
    return prepack.prepare_weight(packed, dtype, device)


def prepare_fixed_order(
    packed: PackedWeight | KWeight | Fp4Weight,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> PreparedWeight:
    """Run prepare_weight with scales rounded to `dtype`, which kernels apply in one instruction.

    A scale changes by at most 2^-9 of itself, as much as rounding changes an input. Scales of GGUF
    blocks are not rounded, because their kernel rounds each weight. Scales of 4-bit floats already
    fit.
    """
    if isinstance(packed, KWeight | Fp4Weight):
        return prepare_weight(packed, dtype, device)
    scales_NG = packed.scales_NG.to(dtype).to(packed.scales_NG.dtype)
    return prepare_weight(replace(packed, scales_NG=scales_NG), dtype, device)


def plan(
    problem: GemmProblem, M: int, consumer: Consumer | None = None, *, fused: bool = True
) -> GemmPlan:
    """Return the plan for M rows. `fused`: the previous operation produces the operand in `input`.

    With a consumer, the product may leave split-K partial sums that the consumer adds.
    """
    shape = shape_of(problem)
    fused = fused and not problem.sorts_inputs
    config = _config(problem, shape, M, fused)
    is_grouped = isinstance(shape.spec, GroupedSpec)
    if (
        consumer is not None
        and isinstance(config, SmallMConfig)
        and (is_grouped or not config.scales_weights)
    ):
        shared = split_k_config(
            consumer, M, shape.N, shape.K, shape.group, shape.spec.bits, shape.sm_count
        )
        if shared is not None:
            shared = replace(shared, scales_weights=is_grouped)
            return plan_for(shared, problem, output="split_k")
    return _in_two(problem, shape, M, config) or plan_for(config, problem)


def _in_two(
    problem: GemmProblem, shape: Shape, M: int, config: WNA16Config | None
) -> GemmPlan | None:
    """Return a plan of two kernels if a few tail rows would cost another wave (`rows_of_tiles`)."""
    sizes = shape.N, shape.K, shape.group, shape.spec.bits, shape.sm_count
    rows = rows_of_tiles(M, *sizes)
    if rows is None or LARGE_M.refuses(shape) is not None:
        return None
    choice = parse_choice(problem.requested)
    if choice != ANY or config != default_config(shape, M, fused=False):
        return None  # a kernel was requested, or a single kernel was measured as fastest
    tiles, rest = default_large_m_config(rows, *sizes), default_small_m_config(M - rows, *sizes)
    if rest is None:
        return None
    return replace(plan_for(tiles, problem), rows=rows, tail=plan_for(rest, problem))


def plan_for(config: WNA16Config | None, problem: GemmProblem, output: str = "sum") -> GemmPlan:
    """Return the plan with this config; None: dequantize, then cuBLAS."""
    operand = None
    if isinstance(config, GemvImmaConfig):
        operand = LimbForm(bits=problem.spec.bits, with_sums=not problem.spec.symmetric)
    return GemmPlan(
        variant=variant_of(config).name,
        config=config,
        operand=operand,
        input=None if problem.sorts_inputs else operand,
        output=output,
    )


def run(
    plan: GemmPlan,
    x: torch.Tensor | Limbs,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
    term: LoraTerm | None = None,
) -> LinearOutput:
    """Multiply x [M, K], or its limbs, to [M, N]. Equal inputs give equal bits.

    `term` is the adapters' term; it needs a plan for which `adapters_fault` returns None.
    """
    if plan.variant == CUBLAS.name:
        return torch.nn.functional.linear(x, dequantize(weight), bias)
    form = replace(x.form, with_tensor=False) if isinstance(x, Limbs) else None
    if form != plan.operand:
        raise KernelError(
            "linear x", f"expected the form {plan.operand}, found {form}", "prepare x for this plan"
        )
    kernel = _module(plan.variant)
    if plan.tail is not None:
        y_MN = x.new_empty(x.shape[0], weight.out_features)
        return run_into(y_MN, plan, x, weight, bias)
    terms = () if term is None else (term,)
    if plan.output == "split_k":
        partials = kernel.run_split_k(x, weight, bias, plan.config, *terms)
        return SplitKPartials(parts=partials, dtype=x.dtype)
    return kernel.run(x, weight, bias, plan.config, *terms)


def run_into(
    y_MN: torch.Tensor,
    plan: GemmPlan,
    x: torch.Tensor | Limbs,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run `run` and write the result to contiguous `y_MN`. Kernels for many rows make no copy."""
    if plan.tail is not None:
        head, rest = _module(plan.variant), _module(plan.tail.variant)
        head.run(x[: plan.rows], weight, bias, plan.config, y_MN=y_MN[: plan.rows])
        rest.run(x[plan.rows :], weight, bias, plan.tail.config, y_MN=y_MN[plan.rows :])
        return y_MN
    if isinstance(plan.config, LargeMConfig):
        return _module(plan.variant).run(x, weight, bias, plan.config, y_MN=y_MN)
    return y_MN.copy_(reduced(run(plan, x, weight, bias)))


def adapters_fault(plan: GemmPlan, sizes: tuple[int, ...]) -> str | None:
    """Return why the product cannot add adapters to linears of these sizes; None: it can."""
    if not variant_of(plan.config).adds_adapters:
        return f"{plan.variant} adds no adapters"
    if isinstance(plan.config, SmallMConfig) and plan.config.scales_weights:
        return "not every number of rows would add them in the product"
    return tiles_fault(sizes)


@functools.cache
def shape_of(problem: GemmProblem) -> Shape:
    """Return the shape of the weight and the properties of its GPU."""
    return Shape.on(
        problem.device,
        N=problem.out_features,
        K=problem.in_features,
        spec=problem.spec,
        sm_count=gpu_device.sm_count(problem.device),
    )


def _config(problem: GemmProblem, shape: Shape, M: int, fused: bool) -> WNA16Config | None:
    """Return the config measured on this GPU, else the default for M rows."""
    choice = parse_choice(problem.requested)
    row = None
    if not isinstance(shape.spec, GroupedSpec):  # tables have no grouped weights
        row = tuning_table.tuning_table_of(problem.device).find(
            TUNED, N=shape.N, K=shape.K, group=shape.group, bits=shape.spec.bits, M=M
        )
    if row is not None:
        config, runs = usable_config(row.config, shape, M)
        name = variant_of(config).name
        if runs and choice.only in (None, problem.kernel, name) and name not in choice.never:
            return config
    return default_config(shape, M, fused=fused, choice=choice)


@functools.cache
def _module(variant: str) -> ModuleType:
    """Import the module that has the variant's `run`."""
    name = "triton_gemm" if variant == "triton" else variant
    return importlib.import_module(f"qkernels.wna16.{name}")


TILE_ROWS = 128
# Model of sm90_small_m's time for tail rows: start time in us, and weights per us. With 64 rows it
# takes 12.8, 10.1, 34.5, 20.9 us for qkv, o, gate_up, down of an 8B model on an H200.
_TAIL_START_TIME = 5.5
_TAIL_WEIGHTS = 4e6
_WORTH = 0.95  # two kernels must take less than this fraction of the time of one


@functools.lru_cache(maxsize=2**14)
def rows_of_tiles(M: int, N: int, K: int, group: int, bits: int, sm_count: int) -> int | None:
    """Return how many rows sm90_large_m should run if sm90_small_m runs the rest.

    None: one kernel runs all rows. A few more rows may add a wave of tiles: the tiles of 1024 rows
    by 4096 outputs are all resident together, but with 1088 rows some must wait. This is common:
    prompts often have a power of two tokens, and decodes run in the same step. Legend: M rows of x,
    N outputs, K inputs.
    """
    rest = M % TILE_ROWS
    rows = M - rest
    if bits != 4 or not rows or not 0 < rest <= SMALL_M_ROWS[-1]:
        return None
    sizes = N, K, group, bits, sm_count
    tiles = default_large_m_config(rows, *sizes)
    if tiles is None:
        return None
    whole = default_large_m_config(M, *sizes)
    alone = other_time(M, *sizes) if whole is None else large_m_time(whole, M, N, K)
    apart = large_m_time(tiles, rows, N, K) + _TAIL_START_TIME + N * K / _TAIL_WEIGHTS
    return rows if apart < _WORTH * alone else None
