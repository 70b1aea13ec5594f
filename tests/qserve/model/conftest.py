"""The tiny random models of tests/conftest.py in each scheme and format."""

import zlib
from collections import Counter

import pytest

from calibrate.layer_map import find_layer_map
from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.scheme import Scheme
from qkernels import ops
from tests.qserve.model.test_family_tokens import VARIANTS
from tests.qserve.model.test_hybrid_tokens import VARIANTS as HYBRIDS
from tests.qserve.model.variants import model_maker


@pytest.fixture(scope="session")
def written(tiny_model, made_once):
    """(scheme, format, family) -> folder, quantized once."""

    def make(scheme, output_format, family="llama", **options):
        source = tiny_model(family)
        config = CheckpointReader(source).config
        names = [n for i in range(3) for n in find_layer_map(config).linear_names(i, config)]
        scales = dict.fromkeys(names, 0.05) if "static" in str(scheme) else None
        key = repr((str(scheme), output_format, family, sorted(options.items())))
        return made_once(
            f"variant-{zlib.crc32(key.encode()):08x}",
            lambda folder: quantize_checkpoint(
                source,
                folder,
                scheme=Scheme.parse(scheme),
                output_format=output_format,
                progress=False,
                input_scales=scales,
                **options,
            ),
        )

    return make


@pytest.fixture(scope="session")
def model_of(tiny_model, tmp_path_factory):
    """Name of a family or of a variant of test_family_tokens.py -> its folder."""
    return model_maker(tiny_model, tmp_path_factory, VARIANTS)


@pytest.fixture(scope="session")
def hybrid(tiny_model, tmp_path_factory):
    """Name of a family or of a variant -> its folder."""
    return model_maker(tiny_model, tmp_path_factory, HYBRIDS)


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
