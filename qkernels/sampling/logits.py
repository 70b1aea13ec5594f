"""Device functions of the sampling kernels: adjust a row's logits, and draw its noise.

Values are rounded at the same points as in sampling/reference.py. `words` are a row's settings as
sampling/words.py packs them.
"""

import triton
import triton.language as tl

from qkernels.gpu.device import INTERPRETED
from qkernels.sampling.reference import GOLDEN, MIN_TEMPERATURE, MIX_1, MIX_2
from qkernels.sampling.words import BIAS_END, BIAS_START, NUMBERS

if not INTERPRETED:
    from triton.language.extra import libdevice
else:
    libdevice = None  # the interpreter's log is exact, and it has no libdevice


_WORD = {name: tl.constexpr(index) for index, name in enumerate(NUMBERS)}
TEMPERATURE, TOP_P, MIN_P = _WORD["temperature"], _WORD["top_p"], _WORD["min_p"]
PRESENCE, FREQUENCY = _WORD["presence_penalty"], _WORD["frequency_penalty"]
REPETITION, TOP_K = _WORD["repetition_penalty"], _WORD["top_k"]
SEED, POSITION = _WORD["seed"], _WORD["position"]
HISTORY_ROW, MASK_START = _WORD["history_row"], _WORD["mask_start"]
_BIAS_START, _BIAS_END = tl.constexpr(BIAS_START), tl.constexpr(BIAS_END)
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_MIX_1, _MIX_2, _GOLDEN = tl.constexpr(MIX_1), tl.constexpr(MIX_2), tl.constexpr(GOLDEN)


@triton.jit
def number(words_ptr, INDEX: tl.constexpr):
    """Load one of a row's float settings."""
    return tl.load(words_ptr + INDEX).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def filters(words_ptr):
    top_p, min_p = number(words_ptr, TOP_P), number(words_ptr, MIN_P)
    return tl.load(words_ptr + TOP_K), top_p, min_p


@triton.jit
def settings_of(words_ptr):
    """Load a row's settings together, so that their latencies overlap."""
    return (
        number(words_ptr, TEMPERATURE),
        number(words_ptr, PRESENCE),
        number(words_ptr, FREQUENCY),
        number(words_ptr, REPETITION),
        tl.load(words_ptr + HISTORY_ROW),
        tl.load(words_ptr + _BIAS_START).to(tl.int32),
        tl.load(words_ptr + _BIAS_END).to(tl.int32),
        tl.load(words_ptr + MASK_START).to(tl.int32),
    )


@triton.jit
def adjust(x, token, valid, settings, bias_ptr, history_ptr, V):
    """Apply bias, mask, penalties and temperature, rounding where sampling/reference.py rounds."""
    temperature, presence, frequency, repetition, row, start, end, mask = settings
    for i in range(start, end):
        entry = tl.load(bias_ptr + i)
        value = entry.to(tl.int32).to(tl.float32, bitcast=True)
        x = tl.where(token == (entry >> 32).to(tl.int32), x + value, x)
    x = tl.where(x != x, float("-inf"), x)
    if mask >= 0:
        halves_ptr = bias_ptr.to(tl.pointer_type(tl.int32)) + 2 * mask
        half = tl.load(halves_ptr + (token >> 5), mask=valid, other=0)
        x = tl.where(((half >> (token & 31)) & 1) != 0, x, float("-inf"))
    if row >= 0:
        history = tl.load(history_ptr + row * V + token, mask=valid, other=0)
        repeated = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
        x = tl.where(history > 0, repeated, x)
        count = (history >> 1).to(tl.float32)
        x -= frequency * count
        x -= tl.where(count > 0, presence, 0.0)
    if temperature > 0:
        x = tl.div_rn(x, tl.maximum(temperature, _MIN_TEMPERATURE) + tl.zeros_like(x))
    return x


@triton.jit
def weight(x, largest):
    """Return exp(x - largest), or 1 if both are infinite."""
    return tl.exp(tl.where(x == largest, 0.0, x - largest))


@triton.jit
def log(x, INTERPRETED: tl.constexpr):
    """Return the logarithm. tl.log is off by 2^-22 near 1, where the largest noise comes from."""
    if INTERPRETED:
        return tl.log(x)
    return libdevice.log(x)


@triton.jit
def mix(x):
    """Compute one step of splitmix64 on int64."""
    x = x + _GOLDEN
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def key_of(words_ptr):
    """Return the key of a row's noise, made of its seed and position."""
    return mix(mix(tl.load(words_ptr + SEED)) + tl.load(words_ptr + POSITION))


@triton.jit
def noise(token, key, INTERPRETED: tl.constexpr):
    """Return Gumbel noise, which depends on seed, position and token id."""
    bits = mix(key + token.to(tl.int64) * _GOLDEN)
    uniform = (((bits >> 41) & 0x7FFFFF).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -log(-log(uniform, INTERPRETED), INTERPRETED)


@triton.jit
def order(x):
    """Convert floats to uint32 numbers that sort like the floats; 0.0 and -0.0 become equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)
