"""GPTQ: round a weight column by column, and let the columns still open make up for the error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers"
(2022). Columns are taken in the order of falling activation (act-order), with scales chosen before
(static groups), so that the result keeps its order of columns: `desc_act` stays false.

Legend: N outputs, K inputs, H mean of x x^T [K, K], U upper Cholesky factor of H^-1, B a block.
"""

from dataclasses import dataclass

import torch

from calibrate.solving import SolverError
from calibrate.statistics import InputStatistics
from formats import affine
from formats.packed import PackedWeight
from formats.scheme import QuantSpec

BLOCK_COLUMNS = 128
# Added to H's diagonal as a share of its mean. Each is tried until H can be factored.
DAMPING = (0.01, 0.03, 0.1, 0.3, 1.0)
# Share of the way to the weight that fits the calibration data best; all of it fits its noise too.
# Chosen without the held-out windows (examples/search_correction.py): mean of log(perplexity after
# / before) of docs-5m and docs-29m, seeds 0 to 5, judged on kept out calibration texts and on
# wikitext-2: 0.0481 at 0.25, 0.0439 at 0.5, 0.0438 at 0.75.
CORRECTION = 0.75
# Below this width a CPU factors in float64: it costs little, and badly conditioned inputs gain.
MAX_DOUBLE_WIDTH = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """What all linears of one input share: the order of the columns, and U for that order."""

    order_K: torch.Tensor
    upper_KK: torch.Tensor  # float32
    damping: float


def solve(
    weight_NK: torch.Tensor, stats: InputStatistics | None, spec: QuantSpec, name: str
) -> PackedWeight:
    """Quantize one linear's weight for the inputs seen in `stats`.

    Raises SolverError where the inputs do not determine a solution: none, or H cannot be factored.
    """
    if stats is None or stats.num_tokens == 0:
        raise SolverError(name, "no calibration token reached it")
    if "gptq" not in stats.cache:
        stats.cache["gptq"] = factor(stats.hessian_KK, name)
    shared: Factor = stats.cache["gptq"]
    note = f"damping raised to {shared.damping}"
    if shared.damping > DAMPING[0] and note not in stats.notes:
        stats.notes.append(note)
    scales_NG, zeros_NG = affine.choose_scales(
        weight_NK, spec, name, importance_K=stats.importance_K
    )
    codes_NK = round_columns(weight_NK, scales_NG, zeros_NG, shared, spec)
    return PackedWeight.from_codes(codes_NK, scales_NG, zeros_NG, spec, name)


def solve_corrected(
    weight_NK: torch.Tensor,
    stats: InputStatistics | None,
    spec: QuantSpec,
    name: str,
    share: float = CORRECTION,
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
    return solve(weight_NK, stats, spec, name)


def _correction(stats: InputStatistics) -> torch.Tensor:
    """D (H + damping)^-1 [K, K], D the mean of (x' - x) x^T; zero without a factor."""
    exact = stats.moment_KK.device.type == "cpu" and len(stats.moment_KK) <= MAX_DOUBLE_WIDTH
    dtype = torch.float64 if exact else torch.float32
    damped_KK = stats.moment_KK.to(dtype, copy=True)
    damped_KK.diagonal().add_(DAMPING[0] * damped_KK.diagonal().mean())
    lower_KK, failed = torch.linalg.cholesky_ex(damped_KK)
    if failed:
        return torch.zeros_like(stats.moment_KK)
    found_KK = torch.cholesky_solve(stats.drift_KK.to(dtype).t(), lower_KK).t()
    return found_KK.float()


def factor(hessian_KK: torch.Tensor, name: str = "weight") -> Factor:
    """Order the columns, damp H and factor its inverse. Raises SolverError where that fails.

    An input that is always zero (a dead column) gets curvature 1 and no neighbours: it is rounded
    to nearest and takes no part in making up for errors.
    """
    width = hessian_KK.shape[0]
    exact = hessian_KK.device.type == "cpu" and width <= MAX_DOUBLE_WIDTH
    hessian_KK = hessian_KK.to(torch.float64 if exact else torch.float32)
    diagonal_K = hessian_KK.diagonal().clone()
    diagonal_K[diagonal_K == 0] = 1
    order_K = torch.argsort(diagonal_K, descending=True, stable=True)
    ordered_KK = hessian_KK[order_K[:, None], order_K]
    del hessian_KK  # wide layers have gigabytes of it
    ordered_KK.diagonal().copy_(diagonal_K[order_K])
    for damping in DAMPING:
        damped_KK = ordered_KK.clone()
        damped_KK.diagonal().add_(damping * diagonal_K.mean())
        lower_KK, failed = torch.linalg.cholesky_ex(damped_KK)
        if failed:
            continue
        inverse_KK = torch.cholesky_inverse(lower_KK)
        upper_KK, failed = torch.linalg.cholesky_ex(inverse_KK, upper=True)
        if not failed and torch.isfinite(upper_KK).all():
            return Factor(order_K=order_K, upper_KK=upper_KK.float(), damping=damping)
    raise SolverError(name, f"its Hessian cannot be factored, even with damping {DAMPING[-1]}")


def round_columns(
    weight_NK: torch.Tensor,
    scales_NG: torch.Tensor,
    zeros_NG: torch.Tensor,
    shared: Factor,
    spec: QuantSpec,
) -> torch.Tensor:
    """Codes uint8 [N, K] on the given grid, by the paper's blocked algorithm."""
    width = weight_NK.shape[1]
    order_K, upper_KK = shared.order_K, shared.upper_KK
    group_K = order_K // spec.group_length(width)
    # Columns become rows: each step then reads and writes contiguous memory.
    open_KN = weight_NK.float().t()[order_K].contiguous()
    scale_KN = scales_NG.float().t()[group_K]
    zero_KN = zeros_NG.float().t()[group_K]
    codes_KN = torch.empty_like(open_KN)
    for begin in range(0, width, BLOCK_COLUMNS):
        end = min(begin + BLOCK_COLUMNS, width)
        block_BN = open_KN[begin:end]
        upper_BB = upper_KK[begin:end, begin:end]
        pivot_B = upper_BB.diagonal()
        errors_BN = torch.empty_like(block_BN)
        for i in range(end - begin):
            column_N, scale_N, zero_N = block_BN[i], scale_KN[begin + i], zero_KN[begin + i]
            code_N = (column_N / scale_N).round_().add_(zero_N).clamp_(0, spec.max_code)
            codes_KN[begin + i] = code_N
            error_N = (column_N - (code_N - zero_N) * scale_N) / pivot_B[i]
            block_BN[i + 1 :].addr_(upper_BB[i, i + 1 :], error_N, alpha=-1)
            errors_BN[i] = error_N
        open_KN[end:].addmm_(upper_KK[begin:end, end:].t(), errors_BN, alpha=-1)
    codes_NK = torch.empty_like(weight_NK, dtype=torch.uint8)
    codes_NK[:, order_K] = codes_KN.t().to(torch.uint8)
    return codes_NK
