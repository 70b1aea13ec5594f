"""Linear operations: each checks its arguments, then runs a kernel. Legend: see qkernels/ops.py."""

import functools
from dataclasses import replace
from types import ModuleType

import torch

from formats.in_memory.fp4 import Fp4Weight
from formats.in_memory.weights import Weight
from qkernels import dispatch
from qkernels.checks import check_float, check_tensor, expect_ndim
from qkernels.choice import FIXED_ORDER
from qkernels.errors import KernelError
from qkernels.linear.autograd import FrozenLinear
from qkernels.linear.fixed_order import fixed_order_linear as fixed_order_linear
from qkernels.linear.plan import GemmPlan, GemmProblem, plan_without_choice
from qkernels.linear.prepared import PreparedWeight
from qkernels.linear.rows import LINEAR
from qkernels.lora.term import LoraTerm, check_term
from qkernels.operands.codes import CODE_DTYPES, Codes, InputRounding
from qkernels.operands.forms import LinearInput, with_tensor
from qkernels.operands.limbs import LimbForm, Limbs
from qkernels.operands.split_k import Consumer, LinearOutput, reduced
from qkernels.problem import FLOAT_DTYPES, Problem
from qkernels.rowwise import ops as rowwise
from qkernels.tuning import table as tuning_table


def prepare_weight(
    packed: Weight,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    kernel: str | None = None,
) -> PreparedWeight:
    """Convert a weight to the layout of one kernel. `packed` is not changed.

    `dtype` is the dtype of the activations. `device` None keeps the weight's device. `kernel`
    requests a kernel or one of its variants by name, or excludes the names that have a leading
    minus (`explain("linear", ...)` lists all names). Raises KernelError if no kernel can run.
    """
    if isinstance(packed, Fp4Weight) and packed.activation is not None:
        packed = packed.as_codes()  # no kernel takes FP4 weights with 8-bit x; codes are exact
    device = packed.device if device is None else torch.device(device)
    if dtype not in FLOAT_DTYPES:
        raise KernelError(
            "activations", f"expected float32, float16 or bfloat16, found {dtype}", "convert x"
        )
    problem = Problem(
        device=device.type,
        dtype=dtype,
        requested=kernel,
        spec=packed.spec,
        out_features=packed.out_features,
        in_features=packed.in_features,
        activation=packed.activation,
    )
    row = dispatch.choose(LINEAR, problem)
    order = packed.input_order
    if order is not None:  # kernels see sorted inputs; `linear` sorts x
        packed, order = replace(packed, input_order=None), order.to(device)
    module = dispatch.module_of(LINEAR, row.name)
    prepare = module.prepare_weight
    if kernel == FIXED_ORDER:
        prepare = getattr(module, "prepare_fixed_order", prepare)
    prepared = prepare(packed, dtype, device)
    return replace(
        prepared,
        kernel=row.name,
        input_order=order,
        activation=packed.activation,
        requested=kernel,
    )


def plan_linear(
    weight: PreparedWeight,
    M: int,
    consumer: Consumer | None = None,
    *,
    fused: bool = True,
    adapted: tuple[int, ...] | None = None,
) -> GemmPlan:
    """Return the cached plan of `linear` for M >= 1 rows: kernel, input form and output form.

    - `consumer`: the only operation that reads the result; the result may then be split-K partials.
    - `fused`: the operation before the product can produce the form `input` at little cost.
    - `adapted`: output sizes of the fused linears, if rows have LoRA adapters. Adapters read the
      input as a tensor, so the form `input` then is or includes a tensor.
    """
    return _plan(weight.problem, M, consumer, fused, adapted, tuning_table.num_changes())


@functools.lru_cache(maxsize=2**16)
def _plan(
    problem: GemmProblem,
    M: int,
    consumer: Consumer | None,
    fused: bool,
    adapted: tuple[int, ...] | None,
    tuned: int,
) -> GemmPlan:
    """Implement plan_linear. `tuned` renews the plans when the tuning table has changed."""
    module = dispatch.module_of(LINEAR, problem.kernel)
    make = getattr(module, "plan", None)
    if make is None:
        plan = plan_without_choice(problem)
        return plan if adapted is None else replace(plan, input=None)
    plan = make(problem, M, consumer, fused=fused)
    if adapted is None:
        return plan
    if with_tensor(plan.input) is None:
        plan = make(problem, M, consumer, fused=False)
    fault = getattr(module, "adapters_fault", None)
    adds = fault is not None and fault(plan, adapted) is None
    if not adds and plan.output == "split_k":  # lora_expand_ needs the finished sum
        plan = make(problem, M, fused=False)
    return replace(plan, input=with_tensor(plan.input), adds_adapters=adds)


def linear(
    x: LinearInput,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
    plan: GemmPlan | None = None,
    term: LoraTerm | None = None,
    out: torch.Tensor | None = None,
) -> LinearOutput:
    """Multiply x [..., K] by the weight's transpose and add bias [N]. Returns [..., N].

    With a plan, x may have the form `plan.input`, and the result has the form `plan.output`. `term`
    is the LoRA adapters' term; it needs `plan.adds_adapters`. `out`: contiguous [M, N] to write the
    result to, for x [M, K] or its codes without a term.

    x gets a gradient from kernels that do not round it.
    """
    module = dispatch.module_of(LINEAR, weight.kernel)
    if out is not None:
        return _linear_into(out, module, x, weight, bias, plan)
    if term is not None:
        return _adapted(module, x, weight, bias, plan, term)
    if isinstance(x, Codes):
        check_codes(*x, weight, bias)
        codes_MK = weight.sorted_inputs(x.codes_MK)
        plan = plan or plan_linear(weight, max(1, codes_MK.shape[0]))
        return module.run(plan, Codes(codes_MK, x.scales_M1), weight, bias)
    if isinstance(x, Limbs):
        check_limbs_of(x, weight, bias)
        plan = plan or plan_linear(weight, x.num_rows)
        return module.run(plan, x, weight, bias)
    check_linear(x, weight, bias)
    if needs_gradient(x) and (weight.activation is not None or hasattr(module, "dequantize")):
        return FrozenLinear.apply(
            x, lambda x: linear(x, weight, bias), lambda: gradient_weight(weight)
        )
    x = weight.sorted_inputs(x)
    # a reshape or view, even one without effect, costs a tenth of this call's host time
    x_MK = (x if x.ndim == 2 else x.reshape(-1, weight.in_features)).contiguous()
    if x_MK.shape[0] == 0:
        return x.new_empty(*x.shape[:-1], weight.out_features)
    plan = plan or plan_linear(weight, x_MK.shape[0], fused=False)
    y_MN = module.run(plan, _as_operand(x_MK, plan), weight, bias)
    return y_MN if x.ndim == 2 else y_MN.view(*x.shape[:-1], weight.out_features)


def _linear_into(
    out_MN: torch.Tensor,
    module: ModuleType,
    x: torch.Tensor | Codes,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    plan: GemmPlan | None,
) -> torch.Tensor:
    """Run `linear` on x [M, K], M >= 1, and write the result to `out_MN`.

    A kernel that cannot write there makes its own result, which is copied.
    """
    if isinstance(x, Codes):
        check_codes(*x, weight, bias)
        x_MK, x = x.codes_MK, Codes(weight.sorted_inputs(x.codes_MK).contiguous(), x.scales_M1)
    else:
        check_linear(x, weight, bias)
        x_MK, x = x, weight.sorted_inputs(x).contiguous()
    M, _ = expect_ndim("linear x", x_MK, 2)
    check_tensor("linear out", out_MN, (M, weight.out_features), (weight.dtype,), x_MK)
    if not out_MN.is_contiguous():
        raise KernelError(
            "linear out",
            f"expected a contiguous tensor, found strides {out_MN.stride()}",
            "make it contiguous",
        )
    plan = plan or plan_linear(weight, M, fused=False)
    x = x if isinstance(x, Codes) else _as_operand(x, plan)
    if hasattr(module, "run_into"):
        return module.run_into(out_MN, plan, x, weight, bias)
    return out_MN.copy_(reduced(module.run(plan, x, weight, bias)))


def _adapted(
    module: ModuleType,
    x: LinearInput,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
    plan: GemmPlan | None,
    term: LoraTerm,
) -> LinearOutput:
    """Run `linear` on x [M, K], M >= 1, with a kernel that also adds the LoRA term."""
    if plan is None or not plan.adds_adapters:
        raise KernelError(
            "linear term",
            f"expected a plan whose kernel adds adapters, found {plan and plan.variant}",
            "call lora_expand_ after the linear",
        )
    if isinstance(x, Limbs):
        check_limbs_of(x, weight, bias)
        M = x.num_rows
    else:
        check_linear(x, weight, bias)
        M, _ = expect_ndim("linear x", x, 2)
        x = _as_operand(weight.sorted_inputs(x).contiguous(), plan)
    check_term("linear term", term, M, weight.out_features, weight.dtype)
    return module.run(plan, x, weight, bias, term)


def _as_operand(x_MK: torch.Tensor, plan: GemmPlan) -> LinearInput:
    if isinstance(plan.operand, InputRounding):
        return Codes(*rowwise.quantize_input(x_MK, *plan.operand))
    if isinstance(plan.operand, LimbForm):
        return rowwise.to_limbs(x_MK, plan.operand)
    return x_MK


def needs_gradient(x: torch.Tensor) -> bool:
    """Return True if autograd records operations on x."""
    return torch.is_grad_enabled() and x.requires_grad


def gradient_weight(weight: PreparedWeight) -> torch.Tensor:
    """Return the weight [N, K] by which backward multiplies the gradient of the output."""
    if weight.activation is not None:
        raise KernelError(
            "linear x",
            f"has no gradient here: {weight.kernel} rounds x and keeps only codes of the weight",
            "call a QuantLinear that is prepared without release=True",
        )
    module = dispatch.module_of(LINEAR, weight.kernel)
    if hasattr(module, "dequantize"):
        return _in_order_of_inputs(module.dequantize(weight), weight)
    return linear(
        torch.eye(weight.in_features, dtype=weight.dtype, device=weight.device), weight
    ).t()


def _in_order_of_inputs(weight_NK: torch.Tensor, weight: PreparedWeight) -> torch.Tensor:
    """Return the weight with its columns in the model's input order."""
    if weight.input_order is None:
        return weight_NK
    unsorted_NK = torch.empty_like(weight_NK)
    unsorted_NK[:, weight.input_order] = weight_NK
    return unsorted_NK


def linear_codes(
    codes_MK: torch.Tensor,
    scales_M1: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run `linear` on codes [M, K] with float32 scales [M, 1]. Returns [M, N].

    For an input that another operation has already quantized. The weight must be prepared by a
    kernel for 8-bit activations or by `reference`, with one input scale per row of x. The result
    has the dtype that the weight was prepared for.
    """
    check_codes(codes_MK, scales_M1, weight, bias)
    module = dispatch.module_of(LINEAR, weight.kernel)
    return module.linear_codes(weight.sorted_inputs(codes_MK), scales_M1, weight, bias)


def check_codes(
    codes_MK: torch.Tensor,
    scales_M1: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None,
) -> None:
    """Raise KernelError unless the weight takes codes [M, K] with one scale per row."""
    if weight.activation is None or weight.activation.per == "group":
        found = "float inputs" if weight.activation is None else "a scale per group"
        raise KernelError(
            "linear_codes weight",
            f"expected one that takes 8-bit inputs with a scale per row, found {found}",
            "call linear with x as a tensor",
        )
    wanted = CODE_DTYPES[weight.activation.type]
    check_tensor("linear_codes codes", codes_MK, (None, weight.in_features), (wanted,), codes_MK)
    if codes_MK.device != weight.device:
        raise KernelError(
            "linear_codes codes",
            f"expected codes on {weight.device}, found {codes_MK.device}",
            "move them with .to()",
        )
    rows = codes_MK.shape[0]
    check_tensor("linear_codes scales", scales_M1, (rows, 1), (torch.float32,), codes_MK)
    if bias is not None:
        check_tensor("linear_codes bias", bias, (weight.out_features,), (weight.dtype,), codes_MK)


def check_limbs_of(limbs: Limbs, weight: PreparedWeight, bias: torch.Tensor | None) -> None:
    """Raise KernelError unless the limbs and the bias fit the weight."""
    if weight.input_order is not None:
        raise KernelError("linear limbs", "the weight sorts its inputs", "give x as a tensor")
    if limbs.words.device != weight.device or limbs.in_features != weight.in_features:
        raise KernelError(
            "linear limbs",
            f"expected limbs of {weight.in_features} inputs on {weight.device},"
            f" found {limbs.in_features} on {limbs.words.device}",
            "make limbs of this weight's inputs",
        )
    if bias is not None:
        check_tensor("linear bias", bias, (weight.out_features,), (weight.dtype,), limbs.words)


def check_linear(x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None) -> None:
    """Raise KernelError unless x [..., K] and bias [N] or None fit the weight."""
    check_float("linear x", x)
    if x.ndim == 0 or x.shape[-1] != weight.in_features:
        raise KernelError(
            "linear x",
            f"expected [..., {weight.in_features}], found {list(x.shape)}",
            "pass rows of this many inputs",
        )
    if x.dtype != weight.dtype or x.device != weight.device:
        raise KernelError(
            "linear x",
            f"expected {weight.dtype} on {weight.device}, found {x.dtype} on {x.device}",
            "prepare the weight for this dtype and device",
        )
    if bias is not None:
        check_tensor("linear bias", bias, (weight.out_features,), (x.dtype,), x)
