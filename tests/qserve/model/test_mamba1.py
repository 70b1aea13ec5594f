"""Models with Mamba-1: a wrong reading of their tensors or states is seen; sizes as published."""

import pytest
import torch

from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.quant_config import BLOCK, QuantConfig
from qkernels import ops
from qserve.llm import LLM
from qserve.model.blocks.states.mamba1 import Mamba1
from tests.conftest import make_tiny
from tests.qserve.model.test_family_tokens import check_greedy
from tests.qserve.model.test_hybrid_tokens import MODES, greedy, in_transformers, prompts
from tests.qserve.model.variants import TOKENS, edited, logits, relative
from tests.tiny_families import TINY_FAMILIES


def mixers(change):
    """`change` of each Mamba-1 block of a decoder."""

    def plant(decoder, monkeypatch):
        for module in decoder.modules():
            if isinstance(module, Mamba1):
                change(module)

    return plant


def tensor(name, function):
    return mixers(lambda block: setattr(block, name, function(getattr(block, name))))


def swap_halves(block):
    """z before x."""
    block.in_proj.weight = torch.cat(block.in_proj.weight.chunk(2)[::-1])


def controls_in(order):
    """The parts dt, B and C of x_proj in another order."""

    def change(block):
        shape = block.shape
        parts = block.x_proj.weight.split([shape.rank, shape.state, shape.state])
        block.x_proj.weight = torch.cat([parts[part] for part in order])

    return mixers(change)


def scanned(change):
    """Other arguments of the scan."""

    def plant(decoder, monkeypatch):
        run = ops.channel_scan_
        monkeypatch.setattr(ops, "channel_scan_", lambda *args: run(*change(*args)))

    return plant


def norms_of_wrong_eps(block):
    block.eps = 1.0


WRONG = {
    "z used as x": mixers(swap_halves),
    "B and C swapped": controls_in([0, 2, 1]),
    "dt last": controls_in([1, 2, 0]),
    "convolution taps reversed": tensor("conv_weight", lambda weight: weight.flip(1)),
    "convolution without bias": tensor("conv_bias", torch.zeros_like),
    "one decay per channel": tensor("rates", lambda x: x.mean(0, keepdim=True).expand_as(x) + 0.0),
    "decays of other states": tensor("rates", lambda x: x.flip(0)),
    "no skip": tensor("skip", torch.zeros_like),
    "steps without their bias": mixers(lambda block: block.dt_proj.bias.zero_()),
    "no gate": lambda decoder, monkeypatch: monkeypatch.setattr(
        ops, "gated_group_norm", lambda x, *rest: x
    ),
    "steps without softplus": scanned(lambda x, dt, *rest: (x, dt.abs(), *rest)),
    "norms of another epsilon": mixers(norms_of_wrong_eps),
    "dt without a norm": tensor("dt_norm", lambda weight: None),
    "B without a norm": tensor("b_norm", lambda weight: None),
    "C without a norm": tensor("c_norm", lambda weight: None),
}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [*(("jamba", wrong) for wrong in WRONG), ("falcon_mamba", "norms of another epsilon")],
)
def test_wrong_interpretation_fails_comparison(tiny_model, monkeypatch, name, wrong):
    llm = LLM(tiny_model(name), device="cpu", max_model_len=64)
    right = llm.logits(TOKENS)
    with torch.inference_mode():
        WRONG[wrong](llm.engine.runner.decoder, monkeypatch)
    assert relative(llm.logits(TOKENS), right) > 1e-3


@pytest.mark.parametrize(
    "change",
    [torch.zeros_like, lambda states: states.roll(1, 0)],
    ids=["forgotten", "of another slot"],
)
@pytest.mark.parametrize("operation", ["channel_scan_", "causal_conv_"])
def test_wrong_state_fails_comparison(tiny_model, monkeypatch, operation, change):
    llm = LLM(tiny_model("jamba"), device="cpu", max_model_len=64, **MODES["chunked"])
    right = [output.outputs[0].token_ids for output in greedy(llm, prompts()[1:4], 4)]
    run, place = getattr(ops, operation), {"channel_scan_": 6, "causal_conv_": 3}[operation]

    def wrong(*args):
        args[place].copy_(change(args[place]))
        return run(*args)

    monkeypatch.setattr(ops, operation, wrong)
    assert right != [output.outputs[0].token_ids for output in greedy(llm, prompts()[1:4], 4)]


def test_published_config_keys_are_equivalent(tiny_model, tmp_path):
    """Files may state the rank as "auto", and no number of channels."""
    extra = {**TINY_FAMILIES["mamba"][1], "intermediate_size": 128, "time_step_rank": 4}
    folder = make_tiny(tmp_path / "m", "MambaConfig", extra)

    def published(config):
        config["time_step_rank"] = "auto"
        del config["intermediate_size"]

    changed = edited(folder, tmp_path / "published", config=published)
    assert torch.equal(logits(changed), logits(folder))


def test_biases_and_convolution_widths(tmp_path):
    different = {"use_bias": True, "use_conv_bias": False, "conv_kernel": 2}
    extra = {**TINY_FAMILIES["falcon_mamba"][1], **different, "tie_word_embeddings": False}
    folder = make_tiny(tmp_path / "m", "FalconMambaConfig", extra)
    with torch.no_grad():
        want = in_transformers(folder)(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5


def test_jamba_without_experts_and_with_biases(tmp_path):
    different = {"num_experts": 1, "mamba_proj_bias": True, "mamba_conv_bias": False}
    extra = {**TINY_FAMILIES["jamba"][1], **different, "attn_layer_offset": 0}
    folder = make_tiny(tmp_path / "m", "JambaConfig", extra)
    llm = LLM(folder, device="cpu", max_model_len=64, max_num_batched_tokens=7)
    check_greedy(in_transformers(folder), prompts(), greedy(llm, prompts()))


@pytest.mark.parametrize("flag", ["kv_offload_gb", "kv_transfer_config"])
def test_empty_pages_are_not_copied(tiny_model, tmp_path, flag):
    values = {
        "kv_offload_gb": 0.1,
        "kv_transfer_config": '{"kv_connector": "folder", "kv_role": "kv_both",'
        f' "kv_connector_extra_config": {{"path": "{tmp_path}"}}}}',
    }
    message = f"--{flag.replace('_', '-')}.*: does not work with MambaForCausalLM, which has no att"
    with pytest.raises(InputError, match=message):
        LLM(tiny_model("mamba"), device="cpu", max_model_len=64, **{flag: values[flag]})


def test_control_projections_stay_float(written):
    """x_proj and dt_proj are listed as float; the first and the last projection are rounded."""
    reader = CheckpointReader(written("w4a16-sym-g32", "compressed-tensors", "falcon_mamba"))
    config = QuantConfig.from_dict(reader.config[BLOCK])
    for name, is_float in (("in", False), ("x", True), ("dt", True), ("out", False)):
        scheme = config.scheme_for(f"backbone.layers.0.mixer.{name}_proj")
        assert (scheme is None) == is_float, name
