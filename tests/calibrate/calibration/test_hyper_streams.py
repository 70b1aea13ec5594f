"""Layers with hyper-connections (DeepSeek-V4), one at a time, against transformers' whole model."""

import pytest
import torch
import transformers

from calibrate.calibration.capture import HiddenStates
from calibrate.calibration.layer_runner import LayerRunner
from calibrate.calibration.token_channels import as_channels, from_channels
from calibrate.float_model import FloatModel
from formats.architecture.stored_form.deepseek_v4 import published
from tests.calibrate.statistics_of import collect_statistics

LENGTH = 30  # longer than the sliding window, with entries of both kinds
IDS = torch.randint(3, 500, (3, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_ids_survive_as_channels(dtype):
    ids = torch.tensor([0, 1, 63, 64, 4095, 129_279, 2**24 - 1])
    assert from_channels(as_channels(ids).to(dtype)).equal(ids)


def test_inputs_of_every_linear_are_transformers(tiny_model):
    """The experts of a table see the tokens that transformers sends to them."""
    folder = tiny_model("deepseek_v4")
    model = FloatModel(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    runner = LayerRunner(model, model.layer_map, "cpu")
    hidden = HiddenStates(IDS, model.get(model.layer_map.embedding), runner)
    seen = {}
    for name, module in theirs.named_modules():
        if isinstance(module, torch.nn.Linear):
            stored = published(f"{name}.weight").removesuffix(".weight")
            module.register_forward_pre_hook(
                lambda _, args, name=stored: seen.__setitem__(name, args[0].flatten(0, -2))
            )
    with torch.no_grad():
        logits_WSV = theirs(IDS).logits
    hidden.batch, compared = 2, set()
    for layer in range(model.num_layers):
        module = runner.build(layer, model.layer(layer, "cpu"))
        for local, found in collect_statistics(runner, module, layer, hidden).items():
            name = f"layers.{layer}.{local}"
            if name in seen:  # transformers has no module for an expert's linear
                compared.add(local)
                x = seen[name]
                torch.testing.assert_close(found.moment_KK, x.t() @ x, rtol=1e-3, atol=1e-3)
        hidden.advance(runner, module, layer)
    shared = {f"ffn.shared_experts.{name}" for name in ("w1", "w2", "w3")}
    assert compared == {"attn.wq_a", "attn.wkv", "attn.wq_b", "attn.wo_b", *shared}
    norm_D, head_VD = (model.get(n) for n in (model.layer_map.last_norm, model.layer_map.head))
    for states_SX, want_SV in zip(hidden.states_WSD, logits_WSV, strict=True):
        found_SV = runner.final_logits(states_SX, norm_D, head_VD)
        torch.testing.assert_close(found_SV, want_SV, rtol=1e-3, atol=1e-3)
