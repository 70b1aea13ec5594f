"""GPTQ: round a weight column by column; the remaining columns compensate each error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers"
(2022). The order of the columns is a row of ORDERS (calibrate/solvers/column_order.py).

Legend: N outputs, K inputs, G groups, L inputs of a group, H mean of x x^T [K, K], U upper Cholesky
factor of H^-1, B a block of columns.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from calibrate.calibration.statistics import InputStatistics
from calibrate.solvers.column_order import ORDERS, ColumnOrder, blocks
from calibrate.solvers.refine import refine
from calibrate.solvers.solving import MORE_DATA, SolverError
from formats.gguf.k_quants.grid import nearest_codes
from formats.gguf.k_quants.search import choose_grid
from formats.in_memory.fp4 import Fp4Weight, codes_of, is_fp4, nearest_numbers
from formats.in_memory.k_weight import KWeight, is_k_quant
from formats.in_memory.packed import PackedWeight
from formats.numerics import affine
from formats.numerics.multiples import units_of
from formats.scheme import QuantSpec

# (begin, end) of a block of columns -> (scales, zeros) [B, N]
Grid = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
# Damping: fractions of H's mean diagonal that are added to the diagonal, tried in turn until H can
# be factored. The first one tried is at least K / (number of tokens), `min_damping`, because with
# few tokens a smaller damping fits their noise. Measured on SmolLM2-135M-Instruct (dequantized from
# Q4_1), W4A16 in groups of 64, calibrated on 16 x 512 tokens, mean relative error of the second
# layer's outputs on held-out text: gptq 0.060 with 0.01 and 0.057 with K / tokens; gptaq 0.060
# (worse than gptq) and 0.056 (better).
DAMPING = (0.01, 0.03, 0.1, 0.3, 1.0)
MAX_MIN_DAMPING = 0.3
# GPTAQ moves a weight by this fraction towards the weight that fits the calibration data best. That
# weight shrinks a little in each layer, because its inputs have errors, and it fits noise. Measured
# on SmolLM2-135M-Instruct (dequantized from Q4_1), W4A16 in groups of 64, 8 x 512 tokens,
# perplexity on 4 x 512 tokens of wikitext-2: 34.9 with 0.75, 28.6 with 0.25, 29.3 with 0 (rtn:
# 35.0). Toy models prefer 0.75 (examples/search_correction.py): mean of log(perplexity after /
# before) of docs-5m and docs-29m 0.0481 at 0.25, 0.0438 at 0.75.
CORRECTION = 0.25
# Up to this width a CPU factors in float64: it costs little and helps ill-conditioned inputs.
MAX_DOUBLE_WIDTH = 4096
# Up to this number of bits, each linear is solved in both orders, and the better result is used.
# Output errors of docs-29m's third layer, group-aware compared with static: 2 bits g64, 3 to 5 %
# less; 3 bits g128, 0 to 1 % less in attention, 2 % more in down_proj; 4 bits, equal, so a second
# solution is not worth its time.
MAX_TRIED_BITS = 3
DEFAULT_ORDER = ORDERS["static"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """Column order and Cholesky factor U in that order, shared by all linears of one input."""

    order_K: torch.Tensor
    upper_KK: torch.Tensor  # float32
    damping: float

    @property
    def importance_K(self) -> torch.Tensor:
        """Cost of an error in each column, after later columns have compensated it, [K]."""
        pivots_K = self.upper_KK.diagonal()
        return torch.empty_like(pivots_K).index_copy_(0, self.order_K, 1 / pivots_K.square())


def solve(
    weight_NK: torch.Tensor,
    stats: InputStatistics | None,
    spec: QuantSpec,
    name: str,
    order: ColumnOrder | None = None,
    rounds: int = 0,
) -> PackedWeight | Fp4Weight | KWeight:
    """Quantize one linear's weight for the inputs seen in `stats`.

    `order` None: the default, or for few bits the better of the orders that need no group index.
    `rounds`: rounds of refining integer codes (refine.py) after the paper's algorithm. Raises
    SolverError if no token reached the linear, or if H cannot be factored.
    """
    if stats is None or stats.num_tokens == 0:
        raise SolverError(name, "no calibration token reached it", MORE_DATA)
    if order is None and spec.bits <= MAX_TRIED_BITS:
        orders = [ORDERS[each] for each in ("static", "group-aware")]
        found = [_solve(weight_NK, stats, spec, name, each, rounds) for each in orders]
        return min(found, key=lambda each: _output_error(weight_NK, each, stats))
    return _solve(weight_NK, stats, spec, name, order or DEFAULT_ORDER, rounds)


def _output_error(
    weight_NK: torch.Tensor, found: PackedWeight | Fp4Weight | KWeight, stats: InputStatistics
) -> float:
    difference_NK = weight_NK.float() - found.dequantize()
    return float(stats.squared_error(difference_NK).double().sum())


def _solve(
    weight_NK: torch.Tensor,
    stats: InputStatistics,
    spec: QuantSpec,
    name: str,
    order: ColumnOrder,
    rounds: int,
) -> PackedWeight | Fp4Weight | KWeight:
    """Solve with one column order."""
    length = spec.group_length(weight_NK.shape[1])
    key = f"gptq {order.name} {length}"
    if key not in stats.cache:
        stats.cache[key] = factor(stats.hessian_KK, name, order, length, min_damping(stats))
    shared: Factor = stats.cache[key]
    note = f"damping raised to {shared.damping:.3g}"
    if shared.damping > min_damping(stats) and note not in stats.notes:
        stats.notes.append(note)
    if is_k_quant(spec):
        return _round_blocks(weight_NK, shared, spec, name)
    if is_fp4(spec):
        return _round_numbers(weight_NK, shared, spec, name)
    # Raises if no scales can represent the weights. Late scales start from these.
    scales_NG, zeros_NG = affine.choose_scales(
        weight_NK, spec, name, importance_K=shared.importance_K
    )
    found = round_columns(weight_NK, scales_NG, zeros_NG, shared, spec, order, name)
    if not rounds:
        return found
    key = f"damped by {shared.damping}"
    if key not in stats.cache:
        stats.cache[key] = _damped(stats.hessian_KK, shared.damping)
    return refine(weight_NK, found, stats.cache[key], rounds)


def _damped(hessian_KK: torch.Tensor, damping: float) -> torch.Tensor:
    """Damp H in place and return it. Unlike in `factor`, a dead column gets only the damping."""
    diagonal_K = hessian_KK.diagonal()
    diagonal_K.add_(damping * diagonal_K.mean())
    diagonal_K.masked_fill_(diagonal_K == 0, 1)
    return hessian_KK


def solve_corrected(
    weight_NK: torch.Tensor,
    stats: InputStatistics | None,
    spec: QuantSpec,
    name: str,
    share: float = CORRECTION,
    order: ColumnOrder | None = None,
    rounds: int = 0,
) -> PackedWeight | Fp4Weight | KWeight:
    """GPTQ towards the float model's outputs, for inputs that earlier rounding has changed.

    Li et al., "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration" (2025):
    minimize ||W X' - Q X|| with X' the float model's inputs. Here this takes two steps: move the
    weight by the fraction `share` towards the weight whose outputs for X fit best, then run GPTQ.
    If plain GPTQ is better on held-out windows, its result is used. Raises SolverError as `solve`.
    """
    if stats is None or stats.drift_KK is None or not stats.num_tokens:
        return solve(weight_NK, stats, spec, name, order, rounds)
    key = "gptaq"
    if key not in stats.cache:
        stats.cache[key] = _correction(stats)
    weight_NK = weight_NK.float()
    moved_NK = weight_NK + share * (weight_NK @ stats.cache[key])
    moved = solve(moved_NK, stats, spec, name, order, rounds)
    error = stats.held_out_error(weight_NK, moved.dequantize())
    if error is None:
        return moved
    plain = solve(weight_NK, stats, spec, name, order, rounds)
    return moved if error <= stats.held_out_error(weight_NK, plain.dequantize()) else plain


def _correction(stats: InputStatistics) -> torch.Tensor:
    """Return D (H + damping)^-1 [K, K] with D the mean of (x' - x) x^T, or 0 if H has no factor."""
    damped_KK = stats.moment_KK.to(_dtype(stats.moment_KK), copy=True)
    damped_KK.diagonal().add_(min_damping(stats) * damped_KK.diagonal().mean())
    lower_KK, failed = torch.linalg.cholesky_ex(damped_KK)
    if failed:
        return torch.zeros_like(stats.moment_KK)
    found_KK = torch.cholesky_solve(stats.drift_KK.to(lower_KK.dtype).t(), lower_KK).t()
    return found_KK.float()


def min_damping(stats: InputStatistics) -> float:
    """Return the smallest damping to try. It grows for few tokens, to avoid fitting their noise."""
    return min(max(DAMPING[0], len(stats.moment_KK) / stats.num_tokens), MAX_MIN_DAMPING)


def _dtype(hessian_KK: torch.Tensor) -> torch.dtype:
    """Return the dtype of the factorization."""
    exact = hessian_KK.device.type == "cpu" and len(hessian_KK) <= MAX_DOUBLE_WIDTH
    return torch.float64 if exact else torch.float32


def factor(
    hessian_KK: torch.Tensor,
    name: str = "weight",
    order: ColumnOrder = DEFAULT_ORDER,
    length: int = 1,
    least: float = DAMPING[0],
) -> Factor:
    """Order the columns, damp H and factor its inverse. Raises SolverError if that fails.

    `length`: group size. `least`: the damping that is tried first. An input that is always zero (a
    dead column) gets curvature 1 and no correlation with others: its column is rounded to nearest
    and compensates no errors.
    """
    diagonal_K = hessian_KK.diagonal().to(_dtype(hessian_KK), copy=True)
    diagonal_K[diagonal_K == 0] = 1
    order_K = order.columns(diagonal_K, length)
    # Factor H with reversed columns, H = L L^T. Reversed again, L becomes an upper R with H = R
    # R^T, so H^-1 = U^T U with U = R^-1: H itself is never inverted.
    back_K = order_K.flip(0)
    ordered_KK = hessian_KK[back_K[:, None], back_K].to(diagonal_K.dtype)
    del hessian_KK  # gigabytes for wide layers
    mean = diagonal_K.mean()
    for damping in (least, *(each for each in DAMPING if each > least)):
        ordered_KK.diagonal().copy_(diagonal_K[back_K] + damping * mean)
        lower_KK, failed = torch.linalg.cholesky_ex(ordered_KK)
        if failed:
            continue
        upper_KK = lower_KK.flip(0, 1)
        del lower_KK
        identity_KK = torch.eye(len(order_K), dtype=upper_KK.dtype, device=upper_KK.device)
        upper_KK = torch.linalg.solve_triangular(upper_KK, identity_KK, upper=True)
        if torch.isfinite(upper_KK).all():
            return Factor(order_K=order_K, upper_KK=upper_KK.float(), damping=damping)
    raise SolverError(
        name, f"its Hessian cannot be factored, even with damping {DAMPING[-1]}", MORE_DATA
    )


def round_columns(
    weight_NK: torch.Tensor,
    scales_NG: torch.Tensor,
    zeros_NG: torch.Tensor,
    shared: Factor,
    spec: QuantSpec,
    order: ColumnOrder = DEFAULT_ORDER,
    name: str = "weight",
) -> PackedWeight:
    """Round on the given scales and zeros with the paper's blocked algorithm.

    With late scales, a group's scale is chosen for the updated weights when its first column is
    solved.
    """
    width = weight_NK.shape[1]
    order_K, upper_KK = shared.order_K, shared.upper_KK
    length = spec.group_length(width)
    # group of each column in the order of solving
    group_K = torch.arange(width, device=order_K.device) if order.regroups else order_K
    group_K = group_K // length
    # Columns become rows, so that each step reads and writes contiguous memory.
    open_KN = weight_NK.float().t()[order_K].contiguous()
    if order.late_scales:
        units_N1 = units_of(scales_NG)  # the first scales decide a row's unit
        scales_NG, zeros_NG = scales_NG.clone(), zeros_NG.clone()
        groups = group_K[::length].tolist()
        importance_1K = 1 / upper_KK.diagonal().square()[None]

    def grid(begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        if order.late_scales and begin % length == 0:
            group = groups[begin // length]
            group_N1L = open_KN[begin : begin + length].t()[:, None]
            importance_1L = importance_1K[:, begin : begin + length]
            scale_N1, zero_N1 = affine.search(group_N1L, spec, importance_1L)
            if spec.in_multiples and len(groups) > 1:
                scale_N1, _ = affine.on_multiples(
                    group_N1L, scale_N1, units_N1, spec, importance_1L
                )
            scales_NG[:, group], zeros_NG[:, group] = scale_N1[:, 0], zero_N1[:, 0]
        scale_BN = scales_NG.t()[group_K[begin:end]].float()
        return scale_BN, zeros_NG.t()[group_K[begin:end]].float()

    spans = blocks(width, length, order.late_scales)
    codes_NK = _compensate_(open_KN, upper_KK, spans, grid, spec).t()
    if order.regroups:
        # Sort the columns of a group by their order in the model, as readers of g_idx expect.
        order_GL, place_GL = order_K.view(-1, length).sort(1)
        place_GL += torch.arange(0, width, length, device=order_K.device)[:, None]
        codes_NK, order_K = codes_NK[:, place_GL.flatten()], order_GL.flatten()
        packed = PackedWeight.from_codes(codes_NK, scales_NG, zeros_NG, spec, name)
        in_order = torch.equal(order_K, torch.arange(width, device=order_K.device))
        return packed if in_order else replace(packed, input_order=order_K)
    codes_NK = torch.empty_like(codes_NK).index_copy_(1, order_K, codes_NK)
    return PackedWeight.from_codes(codes_NK, scales_NG, zeros_NG, spec, name)


def _round_blocks(weight_NK: torch.Tensor, shared: Factor, spec: QuantSpec, name: str) -> KWeight:
    """Round on the grid of a K-quant; its quantized scales and minima are chosen first."""
    width, order_K = weight_NK.shape[1], shared.order_K
    chosen = choose_grid(weight_NK, spec, name, shared.importance_K)
    group_K = order_K // chosen.length
    steps_GN, lows_GN = chosen.steps().t(), chosen.lows().t()

    def grid(begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        return steps_GN[group_K[begin:end]], lows_GN[group_K[begin:end]]

    open_KN = weight_NK.float().t()[order_K].contiguous()
    spans = blocks(width, width, late_scales=False)
    codes_NK = _compensate_(open_KN, shared.upper_KK, spans, grid, spec).t()
    return KWeight.from_codes(torch.empty_like(codes_NK).index_copy_(1, order_K, codes_NK), chosen)


def _round_numbers(
    weight_NK: torch.Tensor, shared: Factor, spec: QuantSpec, name: str
) -> Fp4Weight:
    """Round to 4-bit floats; their scales are chosen first."""
    width, order_K = weight_NK.shape[1], shared.order_K
    chosen = Fp4Weight.grid(weight_NK, spec, name, shared.importance_K)
    group_K = order_K // spec.group_size
    steps_GN = chosen.steps().t()

    def grid(begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        steps_BN = steps_GN[group_K[begin:end]]
        return steps_BN, torch.zeros_like(steps_BN)

    open_KN = weight_NK.float().t()[order_K].contiguous()
    spans = blocks(width, width, late_scales=False)
    codes_NK = _compensate_(open_KN, shared.upper_KK, spans, grid, spec).t()
    return chosen.with_codes(torch.empty_like(codes_NK).index_copy_(1, order_K, codes_NK), name)


def _compensate_(
    open_KN: torch.Tensor,
    upper_KK: torch.Tensor,
    spans: Iterable[tuple[int, int]],
    grid: Grid,
    spec: QuantSpec,
) -> torch.Tensor:
    """Round all blocks in `spans` and return the codes [K, N], in the order of solving.

    `open_KN`: the columns, overwritten with compensated values.
    """
    codes_KN = torch.empty_like(open_KN, dtype=torch.uint8)
    rounding = round_block
    if open_KN.is_cuda:
        from calibrate.solvers.triton_block import round_block as rounding  # loads Triton
    for begin, end in spans:
        scale_BN, zero_BN = grid(begin, end)
        upper_BB = upper_KK[begin:end, begin:end]
        codes_BN, errors_BN = rounding(open_KN[begin:end], scale_BN, zero_BN, upper_BB, spec)
        codes_KN[begin:end] = codes_BN
        open_KN[end:].addmm_(upper_KK[begin:end, end:].t(), errors_BN, alpha=-1)
    return codes_KN


def round_block(
    block_BN: torch.Tensor,
    scale_BN: torch.Tensor,
    zero_BN: torch.Tensor,
    upper_BB: torch.Tensor,
    spec: QuantSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a block of columns; return (codes, errors divided by pivots). Overwrites `block_BN`.

    A weight is scale · (code − zero), and for K-quants scale · code − zero. Codes of 4-bit floats
    are defined in formats/in_memory/fp4.py.
    """
    pivot_B, has_minima, is_float = upper_BB.diagonal(), is_k_quant(spec), is_fp4(spec)
    codes_BN, errors_BN = torch.empty_like(block_BN), torch.empty_like(block_BN)
    for i in range(len(block_BN)):
        column_N, scale_N, zero_N = block_BN[i], scale_BN[i], zero_BN[i]
        if has_minima:
            code_N = nearest_codes(column_N, scale_N, zero_N, spec.max_code).float()
            value_N = code_N * scale_N - zero_N
        elif is_float:
            number_N = nearest_numbers(column_N / torch.where(scale_N == 0, 1.0, scale_N))
            code_N = codes_of(number_N) + 8.0 * (number_N < 0)
            value_N = number_N * scale_N
        else:
            code_N = (column_N / scale_N).round_().add_(zero_N).clamp_(0, spec.max_code)
            value_N = (code_N - zero_N) * scale_N
        codes_BN[i] = code_N
        error_N = (column_N - value_N) / pivot_B[i]
        block_BN[i + 1 :].addr_(upper_BB[i, i + 1 :], error_N, alpha=-1)
        errors_BN[i] = error_N
    return codes_BN, errors_BN
