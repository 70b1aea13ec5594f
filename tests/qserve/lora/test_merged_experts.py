"""transformers loads the experts that `qserve merge` writes: they are as in the family's files."""

import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from formats.checkpoint import CheckpointReader
from formats.families import family_of
from qserve.lora.merge import merge_adapter
from tests.adapters import write_adapter
from tests.qserve.model.variants import TOKENS, logits, relative
from tests.tiny_families import STACKED_EXPERTS, TINY_FAMILIES
from tests.tiny_vision import loaded, write_tiny_vision

MIXTURES = [
    name for name, (_, extra) in TINY_FAMILIES.items() if any("experts" in key for key in extra)
]
OFTEN = (*STACKED_EXPERTS, "mixtral", "qwen3_5_moe")
# file's names of a few tensors that the reader renames; transformers reads both names
RENAMED = ("kolibri", "deepseek_v4", "kimi_linear")


def tensors_of(folder):
    return {k: t for path in folder.glob("*.safetensors") for k, t in load_file(path).items()}


def loaded_whole(folder, model):
    """transformers' model of a folder; it must find every tensor that it does not compute."""
    made, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    reader = CheckpointReader(model)
    computed = tuple(f".{name}" for name in family_of(reader.config).masks)
    missing = [n for n in info.pop("missing_keys") if not (computed and n.endswith(computed))]
    assert not missing and not {key: names for key, names in info.items() if names}
    return made.eval()


@pytest.mark.parametrize(
    "name",
    [
        name if name in OFTEN else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in MIXTURES
    ],
)
def test_transformers_loads_merged_experts(name, tiny_model, tmp_path):
    model, merged = tiny_model(name), tmp_path / "merged"
    adapter = write_adapter(model, tmp_path / "a", rank=2, experts=True)
    named = load_file(adapter / "adapter_model.safetensors")
    assert any("experts." in each for each in named) or name in (
        "gpt_oss",
        "granite_hybrid",
    )  # adapters cannot name gpt-oss's experts
    merge_adapter(model, adapter, merged)
    before, after = tensors_of(model), tensors_of(merged)
    masks = family_of(CheckpointReader(model).config).masks
    kept = {each for each in before if not masks or not each.endswith(masks)}
    if name not in RENAMED:
        assert after.keys() == kept
        assert all(after[each].shape == before[each].shape for each in kept)
    with torch.no_grad():
        found = loaded_whole(merged, model)(torch.tensor([TOKENS])).logits[0]
    assert relative(found, logits(merged)) < 1e-4
    assert relative(found, logits(model)) > 0.01


@pytest.mark.parametrize("name", STACKED_EXPERTS)
def test_tensors_of_experts_without_an_update_keep_their_bits(name, tiny_model, tmp_path):
    model = tiny_model(name)
    adapter = write_adapter(model, tmp_path / "a", only=["0.self_attn.o_proj", "0.mamba.in_proj"])
    merge_adapter(model, adapter, tmp_path / "merged")
    before, after = tensors_of(model), tensors_of(tmp_path / "merged")
    changed = [each for each, tensor in before.items() if not torch.equal(tensor, after[each])]
    assert len(changed) == 1 and re.search(r"0\.(self_attn\.o|mamba\.in)_proj", changed[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llama4", "qwen3_vl_moe", "step3p7"])
def test_transformers_loads_experts_of_models_with_images(name, tmp_path):
    model, merged = write_tiny_vision(tmp_path / "model", name), tmp_path / "merged"
    adapter = write_adapter(model, tmp_path / "a", rank=1, size=0.0, experts=True)
    merge_adapter(model, adapter, merged)
    assert tensors_of(model).keys() == tensors_of(merged).keys()
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        want, found = (loaded(each, name)(input_ids=ids).logits for each in (model, merged))
    assert torch.equal(found, want)
