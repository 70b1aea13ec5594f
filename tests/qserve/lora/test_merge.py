"""`qserve merge`: the weights are base plus adapter, the rest is copied, quantized ones refused."""

import json
import shutil

import pytest
import torch

from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError, DiskError
from qserve import cli
from qserve.lora.merge import merge_adapter
from tests.adapters import write_adapter, write_with_peft


def test_merged_and_copied_weights(tiny_model, tmp_path, capsys):
    model = tiny_model("llama")
    adapter = write_adapter(model, tmp_path / "a", rank=3, only=["o_proj", "gate_proj"])
    target = tmp_path / "merged"
    assert cli.main(["merge", str(model), str(adapter), "-o", str(target)]) == 0
    assert "6 linears: the adapter changes them by" in capsys.readouterr().out
    before, after = CheckpointReader(model), CheckpointReader(target)
    assert list(before.entries) == list(after.entries) and before.config == after.config
    stored = {f"{n}.weight" for n in _modules(adapter)}
    assert len(stored) == 6
    for name in before.entries:
        same = torch.equal(before.get(name), after.get(name))
        assert same == (name not in stored), name


def test_scale_and_sum(tiny_model, tmp_path):
    model = tiny_model("qwen3")
    adapter = write_adapter(model, tmp_path / "a", rank=4, alpha=6, use_rslora=True)
    merged = merge_adapter(model, adapter, tmp_path / "merged", max_shard_bytes=50_000)
    before, after = CheckpointReader(model), CheckpointReader(merged.target)
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 1
    for name, (a, b) in _modules(adapter).items():
        want = before.get(f"{name}.weight").double() + 6 / 4**0.5 * (b.double() @ a.double())
        torch.testing.assert_close(after.get(f"{name}.weight").double(), want, atol=1e-6, rtol=1e-5)
    assert 0.01 < merged.update < 2 and merged.lost < 1e-5


@pytest.mark.exhaustive
def test_merge_equals_peft(tiny_model, tmp_path):
    """The numbers equal PEFT's merge_and_unload."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = tiny_model("phi3")
    adapter = write_adapter(model, tmp_path / "a", rank=4, alpha_pattern={"o_proj": 1})
    merge_adapter(model, adapter, tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    ours = CheckpointReader(tmp_path / "merged")
    for name in ours.entries:
        torch.testing.assert_close(ours.get(name), theirs[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *(("qwen3_moe", "stacks"), ("gpt_oss", "stacks"), ("mixtral", "linears")),
        pytest.param("qwen3_moe", "linears", marks=pytest.mark.exhaustive),
        pytest.param("mixtral", "stacks", marks=pytest.mark.exhaustive),
    ],
)
def test_merged_experts_equal_peft(tiny_model, tmp_path, family, form):
    """A file of stacks by PEFT, or one of each expert's linears. gpt-oss itself stores stacks."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model, folder = tiny_model(family), tmp_path / "a"
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    stacks = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    if form == "stacks":
        theirs = write_with_peft(
            base, folder, r=3, lora_alpha=4, target_modules=["q_proj"], target_parameters=stacks
        )
    else:
        leaves = (
            ["w1", "w2", "w3"] if family == "mixtral" else ["gate_proj", "up_proj", "down_proj"]
        )
        ends = tuple(f".{leaf}" for leaf in leaves)
        write_adapter(model, folder, rank=3, only=ends, experts=True, target_modules=leaves)
        theirs = peft.PeftModel.from_pretrained(base, folder)
    want = theirs.merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(
        merge_adapter(model, folder, tmp_path / "merged").target, dtype=torch.float32
    ).state_dict()
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    assert found.keys() == want.keys()
    changed = [name for name in found if not torch.equal(found[name], before[name])]
    assert sum(".experts." in name for name in changed) == 6
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, want[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "moe_intermediate_size"])
def test_merge_without_sizes_in_the_config(tiny_model, tmp_path, key):
    """Adapters of other linears need no sizes of experts."""
    model = shutil.copytree(tiny_model("qwen3_moe"), tmp_path / "model")
    adapter = write_adapter(model, tmp_path / "a", only=["o_proj"])
    config = json.loads((model / "config.json").read_text())
    del config[key]
    (model / "config.json").write_text(json.dumps(config))
    assert merge_adapter(model, adapter, tmp_path / "merged").num_linears == 3


def test_refused_merge_leaves_no_files(quantized_5m, docs_5m, tiny_model, tmp_path, capsys):
    adapter = write_adapter(docs_5m, tmp_path / "a", rank=1)
    target = tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"is quantized.*--enable-lora"):
        merge_adapter(quantized_5m, adapter, target)
    assert cli.main(["merge", str(tiny_model("llama")), str(adapter), "-o", str(target)]) == 1
    assert "use an adapter that was trained on this model" in capsys.readouterr().err
    huge = write_adapter(docs_5m, tmp_path / "huge", rank=1, size=1e30, only=["0.mlp.up_proj"])
    with pytest.raises(CheckpointError, match="exceeds the range of torch"):
        merge_adapter(docs_5m, huge, target)
    assert not target.exists()


def _modules(adapter):
    from safetensors.torch import load_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    return {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): (
            tensor,
            tensors[name.replace("lora_A", "lora_B")],
        )
        for name, tensor in tensors.items()
        if "lora_A" in name
    }


def test_merge_larger_than_free_disk_is_refused_early(tiny_model, tmp_path, monkeypatch):
    model = tiny_model("llama")
    adapter = write_adapter(model, tmp_path / "a", rank=1)
    usage = shutil.disk_usage(tmp_path)._replace(free=CheckpointReader(model).num_bytes - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DiskError, match="out: needs .* or more, but .* free .free some"):
        merge_adapter(model, adapter, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
