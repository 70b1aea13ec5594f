"""QuantLinear alone, on a CPU: what it holds, what it saves, and when its kernel copy is remade."""

import copy
import io
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from formats.codecs import gptq
from formats.errors import CheckpointError, InputError, RangeError, SchemeError
from formats.in_memory.packed import PackedWeight
from formats.scheme import Scheme
from qkernels import QuantLinear, ops
from qkernels.errors import KernelError

NAMES = ["qweight", "qzeros", "scales", "g_idx"]


def float_linear(N=64, K=96, bias=True, seed=0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(K, N, bias=bias)


def assert_same(a: dict, b: dict) -> None:
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


REFUSED = [
    (7, 128, "w4a16-sym", "up: its 7 outputs are not divisible by 32.*leave the layer in float"),
    (64, 129, "w8a8", "up: its 129 inputs are not divisible by 32.*leave the layer in float"),
    (64, 96, "w4a16-sym", "up: its 96 inputs .* group size 128 .give the scheme w4a16-sym-g32"),
    (64, 32 * 7, "w8a16-sym", "its 224 inputs .*give the scheme w8a16-sym-g32"),
    (0, 128, "w4a16-sym", "up: is empty"),
]


@pytest.mark.parametrize(("N", "K", "scheme", "text"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_shapes_are_refused(N, K, scheme, text):
    with pytest.raises(SchemeError, match=text):
        QuantLinear.from_float(torch.zeros(N, K), scheme, name="up")


def test_meta_device_weights_are_refused():
    with torch.device("meta"), pytest.raises(InputError, match="up: is on the meta device.*load"):
        QuantLinear.from_float(torch.nn.Linear(128, 64), "w4a16-sym", name="up")


@pytest.mark.parametrize("scheme", [None, 4, torch.int8])
def test_schemes_that_are_not_names_are_refused(scheme):
    with pytest.raises(SchemeError, match="^scheme: expected a name, found"):
        QuantLinear.from_float(torch.nn.Linear(256, 128), scheme)


@pytest.mark.parametrize("wrong", [torch.float64, torch.int64])
def test_activation_dtype_without_kernel_is_refused(wrong):
    layer = QuantLinear.from_float(torch.nn.Linear(256, 128), "w4a16-sym")
    words = f"^activations: expected float32, float16 or bfloat16, found {wrong}"
    with pytest.raises(KernelError, match=words):
        layer(torch.ones(2, 256, dtype=wrong))


def test_transposed_scales_are_refused():
    codes, scales = torch.zeros(64, 256, dtype=torch.uint8), torch.ones(2, 64)
    with pytest.raises(InputError, match=r"scales: expected \[64, groups\], found \[2, 64\]"):
        QuantLinear.from_codes(codes, scales, scheme="w4a16-sym")


@pytest.mark.parametrize("scheme", ["w4a16-sym-g32", "w4a16-asym-g32", "w8a16-sym-channel"])
def test_from_float_equals_rounding_rule(assert_close, scheme):
    linear, x = float_linear(), torch.randn(2, 3, 96)
    layer = QuantLinear.from_float(linear, scheme)
    packed = PackedWeight.from_float(linear.weight.detach(), Scheme.parse(scheme).weight)
    assert_same(gptq.encode(packed), {name: getattr(layer, name) for name in NAMES})
    assert torch.equal(layer.dequantize(), packed.dequantize())
    want = x.double() @ packed.dequantize(torch.float64).t() + linear.bias.detach().double()
    assert_close("forward", want, layer(x), 1e-6)
    assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_from_float_takes_a_weight_and_a_bias():
    linear = float_linear()
    a = QuantLinear.from_float(linear, "w4a16-sym-g32")
    b = QuantLinear.from_float(linear.weight, Scheme.parse("w4a16-sym-g32"), linear.bias)
    assert_same(a.state_dict(), b.state_dict())
    assert QuantLinear.from_float(linear.weight, "w4a16-sym-g32").bias is None


def test_state_dict_equals_gptq_tensors():
    assert list(QuantLinear.from_float(float_linear(), "w4a16-sym-g32").state_dict()) == [
        *NAMES,
        "bias",
    ]
    layer = QuantLinear.from_float(float_linear(bias=False), "w4a16-sym-g32")
    layer(torch.ones(1, 96))
    state = layer.state_dict()
    assert {name: (t.dtype, tuple(t.shape)) for name, t in state.items()} == {
        "qweight": (torch.int32, (12, 64)),
        "qzeros": (torch.int32, (3, 8)),
        "scales": (torch.float16, (3, 64)),
        "g_idx": (torch.int32, (96,)),
    }
    assert (state["qzeros"] == 0x77777777).all()
    assert not list(layer.parameters())


def test_from_codes_keeps_a_solvers_result():
    codes = torch.randint(0, 16, (32, 64), dtype=torch.uint8)
    scales = torch.randn(32, 2).float()
    zeros = torch.randint(1, 16, (32, 2), dtype=torch.uint8)
    layer = QuantLinear.from_codes(codes, scales, zeros, scheme="w4a16-asym-g32")
    packed = layer.packed()
    assert torch.equal(packed.codes(), codes)
    assert torch.equal(packed.scales_NG, scales) and packed.scales_NG.dtype == torch.float32
    assert torch.equal(packed.zeros_NG, zeros)
    zeros[0] = 0  # v1 could not store it; asymmetric layers have v2 zeros
    layer = QuantLinear.from_codes(codes, scales, zeros, scheme="w4a16-asym-g32")
    assert torch.equal(layer.packed().zeros_NG, zeros)


@pytest.mark.parametrize("scale", [1e5, 1e-8])
def test_from_codes_refuses_unstorable_scales(scale):
    codes = torch.randint(0, 16, (32, 64), dtype=torch.uint8)
    with pytest.raises(RangeError, match="scales are beyond float16"):
        QuantLinear.from_codes(codes, torch.full((32, 2), scale), scheme="w4a16-sym-g32")


def test_from_float_refuses_other_layer_types():
    with pytest.raises(InputError, match=r"conv: expected a torch.nn.Linear .* found Conv1d"):
        QuantLinear.from_float(torch.nn.Conv1d(64, 64, 1), "w4a16-sym-g32", name="conv")


@pytest.mark.parametrize("magnitude", [1e8, 1e-8])
def test_from_float_refuses_weights_beyond_scale_range(magnitude):
    linear = torch.nn.Linear(64, 32)
    linear.weight.data *= magnitude
    with pytest.raises(RangeError, match="layers.3.up: its largest weight is"):
        QuantLinear.from_float(linear, "w4a16-sym-g32", name="layers.3.up")


def test_load_state_dict_into_an_empty_layer():
    full = QuantLinear.from_float(float_linear(), "w4a16-sym-g32")
    empty = QuantLinear(96, 64, "w4a16-sym-g32", bias=True)
    with pytest.raises(CheckpointError, match="is empty: .*load_state_dict"):
        empty(torch.ones(1, 96))
    empty.load_state_dict(full.state_dict())
    assert_same(full.state_dict(), empty.state_dict())
    x = torch.randn(4, 96)
    assert torch.equal(full(x), empty(x))


def test_load_state_dict_rebuilds_kernel_copy():
    layer = QuantLinear.from_float(float_linear(), "w4a16-sym-g32")
    other = QuantLinear.from_float(float_linear(seed=1), "w4a16-sym-g32")
    x = torch.randn(4, 96)
    layer(x)
    torch.nn.Sequential(layer).load_state_dict(torch.nn.Sequential(other).state_dict())
    assert torch.equal(layer(x), other(x))


def test_load_state_dict_keeps_the_files_dtypes():
    state = QuantLinear.from_float(float_linear(), "w4a16-sym-g32").state_dict()
    state["scales"] = state["scales"].float() * 1.0001
    layer = QuantLinear(96, 64, "w4a16-sym-g32", bias=True)
    layer.load_state_dict(state)
    assert_same(state, layer.state_dict())


@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qweight", "qzeros", "g_idx"])
def test_load_state_dict_refuses_integers_that_were_cast(name, other):
    """torch would convert them back, but a float cannot hold eight packed codes."""
    state = QuantLinear.from_float(float_linear(), "w4a16-sym-g32").state_dict()
    layer = QuantLinear.from_float(float_linear(seed=1), "w4a16-sym-g32")
    before = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    cast = {f"up.{key}": tensor.clone() for key, tensor in state.items()}
    cast[f"up.{name}"] = cast[f"up.{name}"].to(other)
    words = f"up.{name}: expected torch.int32, found {other} .store it without a conversion"
    with pytest.raises(RuntimeError, match=words):
        torch.nn.ModuleDict({"up": layer}).load_state_dict(cast)
    assert_same(before, layer.state_dict())


def test_casting_a_model_keeps_the_scales():
    """Rounded to bfloat16, they would no longer be the checkpoint's; nor would the bias."""
    layer = QuantLinear.from_float(float_linear(), "w4a16-sym-g32")
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    model = torch.nn.Sequential(layer).to(torch.bfloat16)
    assert_same(before, model[0].state_dict())
    assert model(torch.ones(1, 96, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_release_keeps_only_kernel_copy():
    layer = QuantLinear.from_float(float_linear(), "w4a16-sym-g32")
    state, x = layer.state_dict(), torch.randn(4, 96)
    want = layer(x)
    assert layer.prepare(torch.float32, release=True) is layer
    assert torch.equal(layer(x), want)
    for call in (layer.state_dict, layer.packed, layer.dequantize, lambda: layer(x.bfloat16())):
        with pytest.raises(KernelError, match="released"):
            call()
    torch.nn.Sequential(layer).to(torch.bfloat16)
    assert torch.equal(layer(x), want), "a cast must not touch the kernel's copy"
    layer.load_state_dict(state)
    assert torch.equal(layer(x), want)
    assert_same(state, layer.state_dict())


def test_copy_and_pickle_exclude_kernel_copy():
    layer = QuantLinear.from_float(float_linear(), "w4a16-sym-g32")
    want = layer(torch.ones(1, 96))
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    assert buffer.tell() < 64 * 96 * 4, "the dense float32 copy alone would be larger"
    buffer.seek(0)
    for copied in (copy.deepcopy(layer), torch.load(buffer, weights_only=False)):
        assert "not prepared" in repr(copied)
        assert torch.equal(copied(torch.ones(1, 96)), want)


def test_repr_names_kernel():
    layer = QuantLinear.from_float(float_linear(), "w4a16-sym-g32")
    want = "in_features=96, out_features=64, scheme=w4a16-sym-g32, bias=True, kernel="
    assert layer.extra_repr() == want + "not prepared"
    layer(torch.ones(1, 96))
    assert layer.extra_repr() == want + "dense"


def test_threads_with_inputs_of_different_dtypes():
    layer = QuantLinear.from_float(float_linear(), "w4a16-sym-g32")
    inputs = [torch.ones(1, 96, dtype=each) for each in (torch.float32, torch.bfloat16)]
    wanted = [layer(x) for x in inputs]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads interrupt each other between most steps
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(layer, inputs * 200))
    finally:
        sys.setswitchinterval(switch)
    for number, y in enumerate(found):
        assert torch.equal(y, wanted[number % 2])


def test_gradient_reaches_x_and_no_weight():
    layer, x = QuantLinear.from_float(float_linear(), "w4a16-sym-g32"), torch.ones(1, 96)
    with torch.inference_mode():
        layer(x)
    layer(x.requires_grad_()).sum().backward()
    torch.testing.assert_close(x.grad[0], layer.dequantize().sum(0))


@pytest.mark.parametrize(
    ("groups", "scheme", "expected"),
    [
        (9, "w4a16-sym", "w4a16-sym-g64"),
        (9, "w4a16-sym-g64", "w4a16-sym-g64"),
        (1, "w4a16-sym", "w4a16-sym-channel"),
        (18, "w4a16-asym", "w4a16-asym-g32"),
    ],
)
def test_group_size_follows_scales_unless_in_scheme(groups, scheme, expected):
    codes, scales = torch.randint(0, 16, (64, 576)), torch.rand(64, groups) + 0.1
    zeros = None if "-sym" in scheme else torch.arange(64 * groups).view(64, groups) % 16
    layer = QuantLinear.from_codes(codes, scales, zeros, scheme=scheme)
    assert str(layer.scheme) == expected
    assert torch.equal(layer.packed().codes(), codes.to(torch.uint8))


@pytest.mark.parametrize(
    ("shape", "scheme", "text"),
    [
        ((64, 9), "w4a16-sym-g32", r"expected floating point \[64, 18\]"),
        ((64, 10), "w4a16-sym", "do not make 10 equal groups"),
        ((64, 9), "w8a8", r"expected floating point \[64, 1\]"),
        ((64,), "w4a16-sym", "`group_size` 64 or 32, or 'auto'"),
    ],
)
def test_scales_of_wrong_shape_are_refused(shape, scheme, text):
    with pytest.raises(InputError, match=text):
        QuantLinear.from_codes(torch.randint(0, 16, (64, 576)), torch.rand(shape), scheme=scheme)


def test_incompatible_codes_are_refused():
    with pytest.raises(SchemeError, match="divisible by the group size"):
        QuantLinear(96, 64, "w4a16-sym")
    with pytest.raises(SchemeError, match="layers.0.q_proj"):
        QuantLinear.from_float(float_linear(K=100).weight, "w4a16-sym-g32", name="layers.0.q_proj")
    with pytest.raises(KernelError, match=r"bias: expected \[64\]"):
        QuantLinear.from_float(float_linear(), "w4a16-sym-g32", bias=torch.zeros(63))


@pytest.mark.parametrize(
    ("bias", "text"),
    [
        (True, r"bias: expected a tensor \[64\] or None, found bool"),  # as of nn.Linear
        ([0.0] * 64, "found list"),
        (torch.zeros(64).numpy(), "found ndarray .*from_numpy"),
        (torch.zeros(64, device="meta"), "bias: is on the meta device"),
        (torch.full((64,), torch.nan), "bias: contains NaN"),
    ],
)
def test_nonfinite_bias_is_refused(bias, text):
    with pytest.raises(KernelError, match=text):
        QuantLinear.from_float(float_linear(), "w4a16-sym-g32", bias=bias)


def test_other_objects_than_dense_tensors_are_refused():
    layer, weight = QuantLinear.from_float(float_linear(), "w4a16-sym-g32"), float_linear().weight
    with pytest.raises(KernelError, match="found ndarray .*from_numpy"):
        layer.off_grid(weight.detach().numpy())
    with pytest.raises(KernelError, match=r"expected a float weight \[N, K\], found Linear"):
        layer.off_grid(float_linear())
    with pytest.raises(KernelError, match="meta device"):
        layer.off_grid(weight.to("meta"))
    with pytest.raises(KernelError, match="sparse_coo.*to_dense"):
        QuantLinear.from_float(weight.detach().to_sparse(), "w4a16-sym-g32")
    codes, scales = torch.ones(64, 96, dtype=torch.uint8), torch.ones(64, 3)
    with pytest.raises(CheckpointError, match="weight codes: is on the meta device"):
        QuantLinear.from_codes(codes.to("meta"), scales, scheme="w4a16-sym")
    with pytest.raises(CheckpointError, match="weight scales: is on the meta"):
        QuantLinear.from_codes(codes, scales.to("meta"), scheme="w4a16-sym")
    with pytest.raises(CheckpointError, match="weight codes: has the layout torch.sparse_coo"):
        QuantLinear.from_codes(codes.to_sparse(), scales, scheme="w4a16-sym")
    with pytest.raises(CheckpointError, match="expected integer codes .*complex64"):
        QuantLinear.from_codes(codes.to(torch.complex64), scales, scheme="w4a16-sym")
    with pytest.raises(CheckpointError, match="expected integer codes .*torch.bool"):
        QuantLinear.from_codes(codes > 0, scales, scheme="w4a16-sym")
    with pytest.raises(CheckpointError, match="mxfp4 weights have no integer codes"):
        QuantLinear.from_codes(codes, scales, scheme="w4a16-mxfp4")


def test_x_that_is_not_a_tensor_is_refused():
    layer = QuantLinear.from_float(float_linear(), "w4a16-sym-g32")
    for is_prepared in (False, True):
        with pytest.raises(KernelError, match=r"linear x: expected a tensor.*ndarray .*from_numpy"):
            layer(torch.ones(1, 96).numpy())
        if not is_prepared:
            with pytest.raises(KernelError, match="linear x: expected a tensor.* found list"):
                layer([1.0])
            layer.prepare(torch.float32)


def test_codes_of_float32_scales_lie_on_their_grid():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (64, 96), generator=generator)
    scales = torch.rand(64, 3, generator=generator) + 0.1
    layer = QuantLinear.from_codes(codes, scales, scheme="w4a16-sym")
    assert layer.off_grid(layer.dequantize()) == 0


def test_off_grid_measures_distance_of_weight():
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    layer = QuantLinear.from_float(weight, "w4a16-sym")
    assert layer.off_grid(layer.dequantize()) == 0
    assert 0.4 < layer.off_grid(weight) < 4
    moved = layer.dequantize()
    step = float(layer.packed().scales_NG[3, 1])
    moved[3, 200] += step / 4 * (1 if moved[3, 200] * step < 0 else -1)
    assert layer.off_grid(moved) == pytest.approx(0.25, abs=1e-3)


def test_off_grid_with_act_order():
    """A weight in the model's order is compared with codes in the file's (act-order)."""
    layer = QuantLinear.from_float(torch.nn.Linear(64, 32), "w4a16-sym-g32")
    state = layer.state_dict()
    state["g_idx"] = state["g_idx"].flip(0)
    layer.load_state_dict(state)
    assert layer.packed().input_order is not None
    weight = layer.dequantize()
    assert layer.off_grid(weight) == 0 and layer.off_grid(weight.flip(1)) > 0.1


@pytest.mark.parametrize("scheme", ["w4a16-sym", "w8a8"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_result_is_written_into_out(scheme, has_bias):
    layer = QuantLinear.from_float(float_linear(64, 256, has_bias), scheme)
    layer.prepare(torch.float32)
    x, plan = torch.randn(5, 256), layer.plan(5)
    x = ops.in_form(x, plan.input)
    rows = torch.full((7, 64), float("nan"))
    found = layer(x, plan, out=rows[1:6])
    assert found.data_ptr() == rows[1].data_ptr()
    assert torch.equal(rows[1:6], layer(x, plan)) and rows[[0, 6]].isnan().all()
    with pytest.raises(KernelError, match="linear out"):
        layer(x, plan, out=rows)
    with pytest.raises(KernelError, match="linear out: expected a contiguous tensor"):
        layer(x, plan, out=torch.empty(64, 5).T)
