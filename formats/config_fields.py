"""What a quantization block says of a checkpoint's linears, whatever its method's keys are."""

from dataclasses import dataclass

from formats.rules import Rule
from formats.scheme import Scheme

BLOCK = "quantization_config"  # its key in config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFields:
    """A module that no rule fits has `scheme`."""

    scheme: Scheme | None  # None: no linear is quantized, the block is about the KV cache alone
    rules: tuple[Rule, ...] = ()  # the first that fits a module decides
    zeros: str = ""  # "v1" or "v2", as a GPTQ label says; empty elsewhere
    lm_head: bool = False  # the head is quantized too
    act_order: bool = False  # inputs may not be grouped in order
    kv_cache: str | None = None  # "int8" or "fp8": layers have k_scale and v_scale for such a cache
    kv_per_head: bool = False  # each KV head has a k_scale and a v_scale
    quantizer: str = ""  # "tool:version" of the writer
    layout: str = ""  # what the tensors are called, a row of formats/layouts.py
    # how the file rounds inputs, where that is read as 16-bit inputs; empty: it is done as it says
    unrounded_inputs: str = ""
