"""Identity of a run: everything that determines the bytes of its layers.

A run resumes from the finished layers of an earlier run with the same identity. Weights outside of
layers are hashed here. The weights of a layer are hashed when the run reads the layer, so the
journal stores one digest per finished layer, next to this identity.
"""

import json
from collections.abc import Mapping
from typing import Any

from calibrate.calibration.adapter import adapter_digest
from calibrate.digest import combined
from calibrate.recipe import Recipe, identity_of
from calibrate.results.report import tool_versions
from calibrate.texts.data import CalibrationData
from formats.peft.lora import LoraAdapter
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
    all_experts: bool = False,
) -> dict[str, Any]:
    """Return model, settings, data and versions, each under the name that error messages use.

    `config`: the model's config.json. `outer_digest`: digest of the tensors outside of layers.
    """
    return {
        "model": combined([json.dumps(config, sort_keys=True), outer_digest]),
        "schemes": {name: str(scheme) for name, scheme in schemes.items()},
        "recipe": identity_of(recipe),
        "calibration": data and data.facts(),
        "seed": seed,
        "device": device,
        "input_scales": {name: float(scale) for name, scale in input_scales.items()},
        "kv_cache": kv_cache,
        "adapter": adapter and adapter_digest(adapter),
        "moe_calibrate_all_experts": all_experts,
        "versions": tool_versions(),
    }
