"""What makes limbs, to compile: alone, and fused with what comes before a linear."""

from offline import BF16, compile_kernel
from triton import language as tl

from qkernels.attention import merge_splits as attention_merge
from qkernels.operands.limbs import LimbForm
from qkernels.rowwise import limbs
from qkernels.rowwise import norm_act_limbs as fused_digits

SYMMETRIC = LimbForm(bits=4)
ASYMMETRIC = LimbForm(bits=4, with_sums=True)


def making(kernel, form: LimbForm, inputs: dict, num_warps: int, **constants) -> dict:
    sums = "digit_sums_ptr" if "digit_sums_ptr" in kernel.arg_names else "sums_ptr"
    pointers = inputs | {"words_ptr": "*i32", "scales_ptr": "*fp32"}
    if form.with_sums:
        pointers[sums] = "*i32"
    else:
        constants[sums] = None
    constants |= {"FORM": form, "PDL": True}
    floats = {"eps": "fp32"}
    scalars = {name: floats.get(name, "i32") for name in ("M", "R", "T", "steps", "eps")}
    options = {"num_warps": num_warps, "launch_pdl": True}
    return compile_kernel(kernel, pointers, scalars, constants, options)


def norm(form: LimbForm) -> dict:
    inputs = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "total_ptr"), BF16)
    blocks = {"WHOLE": 4096, "BLOCK": fused_digits.NORM_STEPS}
    return making(fused_digits._rms_norm_limbs, form, inputs, 8, **blocks)


def of_steps(kernel, form: LimbForm) -> dict:
    block = limbs.STEPS_OF_BLOCK
    return making(kernel, form, {"x_ptr": BF16}, 1, BLOCK=block)


def merge(form: LimbForm) -> dict:
    inputs = {"partials_ptr": "*fp32", "sums_ptr": "*fp32", "starts_ptr": "*i32"}
    constants = {"DTYPE": tl.bfloat16, "H": 32, "D": 128, "SPLIT": 16}
    return making(attention_merge._merge_to_digits, form, inputs, 2, **constants)


LIMBS = {
    f"{what}, {which}": make
    for which, form in (("symmetric", SYMMETRIC), ("asymmetric", ASYMMETRIC))
    for what, make in {
        "making limbs": lambda form=form: of_steps(limbs._to_limbs, form),
        "norm to limbs": lambda form=form: norm(form),
        "silu to limbs": lambda form=form: of_steps(fused_digits._silu_and_mul_limbs, form),
        "merge to limbs": lambda form=form: merge(form),
    }.items()
}
