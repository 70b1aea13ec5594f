"""TrainableQuantLinear: the bits of the served layer forward, straight-through gradients back."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from formats.errors import CheckpointError, InputError, SchemeError
from formats.numerics.activation import quantize_input
from formats.scheme import Scheme
from formats.weight_digest import rounded, weight_digest
from qkernels import QuantLinear, TrainableQuantLinear, replace_linears, trainable_linear
from qkernels.errors import KernelError

N, K = 64, 128
OF_GPTQ = ["w4a16-sym-g32", "w4a16-asym", "w8a16-sym-channel", "w8a8"]
OTHERS = [
    "w3a16-sym",
    "w4a8",
    "w4a8-fp8",
    "w8a8-fp8",
    "w8a8-fp8-block",
    "w8a16-fp8",
    "w4a16-mxfp4",
    "w4a16-nvfp4",
]
WITHOUT_ORDER_ON_GPU = ["w3a16-sym", "w8a16-fp8"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def float_linear(dtype=torch.float32, bias=True, seed=0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(K, N, bias=bias, dtype=dtype)


def served(linear: nn.Linear, scheme: str, dtype: torch.dtype, kernel=None) -> nn.Module:
    """The layer that serves this weight."""
    if kernel is None and scheme in OF_GPTQ:
        return QuantLinear.from_float(linear, scheme)
    weight = rounded(linear.weight.detach(), Scheme.parse(scheme), "weight")
    bias = None if linear.bias is None else linear.bias.detach()
    return QuantLinear.for_inference(weight, bias, dtype, linear.weight.device, kernel)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", OF_GPTQ + OTHERS)
@pytest.mark.parametrize("number", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [None, "fixed_order"])
def test_output_equals_served_layer_bitwise(scheme, number, kernel, device):
    if device == "cuda" and number == torch.float32 and kernel is not None:
        pytest.skip("products in float32 have no fixed order on a GPU")
    linear = float_linear(number).to(device)
    layer = TrainableQuantLinear.from_float(linear, scheme, kernel=kernel)
    x = torch.randn(2, 3, K, dtype=number, device=device)
    if device == "cuda" and kernel is not None and scheme in WITHOUT_ORDER_ON_GPU:
        with pytest.raises(KernelError, match="fixed_order"):
            layer(x)
        return
    with torch.no_grad():
        expected = served(linear, scheme, number, kernel)(x)
    found = layer(x)
    assert found.requires_grad and found.dtype == number and torch.equal(found, expected)
    assert not torch.equal(found, linear(x)), "the weight is rounded"


def fake_quantized(x, weight_NK, bias_N, scheme):
    """The formula in float64, whose rounding autograd takes for the identity."""
    stated = rounded(weight_NK.detach().float(), Scheme.parse(scheme), "weight")
    seen_NK = weight_NK + (stated.dequantize(torch.float64) - weight_NK).detach()
    if stated.activation is not None:
        codes, scales = quantize_input(x.detach().float().flatten(0, -2), stated.activation, None)
        numbers = codes.double().unflatten(1, (scales.shape[1], -1)) * scales.double()[..., None]
        x = x + (numbers.flatten(1)[:, :K].view_as(x) - x).detach()
    return x @ seen_NK.t() + bias_N


@pytest.mark.parametrize("scheme", OF_GPTQ + OTHERS)
def test_gradients_equal_fake_quantization(scheme, assert_close):
    linear, upstream = float_linear(), torch.randn(2, 3, N)
    layer = TrainableQuantLinear.from_float(linear, scheme)
    x = torch.randn(2, 3, K, requires_grad=True)
    layer(x).backward(upstream)
    exact = [each.detach().double().requires_grad_() for each in (x, layer.weight, layer.bias)]
    fake_quantized(*exact, scheme).backward(upstream.double())
    for name, mine, other in zip("xwb", (x, layer.weight, layer.bias), exact, strict=True):
        assert mine.grad.dtype == torch.float32
        assert_close(name, other.grad, mine.grad, 1e-5)


def test_only_requested_gradients_are_computed():
    layer = TrainableQuantLinear(K, N, "w4a16-sym", bias=False)
    layer.weight.requires_grad_(False)
    x = torch.randn(4, K, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None
    layer.weight.requires_grad_(True)
    layer(x.detach()).sum().backward()
    assert layer.weight.grad.shape == (N, K)


def test_optimizer_step_changes_the_codes():
    layer = TrainableQuantLinear(K, N, "w4a16-sym")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05)
    x, wanted = torch.randn(64, K), torch.randn(64, N)
    losses, digests = [], set()
    for _ in range(12):
        optimizer.zero_grad()
        loss = (layer(x) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        digests.add(weight_digest(layer.rounded_weight()))
    assert len(digests) == 12 and losses[-1] < 0.7 * losses[0]
    with torch.no_grad():
        assert torch.equal(layer(x), QuantLinear.from_float(layer, "w4a16-sym")(x))


def test_weight_is_rounded_once_per_change(monkeypatch):
    counts = []
    own = trainable_linear.rounded
    monkeypatch.setattr(trainable_linear, "rounded", lambda *given: counts.append(1) or own(*given))
    layer, x = TrainableQuantLinear(K, N, "w4a16-sym"), torch.randn(3, K)
    first = layer(x)
    layer(x.bfloat16())
    with torch.inference_mode():
        layer(x)
    assert len(counts) == 1
    layer.weight.data.mul_(1.5)  # no version counter sees this
    assert not torch.equal(layer(x), first) and len(counts) == 2
    version = layer.weight._version
    with torch.no_grad():
        layer.weight.copy_(layer.weight.flip(0))  # the same bits in other places
    assert layer.weight._version > version
    layer(x)
    assert len(counts) == 3
    layer.weight = nn.Parameter(torch.randn(N, K))
    layer(x).sum().backward()
    assert len(counts) == 4 and layer.weight.grad is not None


def test_layer_that_ran_in_inference_mode_trains():
    layer, x = TrainableQuantLinear(K, N, "w8a8"), torch.randn(3, K)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert layer.weight.grad is not None


def test_state_dict_equals_float_linear():
    linear = float_linear()
    layer = TrainableQuantLinear(K, N, "w4a16-sym")
    layer(torch.ones(1, K))
    layer.load_state_dict(linear.state_dict())
    x = torch.randn(3, K)
    assert torch.equal(layer(x), TrainableQuantLinear.from_float(linear, "w4a16-sym")(x))
    assert list(layer.state_dict()) == ["weight", "bias"]
    again = nn.Linear(K, N)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again.weight, linear.weight)


@pytest.mark.parametrize("scheme", ["w4a16-sym", "w8a8", "w8a8-fp8-block"])
def test_autocast_dtype_selects_layer(scheme):
    linear, x = float_linear(), torch.randn(5, K)
    layer = TrainableQuantLinear.from_float(linear, scheme)
    with torch.no_grad():
        expected = served(linear, scheme, torch.bfloat16)(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
        found.float().sum().backward()
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)
    assert layer.weight.grad.dtype == torch.float32
    own = layer.weight.grad.clone()
    layer.zero_grad()
    layer(x.bfloat16()).float().sum().backward()
    assert torch.equal(layer.weight.grad, own)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(reentrant):
    layer = TrainableQuantLinear(K, K, "w8a8")
    x = torch.randn(5, K, requires_grad=True)

    def gradients(run):
        layer.zero_grad()
        x.grad = None
        run().square().sum().backward()
        return [each.grad.clone() for each in (x, *layer.parameters())]

    twice = nn.Sequential(layer, layer)
    plain = gradients(lambda: twice(x))
    saved = gradients(lambda: checkpoint(twice, x, use_reentrant=reentrant))
    assert all(map(torch.equal, plain, saved))


def test_optimizer_step_before_backward_keeps_forward_gradient():
    layer, x = TrainableQuantLinear(K, N, "w4a16-sym"), torch.randn(3, K, requires_grad=True)
    y = layer(x)
    seen = layer.rounded_weight().dequantize()
    layer.weight.data.zero_()
    y.sum().backward()
    torch.testing.assert_close(x.grad[0], seen.sum(0))


def test_copy_and_pickle_exclude_codes():
    layer = TrainableQuantLinear(K, N, "w4a16-sym")
    x = torch.ones(1, K)
    expected = layer(x)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    assert buffer.tell() < 1.2 * N * K * 4
    buffer.seek(0)
    for copied in (copy.deepcopy(layer), torch.load(buffer, weights_only=False)):
        assert copied._rounded is None and torch.equal(copied(x), expected)
        assert copied.weight is not layer.weight


def test_dtype_and_device_of_a_new_layer():
    layer = TrainableQuantLinear(K, N, "w4a16-sym", bias=False, dtype=torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16 and layer.bias is None
    assert layer.to(torch.float32)(torch.ones(1, K)).dtype == torch.float32
    assert "scheme=w4a16-sym" in repr(layer)


def test_untrainable_layers_are_refused():
    with pytest.raises(SchemeError, match="come from calibration.*train with w8a8,"):
        TrainableQuantLinear(K, N, "w8a8-static")
    with pytest.raises(SchemeError, match="its 100 inputs are not divisible"):
        TrainableQuantLinear(100, N, "w4a16-sym")
    with pytest.raises(InputError, match="conv: expected a torch.nn.Linear, found Conv1d"):
        TrainableQuantLinear.from_float(nn.Conv1d(4, 4, 1), "w4a16-sym", name="conv")
    layer = TrainableQuantLinear.from_float(float_linear(), "w4a16-sym", name="layers.3.up")
    layer.weight.data[3, 5] = torch.nan
    with pytest.raises(CheckpointError, match="layers.3.up: contains NaN"):
        layer(torch.ones(1, K))


@pytest.fixture(scope="module")
def original(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model("qwen2"), dtype=torch.float32).eval()


@pytest.mark.parametrize("scheme", ["w4a16-sym-g32", "w8a8"])
def test_replaced_model_logits_equal_served_layers(original, scheme):
    tokens = torch.tensor([[5, 6, 7, 300, 12, 99, 3]])
    model, other = copy.deepcopy(original), copy.deepcopy(original)
    before = dict(model.named_parameters())
    names = replace_linears(model, scheme, trainable=True)
    assert names == replace_linears(other, scheme) and "lm_head" not in names
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[each] is before[each] for each in after)
    logits = model(tokens).logits
    with torch.no_grad():
        assert torch.equal(logits, other(tokens).logits)
    logits.logsumexp(-1).sum().backward()
    assert all(each.grad.abs().sum() > 0 for name, each in after.items() if "proj.weight" in name)


def test_replace_keeps_tied_head_and_accepts_float8(original):
    model = copy.deepcopy(original)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    names = replace_linears(model, "w8a8-fp8", trainable=True, kernel="fixed_order", ignore=[])
    assert "lm_head" in names and isinstance(model.lm_head, TrainableQuantLinear)
    assert model.lm_head.kernel == "fixed_order"
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.config.tie_word_embeddings
    with pytest.raises(InputError, match="does not fit .* linears"):
        replace_linears(copy.deepcopy(original), "w4a16-sym-g48", trainable=True)
    with pytest.raises(InputError, match="kernel: is for trainable layers"):
        replace_linears(copy.deepcopy(original), "w4a16-sym-g32", kernel="dense")
