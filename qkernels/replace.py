"""`replace_linears` quantizes the linears of a torch model in place."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from formats.errors import InputError, SchemeError
from formats.layouts import Layout, why_not
from formats.names import SchemeName
from formats.plan import fits
from formats.quant_config import QuantConfig
from formats.rules import LAYER_NUMBER
from formats.scheme import FIXED_SCHEMES, Scheme
from qkernels.quant_linear import QuantLinear
from qkernels.stored_form import check_storable, stored_layout
from qkernels.trainable_linear import TrainableQuantLinear

HEAD = ("lm_head",)
SHOWN = 5  # names in an error
OTHER_INPUTS = ("vision_config", "audio_config")  # of models whose files have other names
WRITER = "qserve-kit"


def replace_linears(
    model: nn.Module,
    scheme: SchemeName | str | Scheme,
    *,
    ignore: Sequence[str] = HEAD,
    trainable: bool = False,
    kernel: str | None = None,
) -> list[str]:
    """Replace every torch Linear of a model by a QuantLinear, rounded to nearest, in place.

    Returns the names of the replaced layers. Layers that match `ignore` stay in float. An entry is
    a part of a name, a pattern with * or ? for the whole name, or "re:" and a regular expression,
    as in `qserve quantize --ignore`. Subclasses of Linear also stay in float: they may do more than
    multiply. Layers stay on their devices. Until all layers are rounded, the float weights and the
    quantized ones are both in memory.

    A head that is tied to the embedding gets its own codes if `ignore` does not match it. The
    embedding then stays in float, and `model.config.tie_word_embeddings` becomes False.

    `model.config.quantization_config` then describes the tensors, so that `save_pretrained` of a
    text model of transformers writes a checkpoint that servers load. It is not set if the layers'
    format cannot state the scheme (w4a8), nor for experts in one tensor and models with images.

    With `trainable`, layers become TrainableQuantLinear, which rounds the same float parameters at
    each forward: nothing is copied or untied. It also takes schemes that QuantLinear cannot hold,
    such as w8a8-fp8. `kernel` requests a kernel for these layers.

    Raises InputError before any change: for a scheme that QuantLinear cannot hold, layers whose
    shape does not fit the scheme, weights that are not loaded or not finite, and entries of
    `ignore` that match no layer.
    """
    parsed = Scheme.parse(scheme)
    if not isinstance(model, nn.Module):
        found = f"expected a torch module, found {type(model).__name__}"
        raise InputError("model", found, "load it, as with from_pretrained")
    if kernel is not None and not trainable:
        raise InputError("kernel", "is for trainable layers", "call prepare(kernel=) of a layer")
    layout = None if trainable else stored_layout(parsed)
    if layout is not None:
        check_storable(parsed, "replace_linears")
    linears = _linears(model, ignore)
    _check_shapes(linears, parsed, layout)
    made: dict[nn.Module, QuantLinear | TrainableQuantLinear] = {}  # one may have several names
    for name, linear in linears.items():
        if linear in made:
            continue
        weight_NK = _weight(name, linear)
        if trainable:
            layer = TrainableQuantLinear.from_float(linear, parsed, kernel=kernel, name=name)
        else:
            layer = QuantLinear.from_float(weight_NK, parsed, linear.bias, name)
        made[linear] = layer.train(linear.training)
    if not trainable:
        _untie(model, linears)
    for name, linear in linears.items():
        parent, _, local = name.rpartition(".")
        setattr(model.get_submodule(parent), local, made[linear])
    if layout is not None:
        _describe(model, layout)
    return list(linears)


def _describe(model: nn.Module, layout: Layout) -> None:
    """Set `quantization_config`, with which transformers writes config.json, where it is known."""
    config = getattr(model, "config", None)
    if (
        not hasattr(config, "save_pretrained")
        or getattr(config, "quantization_config", None) is not None
        or any(hasattr(config, part) for part in OTHER_INPUTS)
        # experts that transformers stores as one tensor have other names in its files
        or any(each.ndim > 2 and LAYER_NUMBER.search(n) for n, each in model.named_parameters())
    ):
        return
    schemes: dict[str, Scheme | None] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            schemes[name] = module.scheme
        elif isinstance(module, nn.Linear) and LAYER_NUMBER.search(name):
            schemes[name] = None
    if all(each is None or layout.refuses(each) is None for each in schemes.values()):
        config.quantization_config = QuantConfig.of_modules(layout.name, schemes, WRITER).to_dict()


def _linears(model: nn.Module, ignore: Sequence[str]) -> dict[str, nn.Linear]:
    """Return the linears to replace by name; a shared linear appears under each of its names."""
    if (
        isinstance(ignore, str)
        or not isinstance(ignore, Iterable)
        or not all(isinstance(pattern, str) for pattern in ignore)
    ):
        raise InputError(
            "ignore",
            f"expected a list of names, found {ignore!r:.80}",
            "use [name], or [] for none",
        )
    found = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module) is nn.Linear and name
    }
    for pattern in ignore:
        if tuple(ignore) != HEAD and not any(fits(pattern, name) for name in found):
            raise InputError(
                f"ignore {pattern!r}", "fits no linear", f"one of them is {next(iter(found), '')}"
            )
    ignored = {module for name, module in found.items() if any(fits(each, name) for each in ignore)}
    linears = {name: module for name, module in found.items() if module not in ignored}
    if not linears:
        done = sum(isinstance(m, QuantLinear | TrainableQuantLinear) for m in model.modules())
        reason = ": `ignore` fits all of them" if found else " below it"
        remedy = "ignore fewer names" if found else "pass a module that contains torch.nn.Linear"
        if done:
            reason = f": {done} of its layers are quantized already"
            remedy = "load the float model"
        raise InputError(type(model).__name__, f"has no torch Linear to replace{reason}", remedy)
    return linears


def _check_shapes(linears: dict[str, nn.Linear], scheme: Scheme, layout: Layout | None) -> None:
    misfits = []
    for name, linear in linears.items():
        reason = _misfit(linear, scheme, layout)
        if reason is not None:
            misfits.append((name, reason))
    if misfits:
        names = ", ".join(name for name, _ in misfits[:SHOWN])
        others = f" and {len(misfits) - SHOWN} more" if len(misfits) > SHOWN else ""
        raise InputError(
            f"scheme {scheme}",
            f"does not fit {len(misfits)} of {len(linears)} linears ({names}{others}):"
            f" {misfits[0][1]}",
            "name them in `ignore`" + _smaller_groups(linears.values(), scheme, layout),
        )


def _smaller_groups(linears: Iterable[nn.Linear], scheme: Scheme, layout: Layout | None) -> str:
    """Return a remedy with the largest group size that fits all linears; "" if none does."""
    if str(scheme) in FIXED_SCHEMES or scheme.weight.type != "int":
        return ""
    linears = list(linears)
    for size in (64, 32, 16):
        smaller = replace(scheme, weight=replace(scheme.weight, group_size=size))
        if all(_misfit(linear, smaller, layout) is None for linear in linears):
            return f", or give the scheme {smaller}"
    return ""


def _misfit(linear: nn.Linear, scheme: Scheme, layout: Layout | None) -> str | None:
    """Return why a linear's shape does not fit the scheme, or the layout if there is one."""
    shape = linear.out_features, linear.in_features
    if layout is not None:
        return why_not(layout, scheme, *shape)
    try:
        scheme.weight.check_shape("layer", *shape)
    except SchemeError as error:
        return error.problem
    return None


def _weight(name: str, linear: nn.Linear) -> torch.Tensor:
    weight_NK = linear.weight
    if weight_NK.is_meta:
        raise InputError(name, "has no weight yet (meta device)", "load the model first")
    if not torch.isfinite(weight_NK).all():
        raise InputError(name, "its weight has numbers that are not finite", "repair the model")
    return weight_NK


def _untie(model: nn.Module, linears: dict[str, nn.Linear]) -> None:
    """Clear the flag that ties the head, if the head is replaced.

    With the flag, transformers would tie again when the embedding is resized.
    """
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    weight = getattr(embedding, "weight", None)
    if weight is not None and any(linear.weight is weight for linear in linears.values()):
        model.config.tie_word_embeddings = False
