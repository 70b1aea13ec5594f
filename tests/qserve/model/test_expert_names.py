"""Experts under the names of other tools: loading and `inspect` read the same model."""

import json
import re

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.convert import convert_checkpoint
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import Scheme
from tests.formats.inspection.findings import of_weights
from tests.qserve.model.variants import edited, logits

LLMCOMPRESSOR = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
ORIGINAL = {theirs: ours for ours, theirs in LLMCOMPRESSOR.items()}


def renamed(leaves, module=None):
    """A change of tensors' names: of experts' linears, and of the module that holds them."""

    def change(state):
        for name in list(state):
            new = re.sub(r"(experts\.\d+\.)(\w+)", lambda m: m[1] + leaves.get(m[2], m[2]), name)
            if module is not None:
                new = re.sub(r"\.(block_sparse_moe|mlp)\.", f".{module}.", new)
            state[new] = state.pop(name)

    return change


def stacked(state):
    """All experts of a layer in one tensor [E, N, K] each, gate above up."""
    for layer in range(3):
        stem = f"model.layers.{layer}.mlp.experts"
        if f"{stem}.0.gate_proj.weight" not in state:
            continue
        for name, leaves in (
            ("gate_up_proj", ("gate_proj", "up_proj")),
            ("down_proj", ("down_proj",)),
        ):
            experts = []
            for number in range(sum(f"{stem}.{e}.{leaves[0]}.weight" in state for e in range(64))):
                parts = [state.pop(f"{stem}.{number}.{leaf}.weight") for leaf in leaves]
                experts.append(torch.cat(parts))
            state[f"{stem}.{name}"] = torch.stack(experts)


def verdicts(folder):
    return {verdict.program: verdict for verdict in inspect_checkpoint(folder).loads_in}


@pytest.mark.parametrize(
    ("family", "leaves", "module"),
    [
        ("mixtral", LLMCOMPRESSOR, None),
        ("mixtral", LLMCOMPRESSOR, "mlp"),
        ("mixtral", {}, "mlp"),
        ("qwen2_moe", ORIGINAL, None),
        ("qwen3_moe", ORIGINAL, "block_sparse_moe"),
    ],
)
def test_float_experts_under_other_names(tiny_model, tmp_path, family, leaves, module):
    source = tiny_model(family)
    folder = edited(source, tmp_path / "x", renamed(leaves, module))
    assert torch.equal(logits(folder), logits(source))
    assert not of_weights(inspect_checkpoint(folder))


def test_experts_under_other_names_with_a_head_that_only_config_json_ties(tiny_model, tmp_path):
    source = tiny_model("mixtral")

    def tie(config):
        config["tie_word_embeddings"] = True

    folder = edited(source, tmp_path / "x", renamed(LLMCOMPRESSOR), tie)
    assert torch.equal(logits(folder), logits(source))
    (problem,) = of_weights(inspect_checkpoint(folder))
    assert problem.severity == "warning" and "asks for a tied head" in problem.text
    assert "experts called" in verdicts(folder)["transformers"].reason


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["w4a16-sym-g32", "w8a8"])
def test_mixtral_of_llmcompressor(written, tmp_path, scheme):
    """Its config names modules as transformers does: experts below `mlp`."""
    source = written(scheme, "compressed-tensors", "mixtral", ignore=["1.w2"])

    def config(value):
        text = json.dumps(value["quantization_config"])
        text = text.replace("block_sparse_moe", "mlp").replace("w2", "down_proj")
        value["quantization_config"] = json.loads(text)

    folder = edited(source, tmp_path / "x", renamed(LLMCOMPRESSOR), config)
    assert torch.equal(logits(folder), logits(source))
    assert not of_weights(inspect_checkpoint(folder))
    found = verdicts(folder)
    assert found["this project"].answer == verdicts(source)["this project"].answer
    assert found["transformers"].answer == "no"
    assert "experts called block_sparse_moe.experts." in found["transformers"].reason
    convert_checkpoint(folder, tmp_path / "back", "compressed-tensors")
    assert "called" not in verdicts(tmp_path / "back")["transformers"].reason
    assert torch.equal(logits(tmp_path / "back"), logits(source))


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "glm4_moe"])
def test_experts_of_a_layer_in_one_tensor(tiny_model, tmp_path, family):
    """As transformers 5 holds them, and saves them with `save_original_format=False`."""
    source = tiny_model(family)
    folder = edited(source, tmp_path / "x", stacked)
    assert torch.equal(logits(folder), logits(source))
    assert not of_weights(inspect_checkpoint(folder))


def test_experts_of_a_layer_in_one_tensor_are_quantized(tiny_model, written, tmp_path):
    """As Qwen3.6 is published: the same bytes as from a file with a linear for each."""
    folder = edited(tiny_model("qwen3_moe"), tmp_path / "x", stacked)
    scheme = Scheme.parse("w4a16-sym-g32")
    quantize_checkpoint(folder, tmp_path / "out", scheme=scheme, recipe="rtn", progress=False)
    found, want = (
        CheckpointReader(each)
        for each in (tmp_path / "out", written("w4a16-sym-g32", None, "qwen3_moe"))
    )
    assert found.entries.keys() == want.entries.keys()
    assert all(torch.equal(found.get(name), want.get(name)) for name in want.entries)


def test_gpt_oss_with_a_linear_for_each_expert(tiny_model, tmp_path):
    """As llm-compressor, which takes the fused ones apart, leaves them."""
    source = tiny_model("gpt_oss")

    def apart(state):
        for layer in range(3):
            stem = f"model.layers.{layer}.mlp.experts"
            both, down = (
                [state.pop(f"{stem}.{name}_proj{end}") for end in ("", "_bias")]
                for name in ("gate_up", "down")
            )
            for e in range(len(down[0])):
                for name, matrix, bias in (
                    ("gate_proj", both[0][e][:, 0::2], both[1][e][0::2]),
                    ("up_proj", both[0][e][:, 1::2], both[1][e][1::2]),
                    ("down_proj", down[0][e], down[1][e]),
                ):
                    state[f"{stem}.{e}.{name}.weight"] = matrix.t().contiguous()
                    state[f"{stem}.{e}.{name}.bias"] = bias.clone()

    folder = edited(source, tmp_path / "x", apart)
    assert torch.equal(logits(folder), logits(source))
    assert not of_weights(inspect_checkpoint(folder))


def test_unknown_expert_names_are_reported_by_loader_and_inspect(tiny_model, tmp_path):
    leaves = {"w1": "gate", "w3": "lin", "w2": "out"}
    folder = edited(tiny_model("mixtral"), tmp_path / "x", renamed(leaves))
    wanted = r"model\.layers\.0\.block_sparse_moe\.experts\.0\.w1.* is missing; the file has "
    wanted += r"block_sparse_moe\.experts\.N\.gate\.weight"
    with pytest.raises(Exception, match=wanted):
        logits(folder)
    (problem,) = of_weights(inspect_checkpoint(folder))
    assert re.search(wanted.replace(r"\.w1.* is", r"\.w1: is"), str(problem))
    assert verdicts(folder)["this project"].answer == "no"
