"""Layers that calibration builds from a family's row compute what the plain references do."""

import pytest
import torch

from calibrate.calibration.layer_runner import LayerRunner
from calibrate.float_model import FloatModel
from formats.errors import InputError
from tests.own_code.models import TINY_MODELS, VARIANTS
from tests.own_code.references import Reference
from tests.qserve.model.variants import TOKENS, relative


def logits_by_layers(folder, change=lambda module: None):
    """Logits [S, V] of TOKENS, one layer after the other. `change` is called with each layer."""
    model = FloatModel(folder)
    runner, ids_S = LayerRunner(model, model.layer_map, "cpu"), torch.tensor(TOKENS)
    hidden_SD = runner.first_states(ids_S, model.get(model.layer_map.embedding)[ids_S])
    for number in range(model.num_layers):
        module = runner.build(number, model.layer(number, "cpu"))
        change(module)
        (hidden_SD,) = runner.run(module, number, hidden_SD[None])
    return runner.final_logits(hidden_SD, model.get(model.layer_map.last_norm), model.head())


TWO_ROTATIONS = "ling 2.6 without query latents"


@pytest.mark.parametrize(
    "name", [name for name in (*TINY_MODELS, *VARIANTS) if name != TWO_ROTATIONS]
)
def test_layer_outputs_equal_references(own_code, name):
    folder = own_code(name)
    assert relative(logits_by_layers(folder), Reference(folder).logits(TOKENS)) < 1e-5


def test_two_rotations_are_refused(own_code):
    with pytest.raises(InputError, match="rotates 24 channels of a head, latent attention 12"):
        logits_by_layers(own_code(TWO_ROTATIONS))


def test_routed_experts_see_every_token_on_request(own_code):
    """Their outputs for other tokens are dropped."""
    model = FloatModel(own_code("ling_2"))
    runner = LayerRunner(model, model.layer_map, "cpu")
    # with other tokens, expert 3 may be chosen by none
    x_1SD = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(0))
    state, seen = model.layer(1, "cpu"), []
    found = []
    for every in (False, True):
        module = runner.build(1, state, all_experts=every)
        expert = module.get_submodule("mlp.experts.3.gate_proj")
        expert.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
        found.append(runner.run(module, 1, x_1SD))
    assert seen[0] < seen[1] == 12
    assert torch.allclose(*found, atol=1e-5)
