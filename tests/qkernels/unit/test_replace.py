"""replace_linears on transformers models: the logits are those of the dequantized weights."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from formats.errors import InputError
from qkernels import QuantLinear, replace_linears

TOKENS = torch.tensor([[5, 6, 7, 300, 12, 99, 3]])
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(scope="module")
def original(tiny_model):
    """folder of a family -> a float model, loaded anew."""
    return lambda family: AutoModelForCausalLM.from_pretrained(
        tiny_model(family), dtype=torch.float32
    ).eval()


def dequantized(model, replaced):
    """A float copy of a model whose weights are those of the replaced layers."""
    float_model = copy.deepcopy(model)
    for name in replaced:
        layer = model.get_submodule(name)
        linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        linear.weight.data = layer.dequantize()
        if layer.bias is not None:
            linear.bias.data = layer.bias.float()
        parent, _, local = name.rpartition(".")
        setattr(float_model.get_submodule(parent), local, linear)
    return float_model.float()


def logits(model):
    with torch.no_grad():
        return model(TOKENS.to(model.device)).logits.float().cpu()


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("scheme", ["w4a16-sym-g32", "w8a16-asym-g32"])
def test_logits_equal_dequantized_weights(original, family, scheme, device):
    model = original(family).to(device)
    before = logits(model)
    linears = [n for n, each in model.named_modules() if type(each) is nn.Linear]
    replaced = replace_linears(model, scheme)
    assert sorted(replaced) == sorted(set(linears) - {"lm_head"}) and len(replaced) > 7
    assert type(model.lm_head) is nn.Linear
    assert all(model.get_submodule(name).qweight.device.type == device for name in replaced)
    reference = dequantized(model.cpu(), replaced)
    found = logits(model.to(device))
    torch.testing.assert_close(found, logits(reference), atol=1e-4, rtol=1e-4)
    assert (found - before).abs().max() > 1e-3  # they are rounded


def test_tied_head_is_quantized_and_embedding_kept(original):
    model = original("llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    embedding = model.get_input_embeddings().weight
    assert model.lm_head.weight is embedding
    values = embedding.detach().clone()
    replaced = replace_linears(model, "w8a16-sym-g32", ignore=[])
    assert "lm_head" in replaced and isinstance(model.lm_head, QuantLinear)
    assert torch.equal(model.get_input_embeddings().weight, values)
    model.tie_weights()
    assert isinstance(model.lm_head, QuantLinear) and not model.config.tie_word_embeddings
    reference = dequantized(model, replaced)
    torch.testing.assert_close(logits(model), logits(reference), atol=1e-4, rtol=1e-4)


def test_ignored_layers_stay_in_float(original):
    model = original("llama")
    replaced = replace_linears(
        model, "w4a16-sym-g32", ignore=["lm_head", "*.0.mlp.down_proj", r"re:.*self_attn\.[qk]_"]
    )
    left = [n for n, each in model.named_modules() if type(each) is nn.Linear]
    assert not set(left) & set(replaced)
    assert {n.rpartition(".")[2] for n in left} == {"lm_head", "down_proj", "q_proj", "k_proj"}
    assert sum(n.endswith("down_proj") for n in left) == 1


def test_shared_layer_is_replaced_once():
    first = nn.Linear(64, 64)
    model = nn.ModuleDict({"a": first, "b": first, "c": nn.Linear(64, 64)})
    assert replace_linears(model, "w4a16-sym-g32") == ["a", "b", "c"]
    assert model["a"] is model["b"] is not model["c"]


@pytest.mark.parametrize(
    ("change", "scheme", "ignore", "problem"),
    [
        (None, "w4a16-sym", ["lm_head"], r"does not fit 2 of 3 linears \(odd, small\).*ignore"),
        (None, "w8a8-fp8", [], "QuantLinear cannot hold w8a8-fp8: .*those of gptq"),
        (None, "w4a16-sym", ["lm_head"], r"name them in `ignore`\)$"),  # no groups fit 24 inputs
        (None, "w4a16-sym", ["lm_head", "odd"], r"`ignore`, or give the scheme w4a16-sym-g64\)$"),
        (None, "w5a16", [], "unknown"),
        (None, "nvfp4", [], r"unknown \(did you mean w4a16-nvfp4\? known schemes: "),
        (None, "w4a16-sym-g32", ["lm_hed"], "ignore|lm_hed.*fits no linear"),
        (None, "w4a16-sym-g32", "lm_head", "expected a list of names"),
        (None, "w4a16-sym-g32", ["*"], "fits all of them"),
        ("nan", "w4a16-sym-g32", ["odd"], "fits: its weight has numbers that are not finite"),
        ("meta", "w4a16-sym-g32", ["odd"], "meta device"),
    ],
)
def test_incompatible_layer_is_refused_and_model_unchanged(change, scheme, ignore, problem):
    model = nn.ModuleDict(
        {"lm_head": nn.Linear(128, 32), "odd": nn.Linear(24, 32), "small": nn.Linear(64, 32)}
    )
    model["fits"] = nn.Linear(128, 32, device="meta" if change == "meta" else None)
    if change == "nan":
        model["fits"].weight.data[3, 5] = float("nan")
    before = list(model.values())
    with pytest.raises(InputError, match=problem):
        replace_linears(model, scheme, ignore=ignore)
    assert all(one is other for one, other in zip(model.values(), before, strict=True))


def test_model_without_linears_is_refused():
    with pytest.raises(InputError, match="has no torch Linear"):
        replace_linears(nn.ReLU(), "w4a16-sym")


def test_already_replaced_model_is_refused():
    model = nn.ModuleDict({"lm_head": nn.Linear(128, 32), "up": nn.Linear(128, 32)})
    for trainable in (True, False):
        twice = copy.deepcopy(model)
        replace_linears(twice, "w4a16-sym", trainable=trainable)
        with pytest.raises(InputError, match=": 1 of its layers are quantized already"):
            replace_linears(twice, "w4a16-sym")


@pytest.mark.parametrize("ignore", [None, [3], 3])
def test_ignore_must_be_names(ignore):
    with pytest.raises(InputError, match="ignore: expected a list of names, found"):
        replace_linears(nn.Sequential(nn.Linear(128, 32)), "w4a16-sym", ignore=ignore)


def test_folder_instead_of_model_is_refused():
    with pytest.raises(InputError, match="model: expected a torch module, found str"):
        replace_linears("model-folder", "w4a16-sym")
