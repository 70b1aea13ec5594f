"""Experts rounded together: each has the bits, the digest and the errors of one rounded alone."""

import pytest
import torch

from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError, RangeError
from formats.files.memory_tensors import MemoryTensors
from formats.in_memory.weights import same_weight
from formats.weight_digest import rounded, weight_digest
from qserve.config import EngineConfig
from qserve.engine.sizes import read_model
from qserve.model.loading import rounding_source
from qserve.model.loading.digest_threads import DigestThreads
from qserve.model.loading.rounding_source import RoundingSource


@pytest.fixture
def experts(tiny_model):
    """A model's configuration by scheme, its config.json and tensors, and its experts' shapes."""
    folder = tiny_model("qwen2_moe")
    reader = CheckpointReader(folder)
    tensors = {name: entry.read() for name, entry in reader.entries.items()}
    shapes = {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in tensors.items()
        if ".experts." in name
    }
    assert len(shapes) > 12

    def model(scheme):
        return read_model(EngineConfig(model=str(folder), quantization=scheme))

    return model, reader.config, tensors, shapes


def calls_of_rounded(monkeypatch) -> list[int]:
    """Rows of each matrix that is rounded from now on."""
    rows = []

    def recorded(weight_NK, *arguments):
        rows.append(len(weight_NK))
        return rounded(weight_NK, *arguments)

    monkeypatch.setattr(rounding_source, "rounded", recorded)
    return rows


@pytest.mark.parametrize("scheme", ["w4a16-auto", "w8a8", "w8a8-fp8", "w4a16-mxfp4"])
def test_joint_rounding_equals_separate_bitwise(scheme, experts, monkeypatch):
    model, config, tensors, shapes = experts
    config_of = model(scheme)
    source = RoundingSource(MemoryTensors(tensors.items(), config), config_of)
    source.digests, rows = DigestThreads(), calls_of_rounded(monkeypatch)
    wanted = {}
    for name, shape in shapes.items():
        alone = rounded(tensors[f"{name}.weight"], config_of.rounding.schemes[name], name)
        assert same_weight(source.weight(name, shape), alone) is None, name
        wanted[f"{name}.weight"] = weight_digest(alone)
    assert source.digests.result() == wanted
    assert not source._ready
    is_integer = scheme in ("w4a16-auto", "w8a8")
    assert (len(rows) < len(shapes) / 2) == is_integer
    assert sum(rows) == sum(shape[0] for shape in shapes.values()), "one was rounded twice"


def test_order_of_requests_does_not_matter(experts):
    model, config, tensors, shapes = experts
    config_of = model("w8a8")
    source = RoundingSource(MemoryTensors(tensors.items(), config), config_of)
    for name in reversed(shapes):
        alone = rounded(tensors[f"{name}.weight"], config_of.rounding.schemes[name], name)
        assert same_weight(source.weight(name, shapes[name]), alone) is None, name
    assert not source._ready


@pytest.mark.parametrize(
    ("value", "error", "problem"),
    [(float("nan"), CheckpointError, "NaN or infinity"), (1e-9, RangeError, "too coarse")],
)
def test_expert_that_cannot_be_rounded_is_named(value, error, problem, experts):
    model, config, tensors, shapes = experts
    wrong = next(name for name in shapes if ".experts.2." in name)
    bad = {**tensors, f"{wrong}.weight": torch.full(shapes[wrong], value)}
    source = RoundingSource(MemoryTensors(bad.items(), config), model("w4a16-auto"))
    with pytest.raises(error, match=problem) as raised:
        for name in shapes:
            source.weight(name, shapes[name])
    assert wrong in str(raised.value)


def test_zero_matrices_and_other_dtypes(experts):
    model, config, tensors, shapes = experts
    config_of = model("w8a8")
    zero, half = (f"{name}.weight" for name in list(shapes)[:2])
    mixed = {**tensors, zero: torch.zeros_like(tensors[zero]), half: tensors[half].bfloat16()}
    source = RoundingSource(MemoryTensors(mixed.items(), config), config_of)
    for name, shape in shapes.items():
        alone = rounded(mixed[f"{name}.weight"], config_of.rounding.schemes[name], name)
        assert same_weight(source.weight(name, shape), alone) is None, name
