"""Adapters of routed experts: results equal PEFT's and those of merged weights, in float32."""

import pytest
import torch

from qserve.lora.request import LoRARequest
from tests.adapters import write_adapter, write_with_peft
from tests.qserve.lora.test_lora_tokens import assert_is, engine, float_model, run

STACKS = ("gate_up_proj", "down_proj")
LEAVES = {"mixtral": ("w1", "w3", "w2")}
USUAL = ("gate_proj", "up_proj", "down_proj")


def of_experts(family):
    """Ends of the names of experts' linears, and of attention's."""
    leaves = LEAVES.get(family, USUAL)
    return tuple(f"experts.{e}.{leaf}" for e in range(8) for leaf in leaves)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_linears_of_each_expert(tiny_model, tmp_path, family):
    """The file names each expert's linears, as transformers 4 did; PEFT converts it."""
    peft = pytest.importorskip("peft")
    model, leaves = tiny_model(family), LEAVES.get(family, USUAL)
    only = (*of_experts(family), "o_proj")
    loras = []
    for n, rank in enumerate((3, 8)):
        folder = write_adapter(
            model,
            tmp_path / f"{n}",
            rank=rank,
            seed=n,
            only=only,
            experts=True,
            target_modules=[*leaves, "o_proj"],
        )
        loras.append(LoRARequest(f"a{n}", n + 1, str(folder)))
    found = run(engine(model, lora_experts=True), [*loras, None])
    for lora, each in zip(loras, found, strict=False):
        theirs = peft.PeftModel.from_pretrained(float_model(model), lora.lora_path).eval()
        assert_is(theirs, each)
    assert_is(float_model(model), found[-1])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_stacked_experts(tiny_model, tmp_path, family):
    """The file has the matrices of all experts in one tensor, as PEFT's target_parameters."""
    pytest.importorskip("peft")
    model = tiny_model(family)
    parameters = [f"mlp.experts.{name}" for name in STACKS]
    options = {
        "both": {"target_parameters": parameters, "r": 3, "lora_alpha": 5},
        "down": {"target_parameters": parameters[1:], "r": 4, "use_rslora": True},
        "ranks": {
            "target_parameters": parameters,
            "target_modules": ["q_proj"],
            "r": 2,
            "rank_pattern": {r".*\.gate_up_proj": 5},
            "alpha_pattern": {"mlp.experts.down_proj": 3},
        },
    }
    options = {name: {"target_modules": []} | each for name, each in options.items()}
    theirs, loras = [], []
    for n, (name, config) in enumerate(options.items(), start=1):
        made = write_with_peft(float_model(model), tmp_path / name, seed=n, **config)
        theirs.append(made)
        loras.append(LoRARequest(name, n, str(tmp_path / name)))
    found = run(engine(model, lora_experts=True), [*loras, None])
    for one, each in zip(theirs, found, strict=False):
        assert_is(one, each)
    assert_is(float_model(model), found[-1])
