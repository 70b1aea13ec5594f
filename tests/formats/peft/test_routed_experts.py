"""Adapters of routed experts: names, the order of ranks in stacks, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from formats.errors import CheckpointError
from formats.families import FAMILIES
from formats.peft.lora import adapted_shapes, read_adapter
from formats.peft.lora_config import LoraConfig
from formats.peft.routed_experts import StackedExperts, expert_shapes

E, C, INNER, R = 3, 8, 4, 2
QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    **{"num_hidden_layers": 2, "hidden_size": C, "moe_intermediate_size": INNER},
    **{"num_experts": E, "num_experts_per_tok": 1, "vocab_size": 16, "mlp_only_layers": [1]},
    **{"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 8},
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    **{"num_hidden_layers": 1, "hidden_size": C, "intermediate_size": INNER},
    **{"num_local_experts": E, "num_experts_per_tok": 1, "vocab_size": 16},
    **{"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8},
}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MODULE = "base_model.model.model.layers.0.mlp.experts"


def written(folder, tensors, **config):
    save_file({name: each.contiguous() for name, each in tensors.items()},
              folder / "adapter_model.safetensors", metadata={"format": "pt"})  # fmt: skip
    stated = {"peft_type": "LORA", "r": R, "lora_alpha": 6, "target_modules": [], **config}
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    return folder


def read(folder, config, **options):
    family = FAMILIES[config["architectures"][0]]
    shapes = adapted_shapes(family, config) | expert_shapes(family, config)
    stacked = StackedExperts(family, config)
    return read_adapter(folder, shapes, family=family, stacked=stacked, **options)


def pairs(seed=0):
    """A and B of both products: [E, r, K] and [E, N, r]."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(shape, generator=generator)

    first = numbers(E, R, C), numbers(E, 2 * INNER, R)
    return first, (numbers(E, R, INNER), numbers(E, C, R))


def stacked(a, b, *, swapped=False):
    """As PEFT flattens them: A expert by expert, in B the expert is the last index."""
    if swapped:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)


def file_of(first, last, *, swapped=False):
    tensors = {}
    for stem, pair in ((f"{MODULE}.base_layer", first), (MODULE, last)):
        if pair is not None:
            a, b = stacked(*pair, swapped=swapped)
            tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    return tensors


@pytest.mark.parametrize("config", [QWEN, GPT_OSS], ids=["qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
def test_stacks_are_split_into_linears(tmp_path, config, swapped):
    """gpt-oss's gate and up alternate. PEFT swaps inputs and outputs of some models' stacks."""
    first, last = pairs()
    folder = written(tmp_path, file_of(first, last, swapped=swapped), target_parameters=BOTH)
    found = read(folder, config)
    gate, up = slice(0, INNER), slice(INNER, None)
    if config is GPT_OSS:
        gate, up = slice(0, None, 2), slice(1, None, 2)
    assert len(found.pairs) == 3 * E and found.rank == R
    for e in range(E):
        for name, (a, b), rows in (
            ("gate_proj", first, gate),
            ("up_proj", first, up),
            ("down_proj", last, slice(None)),
        ):
            pair = found.pairs[f"model.layers.0.mlp.experts.{e}.{name}"]
            torch.testing.assert_close(pair.delta(), 3 * b[e, rows] @ a[e])


def test_single_parameter_has_one_wrapper(tmp_path):
    """The tensors are those of the only parameter, whichever it is."""
    first, last = pairs()
    folder = written(tmp_path, file_of(None, last), target_parameters=BOTH[1:])
    assert {name.rpartition(".")[2] for name in read(folder, QWEN).pairs} == {"down_proj"}
    folder = written(tmp_path, file_of(None, first), target_parameters=BOTH[:1])
    assert {name.rpartition(".")[2] for name in read(folder, QWEN).pairs} == {
        "gate_proj",
        "up_proj",
    }


@pytest.mark.parametrize(
    ("change", "config", "error"),
    [
        ({}, {"target_parameters": BOTH[:1]}, "tensors of 2 parameters.* names gate_up_proj"),
        ({}, {}, "names none of its parameters|expected names"),
        ({"lora_A": None}, {"target_parameters": BOTH}, "has lora_B alone"),
        ({}, {"target_parameters": BOTH, "r": 3}, r"expected A and B of \[9, 8\] and \[8, 9\]"),
        ({}, {"target_parameters": [*BOTH, "mlp.gate.weight"]}, "found 'mlp.gate.weight'; not sup"),
        ({}, {"target_parameters": ["experts.gate_up_proj_bias"]}, "gate_up_proj_bias'; not supp"),
        ({"lora_A": torch.full((E * R, INNER), float("nan"))}, {"target_parameters": BOTH}, "NaN"),
        ({"lora_A": torch.ones(E * R, INNER).int()}, {"target_parameters": BOTH}, "floats in two"),
    ],
)
def test_refused_stacks(tmp_path, change, config, error):
    tensors = file_of(*pairs())
    for part, value in change.items():
        name = f"{MODULE}.{part}.weight"
        del tensors[name]
        if value is not None:
            tensors[name] = value
    with pytest.raises(CheckpointError, match=error):
        read(written(tmp_path, tensors, **config), QWEN)


def test_listed_stack_without_tensors_is_refused(tmp_path):
    config = QWEN | {"mlp_only_layers": []}
    folder = written(tmp_path, file_of(*pairs()), target_parameters=BOTH)
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.experts.gate_up_proj.*no tensors"):
        read(folder, config)


def test_experts_without_room_are_refused_by_name(tmp_path):
    family = FAMILIES["Qwen3MoeForCausalLM"]
    folder = written(tmp_path, file_of(*pairs()), target_parameters=BOTH)
    with pytest.raises(CheckpointError, match="adapts routed experts.*--lora-experts"):
        read_adapter(folder, adapted_shapes(family, QWEN), family=family)


def test_names_of_linears_do_not_require_experts(tmp_path):
    """Transformers 5 has no linears of experts: `gate_proj` is then that of dense layers alone."""
    name = "base_model.model.model.layers.1.mlp.gate_proj"
    tensors = {f"{name}.lora_A.weight": torch.ones(R, C), f"{name}.lora_B.weight": torch.ones(8, R)}
    found = read(written(tmp_path, tensors, target_modules=["gate_proj"]), QWEN)
    assert set(found.pairs) == {"model.layers.1.mlp.gate_proj"}
    one = "base_model.model.model.layers.0.mlp.experts.1.gate_proj"
    tensors |= {
        f"{one}.lora_A.weight": torch.ones(R, C),
        f"{one}.lora_B.weight": torch.ones(INNER, R),
    }
    with pytest.raises(CheckpointError, match=r"lists model.layers.0.mlp.experts.0.gate_proj"):
        read(written(tmp_path, tensors, target_modules=["gate_proj"]), QWEN)


def test_parameters_are_matched_by_whole_components():
    config = LoraConfig.from_dict(
        {"peft_type": "LORA", "target_modules": [], "target_parameters": ["experts.down_proj"]}
    )
    assert config.adapts_parameter("model.layers.0.mlp.experts.down_proj")
    assert not config.adapts_parameter("model.layers.0.mlp.experts.gate_up_proj")
    assert not config.adapts_parameter("model.layers.0.mlp.shared_experts.down_proj")
