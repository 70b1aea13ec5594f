"""Models with Mamba-2: a wrong reading of their tensors or states is seen."""

from dataclasses import replace

import pytest
import torch

from calibrate.layer_map import find_layer_map
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError
from qkernels import ops
from qkernels.mamba2 import reference
from qserve.llm import LLM
from qserve.model.blocks.states.mamba2 import Mamba2
from tests.conftest import make_tiny
from tests.qserve.model.test_family_tokens import check_greedy
from tests.qserve.model.test_hybrid_tokens import MODES, greedy, in_transformers, prompts
from tests.qserve.model.variants import TOKENS, edited, logits, relative
from tests.tiny_families import MAMBA


def mixers(change):
    """`change` of each Mamba-2 block of a decoder."""

    def plant(decoder, monkeypatch):
        for module in decoder.modules():
            if isinstance(module, Mamba2):
                change(module)

    return plant


def rows_reordered(order):
    """The parts z, x, B, C and steps of the first projection in another order."""

    def change(block):
        shape = block.shape
        of_groups = shape.groups * shape.state
        sizes = [shape.inner, shape.inner, of_groups, of_groups, shape.heads]
        parts = block.in_proj.weight.split(sizes)
        block.in_proj.weight = torch.cat([parts[part] for part in order])

    return mixers(change)


def tensor(name, function):
    return mixers(lambda block: setattr(block, name, function(getattr(block, name))))


def groups_in_turn(decoder, monkeypatch):
    """Head h reads group h mod G, not h div (H / G)."""
    right = reference.split_mixed

    def wrong(*args):
        x, b, c, dt, g = right(*args)
        order = torch.arange(b.shape[1]).view(2, -1).T.flatten()
        return x, b[:, order], c[:, order], dt, g

    monkeypatch.setattr(reference, "split_mixed", wrong)


def norm_over_all(decoder, monkeypatch):
    right = ops.gated_group_norm
    monkeypatch.setattr(
        ops, "gated_group_norm", lambda x, z, weight, groups, *rest: right(x, z, weight, 1, *rest)
    )


WRONG = {
    "z used as x": rows_reordered([1, 0, 2, 3, 4]),
    "B and C swapped": rows_reordered([0, 1, 3, 2, 4]),
    "groups interleaved": groups_in_turn,
    "convolution taps reversed": tensor("conv_weight", lambda weight: weight.flip(1)),
    "convolution without bias": tensor("conv_bias", torch.zeros_like),
    "wrong exponential of A_log": tensor("a_log", torch.exp),
    "steps without their bias": tensor("dt_bias", torch.zeros_like),
    "no skip": tensor("skip", torch.zeros_like),
    "norm before the gate": mixers(lambda block: setattr(block, "norm_first", True)),
    "steps within limits": mixers(
        lambda block: setattr(block, "shape", replace(block.shape, step_limits=(0.5, 1.0)))
    ),
    "norm of other groups": norm_over_all,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_interpretation_fails_comparison(tiny_model, monkeypatch, wrong):
    llm = LLM(tiny_model("granite_hybrid"), device="cpu", max_model_len=64)
    right = llm.logits(TOKENS)
    with torch.inference_mode():
        WRONG[wrong](llm.engine.runner.decoder, monkeypatch)
    assert relative(llm.logits(TOKENS), right) > 1e-3


@pytest.mark.parametrize(
    "change",
    [torch.zeros_like, lambda states: states.roll(1, 0)],
    ids=["forgotten", "of another slot"],
)
@pytest.mark.parametrize("operation", ["selective_scan_", "causal_conv_"])
def test_wrong_state_fails_comparison(tiny_model, monkeypatch, operation, change):
    llm = LLM(tiny_model("granite_hybrid"), device="cpu", max_model_len=64, **MODES["chunked"])
    right = [output.outputs[0].token_ids for output in greedy(llm, prompts()[1:4], 4)]
    run, place = getattr(ops, operation), {"selective_scan_": 5, "causal_conv_": 3}[operation]

    def wrong(*args):
        args[place].copy_(change(args[place]))
        return run(*args)

    monkeypatch.setattr(ops, operation, wrong)
    assert right != [output.outputs[0].token_ids for output in greedy(llm, prompts()[1:4], 4)]


def test_published_config_keys_are_equivalent(tiny_model, tmp_path):
    """Granite 4's files call the layers mamba and attention, and state no range of steps."""

    def published(config):
        config["layer_types"] = ["mamba", "attention", "mamba"]
        config["position_embedding_type"] = "nope"
        del config["time_step_limit"], config["mamba_d_head"]

    folder = edited(tiny_model("granite_hybrid"), tmp_path / "published", config=published)
    assert torch.equal(logits(folder), logits(tiny_model("granite_hybrid")))


def test_model_of_attention_alone_has_no_states(tmp_path):
    """Granite 4 Micro: the hybrid's architecture without Mamba-2, with rotations."""
    kinds = {"layer_types": ["attention"] * 3, "position_embedding_type": "rope"}
    sizes = {"shared_intermediate_size": 64, "num_local_experts": 0}
    folder = make_tiny(tmp_path / "m", "GraniteMoeHybridConfig", MAMBA | kinds | sizes)
    llm = LLM(folder, device="cpu", max_model_len=64, max_num_batched_tokens=7)
    assert llm.engine.scheduler.states.num_slots is None
    check_greedy(in_transformers(folder), prompts(), greedy(llm, prompts()))


def test_published_block_pattern_is_equivalent(tiny_model, tmp_path):
    """Nemotron-H's files state the kinds of layers as a string."""

    def published(config):
        for key in ("layers_block_type", "num_logits_to_keep"):
            del config[key]
        config.update(hybrid_override_pattern="M*-M", num_hidden_layers=4)

    folder = edited(tiny_model("nemotron_h"), tmp_path / "published", config=published)
    assert torch.equal(logits(folder), logits(tiny_model("nemotron_h")))


def test_unknown_kind_of_layer_is_refused(tiny_model, tmp_path):
    def with_unknown(config):
        del config["layers_block_type"]
        config.update(hybrid_override_pattern="M*XM")

    folder = edited(tiny_model("nemotron_h"), tmp_path / "x", config=with_unknown)
    with pytest.raises(CheckpointError, match="layer_types.2.: expected .*mlp, moe, found 'X'"):
        find_layer_map(CheckpointReader(folder).config)
