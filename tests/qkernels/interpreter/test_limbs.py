"""Limbs made by a kernel, alone or fused, are those of the plain torch twin."""

from dataclasses import replace

import pytest
import torch

from qkernels import ops
from qkernels.operands.limbs import LimbForm
from qkernels.operands.limbs_reference import from_limbs, to_limbs
from tests.qkernels.limb_bits import written

FORMS = [(M, LimbForm(bits=bits, with_sums=M > 1)) for M in (1, 2, 3, 4) for bits in (4, 8)]
SILU = ops.ActSpec(kind="silu")
IDS = [f"{M} rows, {form.bits} bits" for M, form in FORMS]
forms = pytest.mark.parametrize("M, form", FORMS, ids=IDS)


def random_inputs(M, K, dtype, spread=0):
    generator = torch.Generator().manual_seed(M + K)
    x = torch.randn(M, K, generator=generator)
    return (x * 2 ** (spread * torch.rand(M, K, generator=generator))).to(dtype)


def poison(device):
    from qkernels.gpu.workspace import workspace

    workspace(device)[0].fill_(float("nan"))


def check_equal(limbs, make_reference):
    got = written(limbs)
    poison(limbs.words.device)
    for have, want in zip(got, written(make_reference()), strict=True):
        assert torch.equal(have, want)


def check_near(values, want):
    """Few are apart, by a rounding or two."""
    apart = (values.double() - want.double()).abs()
    assert (apart <= 2 * torch.finfo(want.dtype).eps * want.double().abs()).all()
    assert (apart > 0).double().mean() < 0.02


@forms
@pytest.mark.parametrize("spread", [0, 12])
def test_limbs(half, device, M, form, spread):
    x = random_inputs(M, 384, half, spread).to(device)
    x[0, 5], x[-1, :128] = 0, 0
    poison(device)
    limbs = ops.to_limbs(x, form, kernel="triton")
    check_equal(limbs, lambda: to_limbs(x, form))


@forms
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_nan_and_inf(half, device, M, form):
    x = random_inputs(M, 256, half)
    x[-1, 200] = float("inf")
    x[0, 3] = float("nan")
    values = from_limbs(ops.to_limbs(x.to(device), form, kernel="triton")).cpu()
    assert values[0, :128].isnan().all() and values[-1, 128:].isnan().all()
    other = values.clone()
    other[0, :128], other[-1, 128:] = 0, 0
    want = x.double()
    want[0, :128], want[-1, 128:] = 0, 0
    assert (other - want).norm() <= 1e-7 * want.norm()


@pytest.mark.parametrize("M, form", FORMS[:2] + FORMS[-3:-1], ids=IDS[:2] + IDS[-3:-1])
def test_rows_with_strides_and_at_an_odd_address(half, device, M, form):
    x = random_inputs(M, 257, half).to(device)
    for given in (x[:, 1:], x.flatten()[1 : 1 + M * 256].view(M, 256)):
        check_equal(
            ops.to_limbs(given, form, kernel="triton"),
            lambda given=given: to_limbs(given.contiguous(), form),
        )


@forms
@pytest.mark.parametrize("C", [128, 640])
def test_embedding_rows_with_media_states(half, device, M, form, C):
    table, state = (random_inputs(rows, C, half).to(device) for rows in (9, M))
    norms = [random_inputs(1, C, half).to(device)[0] for _ in range(2)]
    tokens = torch.tensor([8, 0, 3, 5], device=device)[:M]
    inputs = tokens, table, norms[0], state, norms[1], 1e-5
    poison(device)
    limbs, normed = ops.embed_norms(*inputs, form, kernel="triton")
    both, want = ops.embed_norms(*inputs, kernel="reference")
    check_near(from_limbs(limbs), both)
    check_near(normed, want)


@forms
@pytest.mark.parametrize("C, add", [(128, True), (1152, False), (1152, True)])
def test_norm(half, device, M, form, C, add):
    """A sum in another order may move a value by its last bit; the limbs are of such values.

    9 steps: a block has 8.
    """
    # so small that eps counts
    x, residual = (
        (random_inputs(M, C + i, half)[:, :C] / 256).contiguous().to(device) for i in (0, 1)
    )
    weight = random_inputs(1, C, half)[0].to(device)
    poison(device)
    inputs = x, residual if add else None, ops.NormSpec(weight_C=weight, eps=1e-5)
    limbs, total = ops.norm(*inputs, form, kernel="triton")
    want, want_total = ops.norm(*inputs)
    assert torch.equal(total, want_total)
    values = from_limbs(limbs).to(half)
    check_near(values, want)
    check_equal(limbs, lambda: to_limbs(values, form))


@pytest.mark.parametrize("add", [False, True])
def test_norm_of_row_larger_than_registers(half, device, add, monkeypatch):
    from qkernels.rowwise import norm

    monkeypatch.setattr(norm, "MAX_CHANNELS", 128)
    test_norm(half, device, 3, LimbForm(bits=4), 256, add)


@forms
def test_silu(half, device, M, form):
    width = 640
    x = random_inputs(M, 2 * width, half).to(device)
    want = ops.activate(x, SILU)
    poison(device)
    limbs = ops.activate(x, SILU, form, kernel="triton")
    values = from_limbs(limbs).to(half)
    check_near(values, want)
    check_equal(limbs, lambda: to_limbs(values, form))


@pytest.mark.parametrize("M, form", FORMS[2:4] + FORMS[-2:], ids=IDS[2:4] + IDS[-2:])
@pytest.mark.parametrize("op", ["to_limbs", "norm", "norm of a sum", "silu"])
def test_limbs_and_tensor_outputs_together(half, device, M, form, op):
    """The limbs were made of the tensor that adapters read, and are those without it."""
    x, weight = random_inputs(M, 1152, half).to(device), random_inputs(1, 1152, half)[0].to(device)
    spec = ops.NormSpec(weight_C=weight, eps=1e-5)
    calls = {
        "to_limbs": lambda form: ops.to_limbs(x, form, "triton"),
        "norm": lambda form: ops.norm(x, None, spec, form, kernel="triton")[0],
        "norm of a sum": lambda form: ops.norm(x, x, spec, form, kernel="triton")[0],
        "silu": lambda form: ops.activate(torch.cat([x, x], 1), SILU, form, "triton"),
    }
    alone, both = calls[op](form), calls[op](replace(form, with_tensor=True))
    assert alone.tensor is None and both.tensor.shape == (M, 1152)
    poison(device)
    of_tensor = to_limbs(both.tensor, form)
    for have, *want in zip(written(both), written(alone), written(of_tensor), strict=True):
        assert all(torch.equal(have, each) for each in want)
