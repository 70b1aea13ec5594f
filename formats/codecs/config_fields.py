"""Method-independent content of a quantization block."""

from dataclasses import dataclass

from formats.rules import Rule
from formats.scheme import Scheme

BLOCK = "quantization_config"  # its key in config.json
EMBEDDING = "model.embed_tokens"  # module name of the input embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFields:
    """Fields of a QuantConfig. A module that no rule matches has `scheme`."""

    scheme: Scheme | None  # None: no linear is quantized, only the KV cache
    rules: tuple[Rule, ...] = ()  # the first that matches a module decides
    zeros: str = ""  # "v1" or "v2", as a GPTQ label says; empty for other methods
    lm_head: bool = False  # the head is quantized too
    act_order: bool = False  # act-order: inputs may not be grouped in order
    kv_cache: str | None = None  # "int8" or "fp8": layers have k_scale and v_scale for such a cache
    kv_per_head: bool = False  # each KV head has its own k_scale and v_scale
    quantizer: str = ""  # "tool:version" of the writer
    layout: str = ""  # layout of the tensors, a row of formats/layouts.py
    # input rounding that is not applied here; empty: inputs are rounded as the file says
    unrounded_inputs: str = ""
