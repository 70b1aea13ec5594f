"""Settings of `qserve bench quantize`. Loads no torch."""

from dataclasses import dataclass

from formats.names import RECIPES
from qserve.setting import check_settings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeBenchSettings:
    """How much to quantize, and how."""

    layers: int = setting(4, "layers to measure, of 32", low=1)
    samples: int = setting(128, "calibration windows", low=1)
    sequence_length: int = setting(2048, "tokens of a calibration window", low=1)
    recipe: str = setting("gptq", "how codes are chosen", RECIPES)
    scheme: str = setting("w4a16-sym", "numerics of the linear layers")
    device: str = setting(
        "auto",
        "where to compute; auto: the GPU if there is one; all: every GPU that is visible; or some,"
        " such as cuda:0,cuda:1",
    )
    output_json: str | None = setting(None, "file for the result")

    def __post_init__(self) -> None:
        check_settings(self)
