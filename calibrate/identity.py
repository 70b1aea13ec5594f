"""What decides the bytes of a run's layers: two runs with the same identity may share layers.

Every weight counts by its bytes. Those of a layer are hashed when the run reads the layer, so the
journal holds a digest with each finished layer, beside this identity.
"""

import json
from collections.abc import Mapping
from typing import Any

from calibrate.adapter import adapter_digest
from calibrate.data import CalibrationData
from calibrate.digest import combined
from calibrate.recipe import Recipe, identity_of
from calibrate.report import tool_versions
from formats.lora import LoraAdapter
from formats.scheme import Scheme


def identity(
    config: Mapping[str, Any],
    outer_digest: str,
    schemes: Mapping[str, Scheme],
    recipe: Recipe,
    data: CalibrationData | None,
    seed: int,
    device: str,
    input_scales: Mapping[str, Any],
    kv_cache: str | None,
    adapter: LoraAdapter | None = None,
) -> dict[str, Any]:
    """Model, settings, data and versions, each by the name that an error about it uses.

    `config` is the model's config.json, `outer_digest` that of the tensors outside its layers.
    """
    return {
        "model": combined([json.dumps(config, sort_keys=True), outer_digest]),
        "schemes": {name: str(scheme) for name, scheme in schemes.items()},
        "recipe": identity_of(recipe),
        "calibration": data
        and {
            "source": data.source,
            "windows": data.ids_WS.shape[0],
            "sequence_length": data.ids_WS.shape[1],
            "seed": data.seed,
            "sha256": data.sha256,  # the first that differs is named: hashes say least
        },
        "seed": seed,
        "device": device,
        "input_scales": {name: float(scale) for name, scale in input_scales.items()},
        "kv_cache": kv_cache,
        "adapter": adapter and adapter_digest(adapter),
        "versions": tool_versions(),
    }
