"""The tiny random models of tests/conftest.py in each scheme and format."""

import json

import pytest

from calibrate.layer_map import find_layer_map
from calibrate.pipeline import quantize_checkpoint
from formats.scheme import Scheme


@pytest.fixture(scope="session")
def written(tiny_model, tmp_path_factory):
    """(scheme, format, family) -> folder, quantized once."""
    made = {}

    def make(scheme, output_format, family="llama", **options):
        key = (scheme, output_format, family, str(options))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("variants") / "model"
            source = tiny_model(family)
            config = json.loads((source / "config.json").read_text())
            names = [n for i in range(3) for n in find_layer_map(config).linear_names(i, config)]
            quantize_checkpoint(
                source,
                made[key],
                scheme=Scheme.parse(scheme),
                output_format=output_format,
                progress=False,
                input_scales=dict.fromkeys(names, 0.05) if "static" in scheme else None,
                **options,
            )
        return made[key]

    return make


@pytest.fixture
def count_calls(monkeypatch):
    """Replace functions of a module by themselves, counted: the counts by name."""

    def count(module, names):
        counts = dict.fromkeys(names, 0)

        def counted(name, function):
            def call(*args, **options):
                counts[name] += 1
                return function(*args, **options)

            return call

        for name in names:
            monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
        return counts

    return count
