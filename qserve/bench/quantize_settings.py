"""Settings of `qserve bench quantize`. Loads no torch."""

from dataclasses import dataclass

from formats.names import BENCH_SHAPES, RECIPES
from qserve.command_line.setting import check_settings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeBenchSettings:
    """Settings of `qserve bench quantize`: the layers to quantize, and the method."""

    shape: str = setting("llama-3-8b", "model whose layers have the same sizes", BENCH_SHAPES)
    layers: int = setting(4, "number of layers to measure", low=1)
    samples: int = setting(128, "calibration windows", low=1)
    sequence_length: int = setting(2048, "length of a calibration window in tokens", low=1)
    recipe: str = setting("gptq", "quantization method", RECIPES)
    scheme: str = setting("w4a16-sym", "data types of the linear layers")
    device: str = setting(
        "auto",
        "where to compute; auto: the GPU if there is one; all: every visible GPU; or a list "
        "such as cuda:0,cuda:1",
    )
    gpu_memory: float | None = setting(
        None, "GB that PyTorch may reserve on each GPU; needing more is an error", above=0
    )
    output_json: str | None = setting(None, "output file of the result")

    def __post_init__(self) -> None:
        check_settings(self)
