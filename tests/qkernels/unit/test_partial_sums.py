"""Split-K partial sums: their meaning, and the operations that add them."""

from dataclasses import replace

import pytest
import torch

from formats.in_memory.packed import PackedWeight
from formats.scheme import ActivationSpec, QuantSpec
from qkernels import ops
from qkernels.errors import KernelError
from qkernels.operands.codes import Codes, InputRounding
from qkernels.operands.limbs import LimbForm
from qkernels.operands.limbs_reference import from_limbs
from qkernels.operands.split_k import SplitKPartials, reduced, split_heads
from tests.qkernels.flat_attention import paged_kv

H, J, D = 4, 2, 8
ONES = ops.NormSpec(weight_C=torch.ones(16).bfloat16(), eps=1e-5)


def random_parts(*shape, dtype=torch.bfloat16, parts=3) -> SplitKPartials:
    generator = torch.Generator().manual_seed(0)
    return SplitKPartials(parts=torch.randn(parts, *shape, generator=generator), dtype=dtype)


def test_partial_sums_are_added_in_order_and_rounded_once():
    """In any other order the small ones would count: 2^24 + 1 + 1 is 2^24 in float32."""
    parts = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)])[:, None, None].expand(4, 1, 2)
    assert SplitKPartials(parts=parts, dtype=torch.float32).total().tolist() == [[0.0, 0.0]]
    parts = torch.tensor([1.0, 2.0**-8, 2.0**-8])[:, None, None].expand(3, 1, 1)
    total = SplitKPartials(parts=parts, dtype=torch.bfloat16).total()
    assert total.dtype == torch.bfloat16
    assert total.item() == 1 + 2**-7, "rounded between, it would be 1"


def test_partial_sums_have_the_shape_of_their_sum():
    x = random_parts(5, 16)
    assert (x.shape, x.ndim, x.dtype, x.device) == ((5, 16), 2, torch.bfloat16, x.parts.device)
    assert reduced(x).shape == x.shape
    tensor = torch.zeros(3)
    assert reduced(tensor) is tensor


@pytest.mark.parametrize(
    "parts", [torch.zeros(2, 3, 4).half(), torch.zeros(0, 3, 4), torch.zeros(3)]
)
def test_invalid_partial_sums_are_refused(parts):
    with pytest.raises(KernelError, match="partial sums: expected float32 .*found"):
        SplitKPartials(parts=parts, dtype=torch.float16)


def test_partial_sums_beyond_32_bit_offsets_are_refused():
    SplitKPartials(parts=torch.zeros(1).expand(2, 2**15, 2**15 - 1), dtype=torch.float16)
    with pytest.raises(KernelError, match=r"less than 2\^31.*total"):
        SplitKPartials(parts=torch.zeros(1).expand(2, 2**15, 2**15), dtype=torch.float16)


def test_heads_are_views_of_partial_sums():
    x = random_parts(5, (H + 2 * J) * D)
    whole = split_heads(reduced(x), (H, J, J), D)
    for part, want in zip(split_heads(x, (H, J, J), D), whole, strict=True):
        assert torch.equal(reduced(part), want) and part.shape == want.shape
        assert part.parts.untyped_storage().data_ptr() == x.parts.untyped_storage().data_ptr()


def rope(q, k, v):
    pages = [torch.zeros(2, 16, J, D, dtype=v.dtype) for _ in range(2)]
    cos_sin = torch.rand(9, D, generator=torch.Generator().manual_seed(1))
    positions, slots = torch.arange(5), torch.arange(5) * 3
    return (ops.rope_write_kv_(q, k, v, cos_sin, positions, paged_kv(*pages), slots), *pages)


def test_every_consumer_adds_partial_sums():
    x, residual = random_parts(5, 16), torch.ones(5, 16, dtype=torch.bfloat16)
    spec = ops.NormSpec(weight_C=torch.rand(16).bfloat16(), eps=1e-5)
    for form in (None, InputRounding(ActivationSpec(), None)):
        (got, total), (want, want_total) = (
            ops.norm(each, residual, spec, form) for each in (x, reduced(x))
        )
        assert torch.equal(total, want_total)
        pairs = [(got, want)] if form is None else zip(got, want, strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
    qkv = random_parts(5, (H + 2 * J) * D)
    got = rope(*split_heads(qkv, (H, J, J), D))
    want = rope(*split_heads(reduced(qkv), (H, J, J), D))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_output_forms_are_made_from_partial_sums():
    x, spec = random_parts(5, 16), ops.NormSpec(weight_C=torch.ones(16).bfloat16(), eps=1e-5)
    form = InputRounding(ActivationSpec(), None)
    codes, total = ops.norm(x, reduced(x), spec, form)
    assert isinstance(codes, Codes) and torch.equal(total, reduced(x) + reduced(x))
    x, spec = random_parts(3, 256), ops.NormSpec(weight_C=torch.ones(256).bfloat16(), eps=1e-5)
    form = LimbForm(bits=4)
    limbs, total = ops.norm(x, reduced(x), spec, form)
    want, want_total = ops.norm(reduced(x), reduced(x), spec, form)
    assert torch.equal(total, want_total)
    assert torch.equal(from_limbs(limbs), from_limbs(want))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: ops.norm(x, None, ONES),
        lambda x: ops.norm(x, None, ONES, LimbForm(bits=4)),
        lambda x: ops.norm(x, None, ONES, InputRounding(ActivationSpec(), None)),
        lambda x: ops.quantize_input(x, ActivationSpec()),
        lambda x: ops.to_limbs(x, LimbForm(bits=4)),
        lambda x: ops.activate(x, ops.ActSpec(kind="silu")),
        lambda x: ops.activate(x, ops.ActSpec(kind="relu"), InputRounding(ActivationSpec(), None)),
        lambda x: ops.activate(x, ops.ActSpec(kind="silu"), LimbForm(bits=4)),
        lambda x: ops.apply_rope(x, x, torch.zeros(9, 8), torch.arange(5)),
        lambda x: ops.write_kv_(x, x, paged_kv(x.parts, x.parts), torch.arange(5)),
        lambda x: ops.linear(x, weight_of(16)),
    ],
)
def test_operations_that_cannot_add_partial_sums_refuse_them(call):
    with pytest.raises(KernelError, match=r"expected a tensor, found split-K.*total\(\)"):
        call(random_parts(5, 16))


def test_heads_of_different_products_are_refused():
    qkv, other = random_parts(5, (H + 2 * J) * D), random_parts(5, (H + 2 * J) * D, parts=2)
    q, k, v = split_heads(qkv, (H, J, J), D)
    strided = SplitKPartials(
        parts=v.parts.transpose(2, 3).contiguous().transpose(2, 3), dtype=v.dtype
    )
    for wrong in ((q, reduced(k), v), (reduced(q), reduced(k), v), (q, k, strided)):
        with pytest.raises(KernelError, match="q, k, v: .*split-K sums of one product"):
            rope(*wrong)
    apart = torch.zeros(3, 5, D, 2 * (H + 2 * J)).transpose(2, 3)[:, :, ::2]
    heads = [SplitKPartials(parts=x, dtype=v.dtype) for x in apart.split([H, J, J], 2)]
    with pytest.raises(KernelError, match="q, k, v: .*split-K sums of one product"):
        rope(*heads)
    with pytest.raises(KernelError, match="q, k, v: .*split-K sums of one product"):
        rope(q, k, split_heads(other, (H, J, J), D)[2])


def weight_of(K: int):
    generator = torch.Generator().manual_seed(2)
    spec = QuantSpec(bits=4, symmetric=True, group_size=K)
    packed = PackedWeight.from_float(torch.randn(24, K, generator=generator), spec)
    return ops.prepare_weight(packed, torch.bfloat16)


def test_kernels_without_partial_sums_return_the_sum():
    weight, bias = weight_of(64), torch.randn(24).bfloat16()
    x = torch.randn(17, 64).bfloat16()
    for consumer in ("norm", "rope"):
        plan = ops.plan_linear(weight, 17, consumer)
        assert plan.output == "sum"
        assert torch.equal(ops.linear(x, weight, bias, plan), ops.linear(x, weight, bias))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    sorting = replace(weight, input_order=order)
    plan = ops.plan_linear(sorting, 17, "norm")
    assert torch.equal(ops.linear(x, sorting, None, plan), ops.linear(x[:, order], weight))
    with pytest.raises(KernelError, match="linear bias"):
        ops.linear(x, weight, bias[:8], plan)
