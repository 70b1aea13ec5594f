"""verify: missing tensors, additional ones, and tensors of another linear."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from calibrate.results.verify import LinearDigest, verify
from formats.checkpoint import CheckpointReader
from formats.codecs import gptq
from formats.errors import CheckpointError
from formats.in_memory.packed import PackedWeight
from formats.quant_config import BLOCK
from formats.scheme import Scheme

SCHEME = Scheme.parse("w4a16-sym-g32")


def digest(weight: torch.Tensor) -> LinearDigest:
    packed = PackedWeight.from_float(weight, SCHEME.weight)
    return LinearDigest.of(packed, gptq.encode(packed))


@pytest.fixture
def written(tiny_checkpoint):
    """(the written folder, its expected digests, the source's reader)."""
    model = tiny_checkpoint()
    source = model.write()
    target = source.parent / "out"
    report = quantize_checkpoint(source, target, scheme=SCHEME, progress=False)
    digests = {
        linear.name: digest(model.tensors[f"{linear.name}.weight"]) for linear in report.linears
    }
    return target, digests, CheckpointReader(source)


def rewrite(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def swap(tensors, first, second):
    for field in ("qweight", "scales"):
        a, b = f"{first}.{field}", f"{second}.{field}"
        tensors[a], tensors[b] = tensors[b], tensors[a]


def test_valid_folder_passes(written):
    verify(*written)


def test_missing_input_order_tensor_is_reported(written):
    folder, *_ = written
    for name in ("config.json", "quantize_config.json"):
        stored = json.loads((folder / name).read_text())
        stored.get(BLOCK, stored)["desc_act"] = True
        (folder / name).write_text(json.dumps(stored))
    with pytest.raises(CheckpointError, match="states act-order true, but the tensors have no"):
        verify(*written)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight: is missing"),
        (lambda t: t.pop("model.layers.0.mlp.up_proj.g_idx"), "up_proj.g_idx: is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra: is in the written"),
        (
            lambda t: swap(t, "model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj"),
            "layers.0.mlp.gate_proj: its codes",
        ),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].half()}),
            "model.norm.weight: differs",
        ),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].view(torch.int16)}),
            "model.norm.weight: differs",
        ),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].view(8, 8)}),
            "model.norm.weight: differs",
        ),
        (
            lambda t: t.update(
                {
                    "model.layers.0.mlp.up_proj.scales": t[
                        "model.layers.0.mlp.up_proj.scales"
                    ].float()
                }
            ),
            "up_proj: its scales",
        ),
    ],
)
def test_changed_tensor_is_reported(written, change, named):
    rewrite(written[0], change)
    with pytest.raises(CheckpointError, match=named):
        verify(*written)


def test_quantization_config_not_round_tripping_is_reported(written):
    folder = written[0]
    for file_name in ("config.json", "quantize_config.json"):
        value = json.loads((folder / file_name).read_text())
        value.get(BLOCK, value)["true_sequential"] = True
        (folder / file_name).write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match="does not read back the same"):
        verify(*written)


def test_differing_second_config_is_reported(written):
    path = written[0] / "quantize_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "group_size": 64}))
    with pytest.raises(CheckpointError, match="quantize_config.json: differs from config.json's"):
        verify(*written)


def test_config_differing_from_source_is_reported(written):
    path = written[0] / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 5.0}))
    with pytest.raises(CheckpointError, match="config.json: differs from the source in more than"):
        verify(*written)


def test_negative_zero_is_not_zero(written):
    folder, digests, source = written
    name = "model.norm.weight"
    source_folder = source.folder
    rewrite(source_folder, lambda t: t[name].fill_(0.0))
    rewrite(folder, lambda t: t[name].fill_(-0.0))
    with pytest.raises(CheckpointError, match="model.norm.weight: differs"):
        verify(folder, digests, CheckpointReader(source_folder))


def test_equal_codes_of_other_scheme_are_reported(written):
    target, digests, source = written
    name = next(iter(digests))
    other = replace(digests[name], scheme=Scheme.parse("w4a16-sym-g64"))
    with pytest.raises(CheckpointError, match="reads back as w4a16-sym-g32, not as w4a16-sym-g64"):
        verify(target, {**digests, name: other}, source)
