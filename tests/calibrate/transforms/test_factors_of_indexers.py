"""Factors that a transform takes out of a norm go into every linear that reads it: an indexer's,
which stay in float, too. Otherwise an indexer would select other keys.
"""

import pytest
import torch

from calibrate.layer_map import find_layer_map
from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader
from formats.scheme import Scheme


@pytest.mark.parametrize("recipe", ["awq", "smoothquant"])
@pytest.mark.parametrize(
    ("family", "num_readers"), [("deepseek_v32", 9), ("glm_moe_dsa", 9), ("minimax_m3", 4)]
)
def test_factors_of_a_norm_reach_the_indexer(tiny_model, tmp_path, family, num_readers, recipe):
    ids_WS = torch.randint(3, 500, (4, 24), generator=torch.Generator().manual_seed(0))
    quantize_checkpoint(
        tiny_model(family),
        tmp_path / "model",
        scheme=Scheme.parse("w4a16-asym-g32" if recipe == "awq" else "w8a8"),
        recipe=recipe,
        calibration=CalibrationData(ids_WS=ids_WS, source="test", seed=0),
        progress=False,
    )
    source, written = CheckpointReader(tiny_model(family)), CheckpointReader(tmp_path / "model")
    found, moved = find_layer_map(source.config), False
    count = 0
    for layer in range(found.num_layers(source.config)):
        prefix = found.prefix(layer)
        for pair in found.scale_pairs(source.config, layer):
            for name in pair.in_float:
                before, after = (
                    reader.get(f"{prefix}.{name}.weight")
                    * (reader.get(f"{prefix}.{pair.previous}.weight") + found.norm_offset)
                    for reader in (source, written)
                )
                assert torch.allclose(before, after, rtol=1e-5, atol=1e-6)
                count += 1
            norm = f"{prefix}.{pair.previous}.weight"
            moved |= bool(pair.in_float) and not torch.equal(source.get(norm), written.get(norm))
    assert count == num_readers
    assert moved, "no norm changed, so nothing was compared"
