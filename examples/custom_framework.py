"""Use your own quantization framework end to end, with this project's layers and files.

    python examples/custom_framework.py examples/models/docs-5m /tmp/docs-5m-mine

It shows three ways: your solver as a recipe, corrected float weights, and finished integer codes.
The written folder passes `qserve inspect` and can be served.
"""

import argparse
import sys

import torch
from torch import nn

from calibrate.calibration.statistics import InputStatistics
from calibrate.pipeline import quantize_checkpoint
from calibrate.recipe import Recipe
from formats.errors import InputError
from formats.in_memory.packed import PackedWeight
from formats.inspection.inspect import inspect_checkpoint
from formats.numerics import affine
from formats.scheme import QuantSpec, Scheme
from qkernels.quant_linear import QuantLinear

SCHEME = "w4a16-sym"


def my_correction(weight_NK: torch.Tensor, hessian_KK: torch.Tensor, spec: QuantSpec):
    """Example algorithm: round, then correct each group for the error of the group before it.

    Returns the corrected float weight, which lies on the grid, and the grid.
    """
    scales_NG, zeros_NG = affine.choose_scales(weight_NK, spec, importance_K=hessian_KK.diagonal())
    length = spec.group_length(weight_NK.shape[1])
    damped_KK = hessian_KK + 0.01 * hessian_KK.diagonal().mean() * torch.eye(len(hessian_KK))
    open_NK = weight_NK.float().clone()
    for begin in range(0, open_NK.shape[1], length):
        end = begin + length
        group = slice(begin // length, begin // length + 1)
        codes = affine.quantize(
            open_NK[:, begin:end], scales_NG[:, group], zeros_NG[:, group], spec
        )
        rounded = affine.dequantize(codes, scales_NG[:, group], zeros_NG[:, group])
        error_NL = open_NK[:, begin:end] - rounded
        open_NK[:, begin:end] = rounded
        rest_KK, cross_LK = damped_KK[end:, end:], damped_KK[begin:end, end:]
        if len(rest_KK):
            open_NK[:, end:] += error_NL @ torch.linalg.solve(rest_KK, cross_LK.t()).t()
    return open_NK, scales_NG, zeros_NG


def my_solver(
    weight_NK: torch.Tensor, stats: InputStatistics | None, spec: QuantSpec, name: str
) -> PackedWeight:
    """Solver with this algorithm; a recipe calls it for every linear."""
    corrected_NK, scales_NG, zeros_NG = my_correction(weight_NK, stats.hessian_KK.cpu(), spec)
    codes_NK = affine.quantize(corrected_NK, scales_NG, zeros_NG, spec)
    return PackedWeight.from_codes(codes_NK, scales_NG, zeros_NG, spec, name)


def in_a_model_of_your_own() -> None:
    """Replace nn.Linear by QuantLinear with finished codes, which are not rounded again."""
    torch.manual_seed(0)
    spec = Scheme.parse(SCHEME).weight
    linear, inputs = nn.Linear(256, 128), torch.randn(512, 256)
    hessian_KK = inputs.t() @ inputs / len(inputs)
    corrected_NK, scales_NG, zeros_NG = my_correction(linear.weight.detach(), hessian_KK, spec)

    codes_NK = affine.quantize(corrected_NK, scales_NG, zeros_NG, spec)
    off_grid = affine.off_grid(corrected_NK, scales_NG, zeros_NG, spec)
    print(f"corrected weights, largest distance from your grid in steps: {off_grid:.1e}")

    mine = QuantLinear.from_codes(codes_NK, scales_NG, scheme=SCHEME, bias=linear.bias)
    again = QuantLinear.from_float(corrected_NK, SCHEME, bias=linear.bias)
    plain = QuantLinear.from_float(linear, SCHEME)
    with torch.no_grad():
        for name, module in (
            ("your codes", mine),
            ("from_float of your weights, which chooses scales anew", again),
            ("from_float of the original", plain),
        ):
            error = (module(inputs) - linear(inputs)).norm() / linear(inputs).norm()
            print(
                f"{name}: {module.off_grid(corrected_NK):.3f} steps from your weights,"
                f" output error {100 * error:.2f} %, state_dict {list(module.state_dict())}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="float model folder")
    parser.add_argument("output", help="folder to write")
    parser.add_argument("--samples", type=int, default=16)
    arguments = parser.parse_args()
    in_a_model_of_your_own()
    report = quantize_checkpoint(
        arguments.model,
        arguments.output,
        scheme=Scheme.parse(SCHEME),
        recipe=Recipe(name="my-correction", solver=my_solver),
        fit_groups=True,
        samples=arguments.samples,
        sequence_length=512,
    )
    print(report.to_text())
    inspection = inspect_checkpoint(arguments.output)
    print(inspection.to_text())
    print(f"now: qserve serve {arguments.output}")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:  # a folder that is not empty, a missing model, ...
        sys.exit(f"custom_framework.py: {error}")
