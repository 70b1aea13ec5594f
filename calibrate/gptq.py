"""GPTQ: round a weight column by column, and let the columns still open make up for the error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers"
(2022). The order of the columns is a row of ORDERS (calibrate/column_order.py).

Legend: N outputs, K inputs, G groups, L inputs of a group, H mean of x x^T [K, K], U upper Cholesky
factor of H^-1, B a block of columns.
"""

from dataclasses import dataclass, replace

import torch

from calibrate.column_order import ORDERS, ColumnOrder, blocks
from calibrate.solving import SolverError
from calibrate.statistics import InputStatistics
from formats import affine
from formats.packed import PackedWeight
from formats.scheme import QuantSpec

# Added to H's diagonal as a share of its mean. Each is tried until H can be factored.
DAMPING = (0.01, 0.03, 0.1, 0.3, 1.0)
# Share of the way to the weight that fits the calibration data best; all of it fits its noise too.
# Chosen without the held-out windows (examples/search_correction.py): mean of log(perplexity after
# / before) of docs-5m and docs-29m, seeds 0 to 5, judged on kept out calibration texts and on
# wikitext-2: 0.0481 at 0.25, 0.0439 at 0.5, 0.0438 at 0.75.
CORRECTION = 0.75
# Below this width a CPU factors in float64: it costs little, and badly conditioned inputs gain.
MAX_DOUBLE_WIDTH = 4096
# On grids as coarse as this, each linear is solved in both orders and gets the better one. Output
# errors of docs-29m's third layer, group-aware against static: 2 bits g64, 3 to 5 % less; 3 bits
# g128, 0 to 1 % less in the attention, 2 % more in down_proj; 4 bits, the same: not worth a
# second solution.
MAX_TRIED_BITS = 3
DEFAULT_ORDER = ORDERS["static"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """What all linears of one input share: the order of the columns, and U for that order."""

    order_K: torch.Tensor
    upper_KK: torch.Tensor  # float32
    damping: float

    @property
    def importance_K(self) -> torch.Tensor:
        """What an error of each input costs once those after it have made up for it."""
        pivots_K = self.upper_KK.diagonal()
        return torch.empty_like(pivots_K).index_copy_(0, self.order_K, 1 / pivots_K.square())


def solve(
    weight_NK: torch.Tensor,
    stats: InputStatistics | None,
    spec: QuantSpec,
    name: str,
    order: ColumnOrder | None = None,
) -> PackedWeight:
    """Quantize one linear's weight for the inputs seen in `stats`; `order` None: the
    best that keeps groups as they stand.

    Raises SolverError where the inputs do not determine a solution: none, or H cannot be factored.
    """
    if stats is None or stats.num_tokens == 0:
        raise SolverError(name, "no calibration token reached it")
    if order is None and spec.bits <= MAX_TRIED_BITS:
        found = [_solve(weight_NK, stats, spec, name, ORDERS[n]) for n in ("static", "group-aware")]
        return min(found, key=lambda each: _output_error(weight_NK, each, stats))
    return _solve(weight_NK, stats, spec, name, order or DEFAULT_ORDER)


def _output_error(weight_NK: torch.Tensor, found: PackedWeight, stats: InputStatistics) -> float:
    difference_NK = weight_NK.float() - found.dequantize()
    return float(stats.squared_error(difference_NK).double().sum())


def _solve(
    weight_NK: torch.Tensor,
    stats: InputStatistics,
    spec: QuantSpec,
    name: str,
    order: ColumnOrder,
) -> PackedWeight:
    """In one order."""
    length = spec.group_length(weight_NK.shape[1])
    key = f"gptq {order.name} {length}"
    if key not in stats.cache:
        stats.cache[key] = factor(stats.hessian_KK, name, order, length)
    shared: Factor = stats.cache[key]
    note = f"damping raised to {shared.damping}"
    if shared.damping > DAMPING[0] and note not in stats.notes:
        stats.notes.append(note)
    # Raises where the weights have no scales; those that come late start from these.
    scales_NG, zeros_NG = affine.choose_scales(
        weight_NK, spec, name, importance_K=shared.importance_K
    )
    return round_columns(weight_NK, scales_NG, zeros_NG, shared, spec, order, name)


def solve_corrected(
    weight_NK: torch.Tensor,
    stats: InputStatistics | None,
    spec: QuantSpec,
    name: str,
    share: float = CORRECTION,
    order: ColumnOrder | None = None,
) -> PackedWeight:
    """GPTQ towards the float model's outputs: for inputs that earlier rounding has moved.

    Li et al., "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration" (2025):
    minimize ||W X' - Q X|| with X' the float model's inputs. Here in two steps: the weight whose
    outputs for X come nearest, `share` of the way to it, then GPTQ. Raises SolverError as `solve`.
    """
    if stats is not None and stats.drift_KK is not None and stats.num_tokens:
        key = "gptaq"
        if key not in stats.cache:
            stats.cache[key] = _correction(stats)
        weight_NK = weight_NK.float()
        weight_NK = weight_NK + share * (weight_NK @ stats.cache[key])
    return solve(weight_NK, stats, spec, name, order)


def _correction(stats: InputStatistics) -> torch.Tensor:
    """D (H + damping)^-1 [K, K], D the mean of (x' - x) x^T; zero without a factor."""
    damped_KK = stats.moment_KK.to(_dtype(stats.moment_KK), copy=True)
    damped_KK.diagonal().add_(DAMPING[0] * damped_KK.diagonal().mean())
    lower_KK, failed = torch.linalg.cholesky_ex(damped_KK)
    if failed:
        return torch.zeros_like(stats.moment_KK)
    found_KK = torch.cholesky_solve(stats.drift_KK.to(lower_KK.dtype).t(), lower_KK).t()
    return found_KK.float()


def _dtype(hessian_KK: torch.Tensor) -> torch.dtype:
    """In which it is factored."""
    exact = hessian_KK.device.type == "cpu" and len(hessian_KK) <= MAX_DOUBLE_WIDTH
    return torch.float64 if exact else torch.float32


def factor(
    hessian_KK: torch.Tensor,
    name: str = "weight",
    order: ColumnOrder = DEFAULT_ORDER,
    length: int = 1,
) -> Factor:
    """Order the columns, damp H and factor its inverse. Raises SolverError where that fails.

    An input that is always zero (a dead column) gets curvature 1 and no neighbours: it is rounded
    to nearest and takes no part in making up for errors. `length` is that of a group.
    """
    diagonal_K = hessian_KK.diagonal().to(_dtype(hessian_KK), copy=True)
    diagonal_K[diagonal_K == 0] = 1
    order_K = order.columns(diagonal_K, length)
    # Of H from its last column to its first, H = L L^T; turned round again, L becomes an upper R
    # with H = R R^T, and so H^-1 = U^T U with U = R^-1: H itself is never inverted.
    back_K = order_K.flip(0)
    ordered_KK = hessian_KK[back_K[:, None], back_K].to(diagonal_K.dtype)
    del hessian_KK  # wide layers have gigabytes of it
    mean = diagonal_K.mean()
    for damping in DAMPING:
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
    raise SolverError(name, f"its Hessian cannot be factored, even with damping {DAMPING[-1]}")


def round_columns(
    weight_NK: torch.Tensor,
    scales_NG: torch.Tensor,
    zeros_NG: torch.Tensor,
    shared: Factor,
    spec: QuantSpec,
    order: ColumnOrder = DEFAULT_ORDER,
    name: str = "weight",
) -> PackedWeight:
    """Round on the given grid by the paper's blocked algorithm.

    With late scales, each group gets the best for its weights as they are when its turn comes.
    """
    width = weight_NK.shape[1]
    order_K, upper_KK = shared.order_K, shared.upper_KK
    length = spec.group_length(width)
    # of each column in the order of solving
    group_K = torch.arange(width, device=order_K.device) if order.regroups else order_K
    group_K = group_K // length
    # Columns become rows: each step then reads and writes contiguous memory.
    open_KN = weight_NK.float().t()[order_K].contiguous()
    codes_KN = torch.empty_like(open_KN, dtype=torch.uint8)
    if order.late_scales:
        scales_NG, zeros_NG = scales_NG.clone(), zeros_NG.clone()
        groups = group_K[::length].tolist()
        importance_1K = 1 / upper_KK.diagonal().square()[None]
    rounding = round_block
    if weight_NK.is_cuda:
        from calibrate.triton_block import round_block as rounding  # loads Triton
    for begin, end in blocks(width, length, order.late_scales):
        if order.late_scales and begin % length == 0:
            group = groups[begin // length]
            scale_N1, zero_N1 = affine.search(
                open_KN[begin : begin + length].t()[:, None],
                spec,
                importance_1K[:, begin : begin + length],
            )
            scales_NG[:, group], zeros_NG[:, group] = scale_N1[:, 0], zero_N1[:, 0]
        scale_BN = scales_NG.t()[group_K[begin:end]].float()
        zero_BN = zeros_NG.t()[group_K[begin:end]].float()
        upper_BB = upper_KK[begin:end, begin:end]
        codes_BN, errors_BN = rounding(open_KN[begin:end], scale_BN, zero_BN, upper_BB, spec)
        codes_KN[begin:end] = codes_BN
        open_KN[end:].addmm_(upper_KK[begin:end, end:].t(), errors_BN, alpha=-1)
    codes_NK = codes_KN.t()
    if order.regroups:
        # Inside of a group, as the model has them: that is how an index is read back.
        order_GL, place_GL = order_K.view(-1, length).sort(1)
        place_GL += torch.arange(0, width, length, device=order_K.device)[:, None]
        codes_NK, order_K = codes_NK[:, place_GL.flatten()], order_GL.flatten()
        packed = PackedWeight.from_codes(codes_NK, scales_NG, zeros_NG, spec, name)
        in_order = torch.equal(order_K, torch.arange(width, device=order_K.device))
        return packed if in_order else replace(packed, input_order=order_K)
    codes_NK = torch.empty_like(codes_NK).index_copy_(1, order_K, codes_NK)
    return PackedWeight.from_codes(codes_NK, scales_NG, zeros_NG, spec, name)


def round_block(
    block_BN: torch.Tensor,
    scale_BN: torch.Tensor,
    zero_BN: torch.Tensor,
    upper_BB: torch.Tensor,
    spec: QuantSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, errors over their pivots) of a block of columns; `block_BN` is used up."""
    pivot_B = upper_BB.diagonal()
    codes_BN, errors_BN = torch.empty_like(block_BN), torch.empty_like(block_BN)
    for i in range(len(block_BN)):
        column_N, scale_N, zero_N = block_BN[i], scale_BN[i], zero_BN[i]
        code_N = (column_N / scale_N).round_().add_(zero_N).clamp_(0, spec.max_code)
        codes_BN[i] = code_N
        error_N = (column_N - (code_N - zero_N) * scale_N) / pivot_B[i]
        block_BN[i + 1 :].addr_(upper_BB[i, i + 1 :], error_N, alpha=-1)
        errors_BN[i] = error_N
    return codes_BN, errors_BN
