"""Refine a solution by alternating between the best scales for its codes and better codes.

GPTQ chooses scales before codes, and chooses each code only once. Here scales are the least-squares
solution for the given codes; then each code in turn takes the best value with all other codes fixed
(coordinate descent: Behdin et al., "QuantEase: Optimization-based Quantization for Language
Models", 2023). No step increases the error (w - q) H (w - q)^T of a row on the calibration data.
Refinement is not the default, because it also fits peculiarities of the calibration texts (README).

Legend: N outputs, K inputs, G groups, L inputs of a group, H damped mean of x x^T [K, K], B columns
of a block.
"""

from dataclasses import replace

import torch

from calibrate.solvers.column_order import BLOCK_COLUMNS
from formats.in_memory.packed import PackedWeight
from formats.numerics import affine
from formats.numerics.multiples import nearest_multiples, units_of
from formats.scheme import QuantSpec

ROUNDS = 2
# Refinement ends when a round lowers the summed error of all rows by less than this fraction.
MIN_GAIN = 0.002
# A new scale outside of these multiples of the old one is rejected as not determined by the codes.
FACTORS = (0.5, 2.0)
RIDGE = 1e-5  # added to the diagonal as a fraction, so that the matrix can be factored


def refine(
    weight_NK: torch.Tensor, packed: PackedWeight, hessian_KK: torch.Tensor, rounds: int = ROUNDS
) -> PackedWeight:
    """Return a solution with at most the error of `packed` in each row. Zero points stay fixed."""
    weight_NK = weight_NK.float()
    if packed.input_order is not None:
        order_K = packed.input_order.to(weight_NK.device)
        weight_NK, hessian_KK = weight_NK[:, order_K], hessian_KK[order_K[:, None], order_K]
    best = _State.of(packed, weight_NK.device)
    best_N = best.errors(weight_NK, hessian_KK)
    for _ in range(rounds):
        scales_NG = best_scales(weight_NK, best, hessian_KK)
        if packed.spec.in_multiples and packed.num_groups > 1:
            units_N1 = units_of(best.scales_NG.to(packed.scales_NG.dtype))
            scales_NG = nearest_multiples(scales_NG, units_N1)
        found = best.with_scales(scales_NG)
        # Rounding scales to float16 may make a row worse; such rows keep their old scales.
        found_N = found.errors(weight_NK, hessian_KK)
        found = found.where(found_N < best_N, best)
        found = descend(weight_NK, found, hessian_KK, packed.spec)
        found_N = found.errors(weight_NK, hessian_KK)
        before = best_N.double().sum()
        best = found.where(found_N < best_N, best)
        best_N = torch.minimum(found_N, best_N)
        if best_N.double().sum() > (1 - MIN_GAIN) * before:
            break
    return best.packed(packed)


class _State:
    """Codes, scales and zeros as float32, on the solver's device."""

    def __init__(
        self, codes_NK: torch.Tensor, scales_NG: torch.Tensor, zeros_NG: torch.Tensor
    ) -> None:
        self.codes_NK, self.scales_NG, self.zeros_NG = codes_NK, scales_NG, zeros_NG

    @classmethod
    def of(cls, packed: PackedWeight, device: torch.device) -> "_State":
        tensors = (packed.codes(), packed.scales_NG, packed.zeros_NG)
        return cls(*(each.to(device).float() for each in tensors))

    def steps(self) -> torch.Tensor:
        """Code minus zero, [N, G, L]."""
        groups_NGL = self.codes_NK.unflatten(1, (self.scales_NG.shape[1], -1))
        return groups_NGL - self.zeros_NG[..., None]

    def weight(self) -> torch.Tensor:
        return (self.steps() * self.scales_NG[..., None]).flatten(1)

    def errors(self, weight_NK: torch.Tensor, hessian_KK: torch.Tensor) -> torch.Tensor:
        """Squared output error of each row, [N]."""
        rest_NK = weight_NK - self.weight()
        return (rest_NK @ hessian_KK).mul_(rest_NK).sum(1)

    def with_scales(self, scales_NG: torch.Tensor) -> "_State":
        return _State(self.codes_NK, scales_NG, self.zeros_NG)

    def where(self, chosen_N: torch.Tensor, other: "_State") -> "_State":
        """Return the chosen rows of this state and the other rows of `other` (same zeros)."""
        chosen_N1 = chosen_N[:, None]
        return _State(
            torch.where(chosen_N1, self.codes_NK, other.codes_NK),
            torch.where(chosen_N1, self.scales_NG, other.scales_NG),
            self.zeros_NG,
        )

    def packed(self, like: PackedWeight) -> PackedWeight:
        scales_NG = self.scales_NG.to(like.scales_NG.dtype)
        codes_NK = self.codes_NK.to(torch.uint8)
        found = PackedWeight.from_codes(codes_NK, scales_NG, like.zeros_NG, like.spec)
        return replace(found, input_order=like.input_order)


def best_scales(weight_NK: torch.Tensor, state: _State, hessian_KK: torch.Tensor) -> torch.Tensor:
    """Return the least-squares scales [N, G] for a state's codes, rounded to float16.

    A row's scales s solve A s = b with A_gh = q_g H_gh q_h^T and b_g = q_g H_g w^T, where q_g are
    code minus zero in group g. Scales that the codes do not determine are not changed.
    """
    steps_NGL, old_NG = state.steps(), state.scales_NG
    num_groups, length = steps_NGL.shape[1:]
    wanted_NG = ((weight_NK @ hessian_KK).view_as(steps_NGL) * steps_NGL).sum(-1)
    matrix_NGG = torch.stack(
        [
            ((steps_NGL[:, g] @ rows_LK).view_as(steps_NGL) * steps_NGL).sum(-1)
            for g, rows_LK in enumerate(hessian_KK.view(num_groups, length, -1))
        ],
        dim=1,
    )
    diagonal_NG = matrix_NGG.diagonal(dim1=1, dim2=2)
    empty_NG = diagonal_NG <= 0
    diagonal_NG.mul_(1 + RIDGE).masked_fill_(empty_NG, 1.0)
    lower_NGG, failed_N = torch.linalg.cholesky_ex(matrix_NGG)
    found_NG = torch.cholesky_solve(wanted_NG[..., None], lower_NGG).squeeze(-1)
    ratio_NG = found_NG / old_NG
    is_good_NG = (ratio_NG > FACTORS[0]) & (ratio_NG < FACTORS[1]) & ~empty_NG
    size_NG = found_NG.abs()
    is_good_NG &= (size_NG >= affine.MIN_SCALE) & (size_NG <= affine.MAX_SCALE)
    is_good_NG &= (failed_N == 0)[:, None]
    stored_NG = found_NG.to(affine.SCALE_DTYPE).float()
    return torch.where(is_good_NG, stored_NG, old_NG)


def descend(
    weight_NK: torch.Tensor, state: _State, hessian_KK: torch.Tensor, spec: QuantSpec
) -> _State:
    """Set each code in turn, in one pass over all columns, to the best value with others fixed."""
    own_KN = state.weight().t().contiguous()
    codes_KN = state.codes_NK.t().contiguous()
    # slope[k] = (w - q) H[:, k]: half the error's derivative by q_k, negated
    slope_KN = hessian_KK @ (weight_NK.t() - own_KN)
    length = weight_NK.shape[1] // state.scales_NG.shape[1]
    group_K = torch.arange(weight_NK.shape[1], device=weight_NK.device) // length
    scales_GN, zeros_GN = state.scales_NG.t(), state.zeros_NG.t()
    block = descend_block
    if own_KN.is_cuda:
        from calibrate.solvers.triton_block import descend_block as block  # loads Triton
    for begin in range(0, len(own_KN), BLOCK_COLUMNS):
        own = slice(begin, begin + BLOCK_COLUMNS)
        codes_KN[own], moved_BN = block(
            slope_KN[own],
            own_KN[own],
            scales_GN[group_K[own]],
            zeros_GN[group_K[own]],
            hessian_KK[own, own],
            spec,
        )
        slope_KN.addmm_(hessian_KK[:, own], moved_BN, alpha=-1)
    return _State(codes_KN.t().contiguous(), state.scales_NG, state.zeros_NG)


def descend_block(
    slope_BN: torch.Tensor,
    own_BN: torch.Tensor,
    scale_BN: torch.Tensor,
    zero_BN: torch.Tensor,
    hessian_BB: torch.Tensor,
    spec: QuantSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the codes of a block of columns; return (codes, changes of the weights).

    `own_BN`: the current weights. The slopes of columns outside of the block are not updated.
    """
    slope_BN = slope_BN.clone()
    codes_BN, moved_BN = torch.empty_like(own_BN), torch.empty_like(own_BN)
    for i in range(len(own_BN)):
        wanted_N = own_BN[i] + slope_BN[i] / hessian_BB[i, i]
        code_N = (wanted_N / scale_BN[i]).round_().add_(zero_BN[i]).clamp_(0, spec.max_code)
        codes_BN[i] = code_N
        moved_BN[i] = (code_N - zero_BN[i]) * scale_BN[i] - own_BN[i]
        slope_BN[i + 1 :].addr_(hessian_BB[i, i + 1 :], moved_BN[i], alpha=-1)
    return codes_BN, moved_BN
