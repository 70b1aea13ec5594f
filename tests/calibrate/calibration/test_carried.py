"""Layers that read more than hidden states, against transformers' whole model."""

import pytest
import torch
import transformers

from calibrate.calibration.capture import HiddenStates
from calibrate.calibration.layer_runner import LayerRunner
from calibrate.float_model import FloatModel
from calibrate.loss_gradient import layer_gradients
from tests.calibrate.statistics_of import collect_statistics

# with shared keys and inputs of layers; the second with several streams of hidden states, too
FAMILIES = ("gemma4_shared", "gemma3n")
IDS = torch.randint(3, 500, (3, 20), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def model(tiny_model, family):
    return FloatModel(tiny_model(family))


@pytest.fixture
def theirs(tiny_model, family):
    folder = tiny_model(family)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_linear_inputs_equal_transformers(model, theirs):
    """Checked for a part of the windows, as if the others were held out."""
    runner = LayerRunner(model, model.layer_map, "cpu")
    hidden = HiddenStates(IDS, model.get(model.layer_map.embedding), runner)
    seen = {}
    for name, module in theirs.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, args, name=name: seen.__setitem__(
                    name, args[0].reshape(-1, 20, args[0].shape[-1])
                )
            )
    with torch.no_grad():
        logits_WSV = theirs(IDS).logits
    hidden.batch = 2  # a batch of two windows, and one of one
    for layer in range(model.num_layers):
        module = runner.build(layer, model.layer(layer, "cpu"))
        for local, found in collect_statistics(runner, module, layer, hidden).items():
            x = seen[f"model.layers.{layer}.{local}"].flatten(0, 1)
            torch.testing.assert_close(found.moment_KK, x.t() @ x, rtol=1e-3, atol=1e-3)
        hidden.advance(runner, module, layer)
    norm_D, head_VD = (
        model.get(name) for name in (model.layer_map.last_norm, model.layer_map.embedding)
    )
    for states_SX, want_SV in zip(hidden.states_WSD, logits_WSV, strict=True):
        found_SV = runner.final_logits(states_SX, norm_D, head_VD)
        torch.testing.assert_close(found_SV, want_SV, rtol=1e-3, atol=1e-3)


def test_gradients_pass_through_shared_keys(model, theirs):
    """The loss's gradient by what an early layer returns is that of transformers' autograd.

    Later layers read that layer's keys; the labels are those that layer_gradients draws.
    """
    labels = []

    def drawn(chance_SV, count, generator):
        labels.append(chance_SV.argmax(-1))
        return labels[-1][:, None]

    right, torch.multinomial = torch.multinomial, drawn
    try:
        found = list(layer_gradients(model, LayerRunner(model, model.layer_map, "cpu"), IDS))
    finally:
        torch.multinomial = right
    outputs = {}
    for number, layer in enumerate(theirs.model.layers):
        layer.register_forward_hook(lambda *given, n=number: keep(outputs, n, given[2]))
    logits = theirs(IDS).logits
    torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.cat(labels), reduction="sum"
    ).backward()
    width = theirs.config.hidden_size
    for each in found:
        want = outputs[each.layer].grad
        want = want[0] if want.ndim == 4 else want  # of the first stream
        torch.testing.assert_close(
            each.gradient_WSD[..., :width], want, rtol=1e-3, atol=1e-4 * float(want.abs().max())
        )


def keep(outputs, number, output):
    output.retain_grad()
    outputs[number] = output
