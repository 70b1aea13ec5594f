"""The tiny random models of tests/conftest.py in each scheme and format."""

from collections import Counter

import pytest

from calibrate.layer_map import find_layer_map
from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.scheme import Scheme
from qkernels import ops


@pytest.fixture(scope="session")
def written(tiny_model, tmp_path_factory):
    """(scheme, format, family) -> folder, quantized once."""
    made = {}

    def make(scheme, output_format, family="llama", **options):
        key = (scheme, output_format, family, str(options))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("variants") / "model"
            source = tiny_model(family)
            config = CheckpointReader(source).config
            names = [n for i in range(3) for n in find_layer_map(config).linear_names(i, config)]
            quantize_checkpoint(
                source,
                made[key],
                scheme=Scheme.parse(scheme),
                output_format=output_format,
                progress=False,
                input_scales=dict.fromkeys(names, 0.05) if "static" in str(scheme) else None,
                **options,
            )
        return made[key]

    return make


@pytest.fixture
def count_forms(monkeypatch):
    """(operation, type of the form) -> how often norms and activations made such a form."""
    counts = Counter()

    def norm(x, residual, spec, out=None, *rest, made=ops.norm):
        counts["norm" if residual is None else "norm of a sum", type(out)] += 1
        return made(x, residual, spec, out, *rest)

    def activate(x, spec, out=None, made=ops.activate):
        counts["activate", type(out)] += 1
        return made(x, spec, out)

    monkeypatch.setattr(ops, "norm", norm)
    monkeypatch.setattr(ops, "activate", activate)
    return counts
