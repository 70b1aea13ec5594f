"""The operations that a model calls: each checks its arguments, then runs a kernel.

Knows no kernel. Legend: M rows of x, K inputs, N outputs, G groups, T tokens of a step, R requests,
H query heads, J KV heads, D head dim, P pages, B tokens of a page, X pages of a block table, C
channels, I intermediate size, S sampled rows, V vocabulary, W rows of the history table. On a GPU
no operation waits for the device, so all may be captured in a CUDA graph (the plain torch
`paged_attention`, taken where triton is missing, is the one exception).
"""

import math
from dataclasses import replace

import torch

from formats.scheme import ActivationSpec
from formats.weights import Weight
from qkernels import dispatch
from qkernels.attention_tiles import ATTENTION_FEW_ROWS
from qkernels.checks import (
    CODE_DTYPES,
    can_copy_in_bulk,
    check_dense_heads,
    check_digit_rows,
    check_float,
    check_heads_in_parts,
    check_kv_write,
    check_linear,
    check_quantized,
    check_rope,
    check_scales,
    check_tensor,
    expect_ndim,
)
from qkernels.digits import DigitForm, Digits
from qkernels.errors import KernelError
from qkernels.partial_sums import LinearOutput
from qkernels.prepared import PreparedWeight
from qkernels.sample_settings import MAX_LOGPROBS, NUM_WORDS, Samples, SampleSettings
from qkernels.supports import FLOAT_DTYPES, Problem


def prepare_weight(
    packed: Weight,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    kernel: str | None = None,
) -> PreparedWeight:
    """Make one kernel's private copy of a weight. Pure: `packed` is untouched.

    `dtype` is the activations'; `device` None means the weight's own. `kernel` names a row of
    qkernels.dispatch instead of the best one. Raises KernelError where that row cannot run.
    """
    device = packed.device if device is None else torch.device(device)
    if dtype not in FLOAT_DTYPES:
        raise KernelError("weight", f"expected a float dtype of activations, found {dtype}")
    problem = Problem(
        device=device.type,
        dtype=dtype,
        requested=kernel,
        spec=packed.spec,
        out_features=packed.out_features,
        in_features=packed.in_features,
        activation=packed.activation,
    )
    row = dispatch.choose("linear", problem)
    order = packed.input_order
    if order is not None:  # kernels see sorted inputs; `linear` sorts x
        packed, order = replace(packed, input_order=None), order.to(device)
    prepared = dispatch.linear_module(row.name).prepare_weight(packed, dtype, device)
    return replace(prepared, input_order=order, activation=packed.activation)


def linear(
    x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., K] times the weight's transpose, plus bias [N]: [..., N]."""
    check_linear(x, weight, bias)
    return dispatch.linear_module(weight.kernel).linear(weight.sorted_inputs(x), weight, bias)


def quantize_input(
    x_MK: torch.Tensor,
    activation: ActivationSpec,
    scale: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x [M, K] to (codes [M, K], scales [M, S] float32), as `linear` rounds its input.

    Codes are int8 or float8_e4m3fn. `scale` [] float32 is that of a static activation, else None.
    `kernel` names a row of qkernels.dispatch instead of the best one.
    """
    check_quantized("quantize_input", x_MK, activation, scale)
    return _run_quantized("quantize_input", x_MK, x_MK.shape[1], activation, kernel)(
        x_MK, activation, scale
    )


def quantize_input_asymmetric(
    x_MK: torch.Tensor, kernel: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round x [M, K] to int8 codes that span each row's values, from the least to the largest.

    Returns (codes [M, K], scales [M, 1] float32, zeros [M, 1] int32): x is about scale * (code -
    zero), and 0 is exact. For `linear_codes`.
    """
    check_float("quantize_input_asymmetric x", x_MK)
    expect_ndim("quantize_input_asymmetric x", x_MK, 2)
    run = dispatch.implementation(
        "quantize_input_asymmetric",
        device=x_MK.device.type,
        dtype=x_MK.dtype,
        requested=kernel,
        in_features=x_MK.shape[1],
    )
    return run(x_MK)


def rms_norm_quantize(
    x_MC: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    activation: ActivationSpec,
    scale: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_input(rms_norm(x)) of x [M, C], in one pass."""
    op = "rms_norm_quantize"
    check_quantized(op, x_MC, activation, scale)
    check_tensor(f"{op} weight", weight_C, x_MC.shape[-1:], (x_MC.dtype,), x_MC)
    run = _run_quantized(op, x_MC, x_MC.shape[1], activation, kernel)
    return run(x_MC, weight_C, eps, activation, scale)


def add_rms_norm_quantize(
    x_MC: LinearOutput,
    residual_MC: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    activation: ActivationSpec,
    scale: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (*quantize_input(rms_norm(x + residual)), x + residual), all new."""
    op = "add_rms_norm_quantize"
    check_quantized(op, x_MC, activation, scale, parts=True)
    check_tensor(f"{op} residual", residual_MC, x_MC.shape, (x_MC.dtype,), x_MC)
    check_tensor(f"{op} weight", weight_C, x_MC.shape[-1:], (x_MC.dtype,), x_MC)
    run = _run_quantized(op, x_MC, x_MC.shape[1], activation, kernel)
    return run(x_MC, residual_MC, weight_C, eps, activation, scale)


def silu_and_mul_quantize(
    x_M2I: torch.Tensor,
    activation: ActivationSpec,
    scale: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_input(silu_and_mul(x)) of x [M, 2 I], gate beside up, in one pass."""
    op = "silu_and_mul_quantize"
    check_quantized(op, x_M2I, activation, scale)
    if x_M2I.shape[1] % 2:
        raise KernelError(f"{op} x", f"expected an even last dim, found {list(x_M2I.shape)}")
    run = _run_quantized(op, x_M2I, x_M2I.shape[1] // 2, activation, kernel)
    return run(x_M2I, activation, scale)


def linear_codes(
    codes_MK: torch.Tensor,
    scales_M1: torch.Tensor,
    weight: PreparedWeight,
    bias: torch.Tensor | None = None,
    zeros_M1: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear` of an input that is codes already, [M, K] with scales [M, 1] float32: [M, N].

    `zeros` [M, 1] int32 are those of quantize_input_asymmetric, for int8 alone.
    For what quantizes beside other work. Takes weights that a row for 8-bit activations or the
    `reference` row prepared, with one input scale for each row of x; returns the weight's
    activation dtype.
    """
    if weight.activation is None or weight.activation.per == "group":
        raise KernelError("linear_codes weight", "expected one with 8-bit inputs, scaled by row")
    wanted = CODE_DTYPES[weight.activation.type]
    check_tensor("linear_codes codes", codes_MK, (None, weight.in_features), (wanted,), codes_MK)
    if codes_MK.device != weight.device:
        raise KernelError(
            "linear_codes codes", f"expected them on {weight.device}, found {codes_MK.device}"
        )
    rows = codes_MK.shape[0]
    check_tensor("linear_codes scales", scales_M1, (rows, 1), (torch.float32,), codes_MK)
    if bias is not None:
        check_tensor("linear_codes bias", bias, (weight.out_features,), (weight.dtype,), codes_MK)
    if zeros_M1 is not None:
        if weight.activation.type != "int":
            raise KernelError("linear_codes zeros", "expected None for float8 codes")
        check_tensor("linear_codes zeros", zeros_M1, (rows, 1), (torch.int32,), codes_MK)
    module = dispatch.linear_module(weight.kernel)
    return module.linear_codes(weight.sorted_inputs(codes_MK), scales_M1, weight, bias, zeros_M1)


def rms_norm(x: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm of x [..., C] over its last dim, times weight [C]; float32 inside."""
    check_float("rms_norm x", x)
    check_tensor("rms_norm weight", weight_C, x.shape[-1:], (x.dtype,), x)
    return _run("rms_norm", x)(x, weight_C, eps)


def add_rms_norm(
    x: LinearOutput, residual: torch.Tensor, weight_C: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (rms_norm(x + residual), x + residual), both new."""
    check_float("add_rms_norm x", x, parts=True)
    check_tensor("add_rms_norm residual", residual, x.shape, (x.dtype,), x)
    check_tensor("add_rms_norm weight", weight_C, x.shape[-1:], (x.dtype,), x)
    return _run("add_rms_norm", x)(x, residual, weight_C, eps)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for x [..., 2 I], gate beside up: [..., I]."""
    check_float("silu_and_mul x", x)
    if x.shape[-1] % 2:
        raise KernelError("silu_and_mul x", f"expected an even last dim, found {list(x.shape)}")
    return _run("silu_and_mul", x)(x)


def apply_rope(
    q_THD: torch.Tensor,
    k_TJD: torch.Tensor,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their positions; both results are new.

    `cos_sin` [max position, width] holds cos in its first half and sin in its second, float32;
    `width` may be less than D, then the other channels pass through. Channels c and c + width/2
    make a pair.
    """
    check_rope("apply_rope", q_THD, k_TJD, cos_sin, positions_T)
    return _run("apply_rope", q_THD)(q_THD, k_TJD, cos_sin, positions_T)


def write_kv_(
    k_TJD: torch.Tensor,
    v_TJD: torch.Tensor,
    k_pages_PBJD: torch.Tensor,
    v_pages_PBJD: torch.Tensor,
    slots_T: torch.Tensor,
    k_scales_PBJ: torch.Tensor | None = None,
    v_scales_PBJ: torch.Tensor | None = None,
    *,
    static_scales: bool = False,
) -> None:
    """Write keys and values into their slots of the pages, in place.

    slot = page * B + offset; a token whose slot is -1 is padding and written nowhere. Slots differ.

    Pages hold k's dtype, or codes: int8 or float8_e4m3fn, with a float32 scale for each slot and
    KV head. A row's scale is its largest magnitude over the largest code, and is written beside it;
    with `static_scales` the scales are there already, and rows are rounded with them. Scales have
    any strides: one for all slots is `scale.expand(P, B, J)`.
    """
    op = "write_kv_"
    check_kv_write(op, k_TJD, v_TJD, k_pages_PBJD, v_pages_PBJD, slots_T)
    check_scales(op, k_TJD, k_pages_PBJD, k_scales_PBJ, v_scales_PBJ)
    _run_pages(op, k_TJD, k_pages_PBJD)(
        k_TJD,
        v_TJD,
        k_pages_PBJD,
        v_pages_PBJD,
        slots_T,
        k_scales_PBJ,
        v_scales_PBJ,
        static_scales=static_scales,
    )


def rope_write_kv_(
    q_THD: LinearOutput,
    k_TJD: LinearOutput,
    v_TJD: LinearOutput,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
    k_pages_PBJD: torch.Tensor,
    v_pages_PBJD: torch.Tensor,
    slots_T: torch.Tensor,
    k_scales_PBJ: torch.Tensor | None = None,
    v_scales_PBJ: torch.Tensor | None = None,
    *,
    static_scales: bool = False,
    q_norm_D: torch.Tensor | None = None,
    k_norm_D: torch.Tensor | None = None,
    eps: float = 0.0,
    settled: bool = False,
) -> torch.Tensor:
    """apply_rope, then write_kv_ of the rotated keys, in one pass. Returns the rotated queries.

    With `q_norm_D` and `k_norm_D`, rms_norm over each head comes first. `settled` says that
    `positions` and `slots` were complete before the kernel in front of this one began, so that
    they may be read while it still runs.
    """
    op = "rope_write_kv_"
    check_heads_in_parts(op, q_THD, k_TJD, v_TJD)
    check_rope(op, q_THD, k_TJD, cos_sin, positions_T, parts=True)
    check_kv_write(op, k_TJD, v_TJD, k_pages_PBJD, v_pages_PBJD, slots_T, parts=True)
    check_scales(op, k_TJD, k_pages_PBJD, k_scales_PBJ, v_scales_PBJ)
    if (q_norm_D is None) != (k_norm_D is None):
        raise KernelError(f"{op} norms", "expected one for q and one for k, or none")
    if q_norm_D is not None:
        for name, norm in (("q_norm", q_norm_D), ("k_norm", k_norm_D)):
            check_tensor(f"{op} {name}", norm, q_THD.shape[-1:], (q_THD.dtype,), q_THD)
    return _run_pages(op, q_THD, k_pages_PBJD)(
        q_THD,
        k_TJD,
        v_TJD,
        cos_sin,
        positions_T,
        k_pages_PBJD,
        v_pages_PBJD,
        slots_T,
        k_scales_PBJ,
        v_scales_PBJ,
        static_scales=static_scales,
        q_norm_D=q_norm_D,
        k_norm_D=k_norm_D,
        eps=eps,
        settled=settled,
    )


def paged_attention(
    q_THD: torch.Tensor,
    k_pages_PBJD: torch.Tensor,
    v_pages_PBJD: torch.Tensor,
    block_tables_RX: torch.Tensor,
    query_starts_R1: torch.Tensor,
    context_lengths_R: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    max_query_len: int,
    max_context_len: int,
    soft_cap: float | None = None,
    k_scales_PBJ: torch.Tensor | None = None,
    v_scales_PBJ: torch.Tensor | None = None,
    digits: DigitForm | None = None,
    settled: bool = False,
) -> torch.Tensor | Digits:
    """Causal attention of every request's query rows over its paged keys: [T, H, D].

    block_tables  [R, X] int32: the pages of each request, in order
    query_starts  [R + 1] int32: request r has the rows query_starts[r] .. query_starts[r + 1]
    context_lengths [R] int32: keys that the request's last row sees, itself included
    window        a row sees itself and the window - 1 keys before it; None: all before it
    soft_cap      scores become soft_cap * tanh(score / soft_cap), as in Gemma 2
    k_scales, v_scales  [P, B, J] float32: of int8 or float8_e4m3fn pages, as write_kv_ leaves them
    max_query_len, max_context_len  upper bounds that the host knows, so that nothing is read back
    digits        return input_digits of the result [T, H D] instead, for the linear that follows
    settled       query_starts and context_lengths were complete before the kernel in front of this
                  one began: they may be read while it still runs

    Row i of `count` stands at position context_length - count + i; its key must be in the pages
    already. Rows beyond the last request are unspecified on a GPU; rows that see nothing are zero.
    """
    check_float("paged_attention q", q_THD)
    _, heads, head_dim = expect_ndim("paged_attention q", q_THD, 3)
    pages_shape = (None, None, None, head_dim)
    dtypes = (q_THD.dtype, *CODE_DTYPES.values())
    check_tensor("paged_attention k_pages", k_pages_PBJD, pages_shape, dtypes, q_THD)
    v_dtypes = (k_pages_PBJD.dtype,)
    check_tensor("paged_attention v_pages", v_pages_PBJD, k_pages_PBJD.shape, v_dtypes, q_THD)
    check_scales("paged_attention", q_THD, k_pages_PBJD, k_scales_PBJ, v_scales_PBJ)
    for name, pages in (("k_pages", k_pages_PBJD), ("v_pages", v_pages_PBJD)):
        check_dense_heads(f"paged_attention {name}", pages)
    if k_pages_PBJD.shape[2] == 0 or heads % k_pages_PBJD.shape[2]:
        raise KernelError(
            "paged_attention q",
            f"expected heads divisible by the {k_pages_PBJD.shape[2]} KV heads, found {heads}",
        )
    if digits is not None:
        check_digit_rows("paged_attention q", q_THD, heads * head_dim, digits)
    requests = context_lengths_R.shape[0]
    int32 = (torch.int32,)
    check_tensor("paged_attention block_tables", block_tables_RX, (requests, None), int32, q_THD)
    check_tensor("paged_attention query_starts", query_starts_R1, (requests + 1,), int32, q_THD)
    check_tensor("paged_attention context_lengths", context_lengths_R, (requests,), int32, q_THD)
    if window is not None and window < 1:
        raise KernelError("paged_attention window", f"expected None or at least 1, found {window}")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise KernelError(
            "paged_attention soft_cap", f"expected None or a number above 0, found {soft_cap}"
        )
    if max_context_len > block_tables_RX.shape[1] * k_pages_PBJD.shape[1]:
        raise KernelError(
            "paged_attention max_context_len",
            f"{max_context_len} keys do not fit in {block_tables_RX.shape[1]} pages"
            f" of {k_pages_PBJD.shape[1]}",
        )
    chunk = heads // k_pages_PBJD.shape[2] * max_query_len > ATTENTION_FEW_ROWS
    run = dispatch.implementation(
        "paged_attention",
        device=q_THD.device.type,
        dtype=q_THD.dtype,
        head_dim=head_dim,
        page_size=k_pages_PBJD.shape[1],
        pages_dtype=k_pages_PBJD.dtype,
        soft_cap=soft_cap is not None,
        chunk=chunk,
        bulk_pages=not chunk or can_copy_in_bulk(k_pages_PBJD, v_pages_PBJD),
    )
    return run(
        q_THD,
        k_pages_PBJD,
        v_pages_PBJD,
        block_tables_RX,
        query_starts_R1,
        context_lengths_R,
        scale=scale,
        window=window,
        max_query_len=max_query_len,
        max_context_len=max_context_len,
        soft_cap=soft_cap,
        k_scales_PBJ=k_scales_PBJ,
        v_scales_PBJ=v_scales_PBJ,
        digits=digits,
        settled=settled,
    )


def sample_(
    logits_SV: torch.Tensor,
    settings: SampleSettings,
    history_WV: torch.Tensor | None = None,
    kernel: str | None = None,
) -> Samples:
    """Draw a token from each row of logits [S, V], as `settings` says (sample_settings.py).

    `settings` are on the logits' device. `history` [W, V] int32 holds, for each row with penalties,
    2 * (times in the output) + (in the prompt) of every token; drawn tokens are added in place. A
    row's draw depends on nothing but that row. INVALID_TOKEN stands for a row that holds NaN.
    `kernel` names a row of qkernels.dispatch instead of the best one.
    """
    check_float("sample_ logits", logits_SV)
    rows, vocabulary = expect_ndim("sample_ logits", logits_SV, 2)
    if not 0 < vocabulary < 2**31 - 1:
        raise KernelError("sample_ logits", f"expected at least one column, found {vocabulary}")
    int64 = (torch.int64,)
    check_tensor("sample_ settings", settings.words_SP, (rows, NUM_WORDS), int64, logits_SV)
    check_tensor("sample_ bias", settings.bias_E, (None,), int64, logits_SV)
    if settings.num_logprobs > MAX_LOGPROBS:
        found = settings.num_logprobs
        raise KernelError("sample_ num_logprobs", f"expected at most {MAX_LOGPROBS}, found {found}")
    if history_WV is not None:
        check_tensor("sample_ history", history_WV, (None, vocabulary), (torch.int32,), logits_SV)
        if not history_WV.is_contiguous():
            raise KernelError("sample_ history", "expected a contiguous table")
    run = dispatch.implementation(
        "sample_", device=logits_SV.device.type, dtype=logits_SV.dtype, requested=kernel
    )
    return run(logits_SV, settings, history_WV)


def _run(op: str, x: LinearOutput):
    return dispatch.implementation(op, device=x.device.type, dtype=x.dtype)


def _run_quantized(
    op: str, x: LinearOutput, inputs: int, activation: ActivationSpec, kernel: str | None
):
    return dispatch.implementation(
        op,
        device=x.device.type,
        dtype=x.dtype,
        requested=kernel,
        activation=activation,
        in_features=inputs,
    )


def _run_pages(op: str, x_THD: LinearOutput, pages_PBJD: torch.Tensor):
    return dispatch.implementation(
        op,
        device=x_THD.device.type,
        dtype=x_THD.dtype,
        head_dim=x_THD.shape[-1],
        page_size=pages_PBJD.shape[1],
        pages_dtype=pages_PBJD.dtype,
    )
