"""Inputs of experts: the float model's router may choose other tokens."""

import pytest
import torch

from calibrate.calibration.capture import HiddenStates, add_statistics, empty_statistics
from calibrate.calibration.layer_runner import LayerRunner
from calibrate.float_model import FloatModel


@pytest.mark.parametrize("all_experts", [False, True])
def test_expert_inputs_are_paired_only_with_equal_routing(tiny_model, all_experts):
    """Otherwise row i of an expert's input may be another token in the float model."""
    model = FloatModel(tiny_model("mixtral"))
    runner = LayerRunner(model, model.layer_map, "cpu")
    ids = torch.randint(0, 512, (2, 8), generator=torch.Generator().manual_seed(0))
    embedding = model.get(model.layer_map.embedding)
    hidden, reference = (HiddenStates(ids, embedding, runner) for _ in range(2))
    hidden.states_WSD += 1e-4 * hidden.states_WSD.abs().mean()
    state = model.layer(0, "cpu")
    statistics = empty_statistics(runner, 0, state, all_experts)
    module = runner.build(0, state, all_experts=all_experts)
    add_statistics(statistics, runner, module, 0, hidden, reference, held_every=2)
    experts = {name for name in statistics if model.layer_map.expert_kind(name) is not None}
    assert experts and experts != set(statistics)
    seen = [name for name in experts if statistics[name].num_tokens]
    assert {statistics[name].drift_KK is not None for name in seen} == {all_experts}
    for name in set(statistics) - experts:
        assert statistics[name].drift_KK is not None
    for name in seen:
        held = [each for each in statistics[name]._held if len(each.inputs_TK)]
        assert all((each.targets_TK is not None) == all_experts for each in held)
