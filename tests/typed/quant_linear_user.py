"""A program for a user's own quantization framework. Type checkers read it; nothing runs it."""

from typing import assert_type

import torch
from torch import nn

from calibrate import quantize_checkpoint
from formats import InputError, PackedWeight, Scheme, save_quantized
from qkernels import QuantLinear, SchemeName, TrainableQuantLinear, explain, replace_linears

NAME: SchemeName = "w4a16-sym"


def one_layer(linear: nn.Linear, codes_NK: torch.Tensor, scales_NG: torch.Tensor) -> torch.Tensor:
    layer = QuantLinear.from_float(linear, NAME)
    assert_type(layer, QuantLinear)
    QuantLinear.from_float(linear.weight, "w4a16-sym-g64", linear.bias)
    own = QuantLinear.from_codes(codes_NK, scales_NG, scheme=Scheme.parse(NAME))
    assert isinstance(own.packed(), PackedWeight)  # 4-bit floats have another type
    own.prepare(torch.bfloat16, "cuda", release=True)
    assert_type(layer.dequantize(), torch.Tensor)
    assert_type(layer.off_grid(linear.weight), float)
    y = layer(torch.randn(2, layer.in_features))
    assert isinstance(y, torch.Tensor)
    return y


def whole_model(model: nn.Module) -> None:
    try:
        names = replace_linears(model, NAME, ignore=["lm_head", "re:.*gate"])
    except InputError as error:
        print(error.subject, error.problem, error.remedy)
        return
    assert_type(names, list[str])


def trained(model: nn.Module, linear: nn.Linear) -> None:
    assert_type(replace_linears(model, NAME, trainable=True, kernel="fixed_order"), list[str])
    layer = TrainableQuantLinear.from_float(linear, "w8a8-fp8", name="layers.0.up")
    assert_type(layer, TrainableQuantLinear)
    y = layer(torch.randn(2, layer.in_features))
    assert isinstance(y, torch.Tensor)


def files(linears: dict[str, QuantLinear]) -> None:
    print(save_quantized("./out", "./model", linears).to_text())
    quantize_checkpoint("./model", "./out", scheme=Scheme.parse("w8a8"), recipe="rtn")
    print(explain("linear", out_features=64, in_features=64))
