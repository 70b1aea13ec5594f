"""What makes digits, to compile: alone, and fused with what comes before a linear."""

from offline import BF16, compile_kernel
from triton import language as tl

from qkernels.attention import merge_splits as attention_merge
from qkernels.operands.limbs import DigitForm
from qkernels.rowwise import limbs
from qkernels.rowwise import norm_act_limbs as fused_digits

SYMMETRIC = DigitForm(bits=4)
ASYMMETRIC = DigitForm(bits=4, with_sums=True)


def making(kernel, form: DigitForm, inputs: dict, num_warps: int, **constants) -> dict:
    sums = "digit_sums_ptr" if "digit_sums_ptr" in kernel.arg_names else "sums_ptr"
    pointers = inputs | {"words_ptr": "*i32", "scales_ptr": "*fp32"}
    if form.with_sums:
        pointers[sums] = "*i32"
    else:
        constants[sums] = None
    constants |= {"FORM": form, "EARLY": True}
    floats = {"eps": "fp32"}
    scalars = {name: floats.get(name, "i32") for name in ("M", "R", "T", "steps", "eps")}
    options = {"num_warps": num_warps, "launch_pdl": True}
    return compile_kernel(kernel, pointers, scalars, constants, options)


def norm(form: DigitForm) -> dict:
    inputs = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "total_ptr"), BF16)
    blocks = {"WHOLE": 4096, "BLOCK": fused_digits.NORM_STEPS}
    return making(fused_digits._rms_norm_digits, form, inputs, 8, **blocks)


def of_steps(kernel, form: DigitForm) -> dict:
    block = limbs.STEPS_OF_BLOCK
    return making(kernel, form, {"x_ptr": BF16}, 1, BLOCK=block)


def merge(form: DigitForm) -> dict:
    inputs = {"partials_ptr": "*fp32", "sums_ptr": "*fp32", "starts_ptr": "*i32"}
    constants = {"DTYPE": tl.bfloat16, "H": 32, "D": 128, "SPLIT": 16}
    return making(attention_merge._merge_to_digits, form, inputs, 2, **constants)


DIGITS = {
    f"{what}, {which}": make
    for which, form in (("symmetric", SYMMETRIC), ("asymmetric", ASYMMETRIC))
    for what, make in {
        "making digits": lambda form=form: of_steps(limbs._input_digits, form),
        "norm to digits": lambda form=form: norm(form),
        "silu to digits": lambda form=form: of_steps(fused_digits._silu_and_mul_digits, form),
        "merge to digits": lambda form=form: merge(form),
    }.items()
}
