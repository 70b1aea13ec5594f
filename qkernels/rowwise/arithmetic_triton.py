"""Device functions of the row kernels: norms, activations, and the store of a finished row.

The kernels differ only in how they spread rows over programs. All of them call these functions,
which are specialized at compile time by the kinds in spec.py. Legend: C channels.
"""

import triton
import triton.language as tl

from qkernels.operands.codes_triton import encode, scale_of_chunks


@triton.jit
def row_statistics(x, inside, C, eps, KIND: tl.constexpr):
    """Return (mean, 1 / deviation) of a float32 row padded with 0. For RMS norms the mean is 0."""
    if KIND == "rms":
        return 0.0, tl.rsqrt(tl.sum(x * x, 0) / C + eps)
    else:
        mean = tl.sum(x, 0) / C
        centred = tl.where(inside, x - mean, 0.0)
        return mean, tl.rsqrt(tl.sum(centred * centred, 0) / C + eps)


@triton.jit
def normalized(x, mean, inverse, weight, bias, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Return the norm of float32 x in DTYPE from its row's statistics; `bias` may be None.

    An RMS norm also rounds x / rms(x) before it multiplies, unless the weight is float32.
    """
    if KIND == "rms":
        normed = x * inverse
        if weight.dtype != tl.float32:
            normed = normed.to(DTYPE).to(tl.float32)
        return (weight.to(tl.float32) * normed).to(DTYPE)
    else:
        y = (x - mean) * inverse * weight.to(tl.float32)
        if bias is not None:
            y += bias.to(tl.float32)
        return y.to(DTYPE)


@triton.jit
def changed_branch(
    x,
    weight,
    bias,
    inside,
    C,
    KIND: tl.constexpr,
    EPS: tl.constexpr,
    FACTOR: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Apply the branch's norm, if `weight` is not None, and its factor to a float32 row x."""
    if weight is not None:
        mean, inverse = row_statistics(x, inside, C, EPS, KIND)
        x = normalized(x, mean, inverse, weight, bias, KIND, DTYPE).to(tl.float32)
    if FACTOR != 1.0:
        x = (x * FACTOR).to(DTYPE).to(tl.float32)
    return x


@triton.jit
def _over_sigmoid(x, z, APPROXIMATE: tl.constexpr):
    """Return x / (1 + exp(-z)) in float32, approximated in 5 instructions instead of 20."""
    if APPROXIMATE:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [z * -1.4426950408889634], tl.float32, True, 1
        )
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [power + 1], tl.float32, True, 1
        )
        return x * inverse
    else:
        return x / (1 + tl.exp(-z))


@triton.jit
def _activation(x, KIND: tl.constexpr, APPROXIMATE: tl.constexpr):
    """Apply the activation function (ActSpec.kind) to float32 x."""
    if KIND == "silu":
        return _over_sigmoid(x, x, APPROXIMATE)
    elif KIND == "gelu_tanh":
        # 0.5 (1 + tanh(y)) = 1 / (1 + exp(-2 y)), y = sqrt(2 / pi) (x + 0.044715 x^3)
        argument = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        return _over_sigmoid(x, argument, APPROXIMATE)
    elif KIND == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "relu" or KIND == "relu2")
        positive = tl.where(x < 0, 0.0, x)  # propagates NaN
        return positive * positive if KIND == "relu2" else positive


@triton.jit
def _swiglu_oai(
    gate,
    up,
    DTYPE: tl.constexpr,
    APPROXIMATE: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
):
    """Return gate * sigmoid(ALPHA * gate) * (up + 1) in DTYPE, from float32."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    y = _over_sigmoid(gate, ALPHA * gate, APPROXIMATE).to(DTYPE)
    return ((up + 1).to(DTYPE).to(tl.float32) * y.to(tl.float32)).to(DTYPE)


@triton.jit
def activated(
    gate,
    up,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    APPROXIMATE: tl.constexpr,
    LIMIT: tl.constexpr = 0.0,
    ALPHA: tl.constexpr = 1.0,
):
    """Return activation(gate) * up in DTYPE, rounded after each step; without `up` if it is None.

    LIMIT: ActSpec.limit, or 0 for no limit. Clamping keeps NaN.
    """
    if KIND == "swiglu_oai":
        return _swiglu_oai(gate.to(tl.float32), up.to(tl.float32), DTYPE, APPROXIMATE, LIMIT, ALPHA)
    else:
        y = _activation(gate.to(tl.float32), KIND, APPROXIMATE).to(DTYPE)
        if LIMIT > 0:
            wide = y.to(tl.float32)
            y = tl.where(wide > LIMIT, LIMIT, wide).to(DTYPE)
            if up is not None:
                up = up.to(tl.float32)
                up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        if up is not None:
            y = (y.to(tl.float32) * up.to(tl.float32)).to(DTYPE)
        return y


@triton.jit
def store_row(
    y,
    out_ptr,
    offsets,
    mask,
    scale_ptr,  # [] or None: dynamic
    scales_ptr,  # a scale per row; None: y is stored unchanged
    row,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Store a row unchanged, or as 8-bit codes with their scale."""
    if scales_ptr is None:
        tl.store(out_ptr + offsets, y, mask=mask)
    else:
        DYNAMIC: tl.constexpr = scale_ptr is None
        CODE: tl.constexpr = out_ptr.dtype.element_ty
        scale = scale_of_chunks((y,), LARGEST, MIN_SCALE) if DYNAMIC else tl.load(scale_ptr)
        codes = encode(y, scale, SMALLEST, LARGEST, CODE, DYNAMIC, INTERPRETED)
        tl.store(out_ptr + offsets, codes, mask=mask)
        tl.store(scales_ptr + row, scale)
