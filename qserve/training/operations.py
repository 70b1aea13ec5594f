"""use_engine_operations: makes a transformers model compute the same bits as the engine.

Then the log probabilities of the trained model equal those of the engine's rollouts exactly, if the
engine runs in batch-invariant mode.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from formats.errors import InputError
from formats.names import SchemeName
from formats.scheme import Scheme
from qkernels import replace_linears
from qkernels.choice import FIXED_ORDER
from qserve.training.attention import NAME, register
from qserve.training.layers import EngineLayerNorm, FixedOrderLinear

ROTARY = "RotaryEmbedding"  # how the names of transformers' rotary classes end
ALIGNMENT = 64  # bytes; alignment of memory that torch allocates on a CPU


def use_engine_operations(
    model: nn.Module,
    scheme: SchemeName | str | Scheme | None = None,
    *,
    ignore: Sequence[str] = ("lm_head",),
) -> list[str]:
    """Change a transformers model in place. Returns the names of the quantized linear layers.

    - Linear layers become TrainableQuantLinear with the scheme. Layers that match `ignore`, and all
      layers if there is no scheme, become float layers with the engine's order of sums.
    - Attention uses the engine's kernel forward, and torch's attention backward.
    - Layer norms use the engine's operation forward, and torch's gradient backward.
    - Rotary embeddings are computed in float32. Positions are counted without padding, if
      `attention_mask` has any.

    All parameters stay the same objects. RMS norms and activations stay those of transformers; on a
    CPU they compute the same bits as the engine's. The model must run in the engine's dtype,
    without autocast. Raises InputError, and changes nothing, if the model is not supported.
    """
    setter = getattr(model, "set_attn_implementation", None)
    rotaries = [
        name for name, each in model.named_modules() if type(each).__name__.endswith(ROTARY)
    ]
    if setter is None or not rotaries:
        raise InputError(
            type(model).__name__,
            "is not a transformers model with rotary embeddings",
            "use qkernels.replace_linears(model, scheme, trainable=True)",
        )
    rounded: list[str] = []
    if scheme is not None:
        rounded = replace_linears(model, scheme, ignore=ignore, trainable=True, kernel=FIXED_ORDER)
    _replace(model, nn.Linear, FixedOrderLinear.from_float)
    _replace(model, nn.LayerNorm, EngineLayerNorm.from_float)
    _align(model)
    for name in rotaries:
        _put(model, name, Float32Rotary(model.get_submodule(name)))
    register()
    setter(NAME)
    model.register_forward_pre_hook(_prepare_call, with_kwargs=True)
    return rounded


class Float32Rotary(nn.Module):
    """Wraps transformers' rotary module: cosines and sines stay float32, instead of x's dtype."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: torch.Tensor, *args: Any, **given: Any) -> Any:
        return self.rotary(x.float(), *args, **given)


def _prepare_call(
    model: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Set position_ids that do not count padding, as in the engine, and disable the KV cache.

    A KV cache would store keys before they are rounded to the activations' dtype.
    """
    given = {**given, "use_cache": False}
    mask_BT = args[1] if len(args) > 1 else given.get("attention_mask")
    positions_BT = args[2] if len(args) > 2 else given.get("position_ids")
    if positions_BT is None:
        if mask_BT is not None and mask_BT.ndim == 2:
            given["position_ids"] = (mask_BT.long().cumsum(-1) - 1).clamp(min=0)
    elif mask_BT is None and (positions_BT.diff(dim=-1) != 1).any():
        raise InputError(
            f"{type(model).__name__} position_ids",
            "start again within a row: packed sequences are not supported",
            "put each sequence in a row of its own, and pass attention_mask",
        )
    return args, given


@torch.no_grad()
def _align(model: nn.Module) -> None:
    """Move CPU parameters to aligned addresses. In a mapped file they may be unaligned.

    On a CPU, the order of sums in a product depends on the alignment.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % ALIGNMENT:
            parameter.data = parameter.data.clone()


def _replace(model: nn.Module, kind: type[nn.Module], make: Callable[[Any], nn.Module]) -> None:
    """Replace the modules of exactly this class. A shared module stays shared."""
    found = {
        name: each
        for name, each in model.named_modules(remove_duplicate=False)
        if type(each) is kind
    }
    made = {each: make(each) for each in found.values()}
    for name, module in found.items():
        _put(model, name, made[module])


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, local = name.rpartition(".")
    setattr(model.get_submodule(parent), local, module)
