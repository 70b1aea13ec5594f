"""Statistics of a linear's input on calibration data: second moments, ranges, token counts.

Linears that read the same input share one object. Legend: T tokens, K inputs.
"""

import random
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import torch

from formats.errors import InputError

# Most tokens kept as a sample, for errors that second moments do not show. Tokens are kept at one
# stride, a power of THINNING, which shares no factor with the usual lengths of windows: their first
# tokens, which often have outliers, are then in the sample in about their proportion.
MAX_SAMPLED, THINNING = 768, 3
# Held-out tokens kept per input; with fewer than FEWEST_HELD no error is reported.
MAX_HELD, FEWEST_HELD = 2048, 16
# Errors on held-out tokens are computed for evenly spaced outputs, at most this many. For all
# outputs of a wide linear they would take longer than its solution.
MAX_HELD_OUTPUTS = 1024


def evenly_spaced(rows: torch.Tensor, most: int) -> torch.Tensor:
    """Return at most `most` evenly spaced rows of a matrix, as a view."""
    return rows[:: max(1, -(-len(rows) // most))]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Held-out inputs, on which solutions are compared; solvers never see them."""

    inputs_TK: torch.Tensor
    targets_TK: torch.Tensor | None = None  # the float model's inputs; None: not known

    @classmethod
    def of(cls, x: torch.Tensor, reference: torch.Tensor | None = None) -> "HeldOut":
        """Keep evenly spaced tokens of the inputs `x` [..., K], at most MAX_HELD."""

        def kept(each: torch.Tensor) -> torch.Tensor:
            return evenly_spaced(each.reshape(-1, x.shape[-1]), MAX_HELD).float().clone()

        is_known = reference is not None and reference.shape == x.shape
        return cls(inputs_TK=kept(x), targets_TK=kept(reference) if is_known else None)

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "HeldOut":
        """Return a copy with `change` applied to both tensors."""
        targets_TK = None if self.targets_TK is None else change(self.targets_TK)
        return HeldOut(inputs_TK=change(self.inputs_TK), targets_TK=targets_TK)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSums:
    """Contribution of one batch of inputs, on the device where it was computed."""

    num_tokens: int
    moment_KK: torch.Tensor  # sum of x x^T
    drift_KK: torch.Tensor | None  # sum of (x of the float model - x) x^T
    absmax_K: torch.Tensor
    sample_TK: torch.Tensor  # every `stride`-th token
    stride: int

    @classmethod
    def of(cls, x: torch.Tensor, reference: torch.Tensor | None = None) -> "BatchSums":
        """Compute the sums of inputs [..., K]: exact products of 16-bit inputs, float32 sums."""
        x_TK = x.reshape(-1, x.shape[-1])
        moment_KK, drift_KK = _product(x_TK, x_TK), None
        if reference is not None and reference.shape == x.shape:
            drift_KK = _product(reference.reshape(x_TK.shape), x_TK).sub_(moment_KK)
        stride = 1
        while -(-x_TK.shape[0] // stride) > MAX_SAMPLED:
            stride *= THINNING
        return cls(
            num_tokens=x_TK.shape[0],
            moment_KK=moment_KK,
            drift_KK=drift_KK,
            absmax_K=x_TK.abs().amax(0).float(),
            sample_TK=x_TK[::stride].float().clone(),
            stride=stride,
        )


class InputStatistics:
    """Sums over all tokens [T, K] that reached an input; one pass, memory K x K."""

    def __init__(
        self,
        in_features: int,
        device: torch.device | str,
        name: str = "input",
        *,
        is_routed: bool = False,
    ) -> None:
        """`is_routed`: a router chooses the tokens, so they may differ from the float model's."""
        self.name, self.is_routed = name, is_routed
        self.num_tokens = 0
        self.moment_KK = torch.zeros(in_features, in_features, device=device)  # sum of x x^T
        self.drift_KK: torch.Tensor | None = None  # sum of (x of the float model - x) x^T
        self.absmax_K = torch.zeros(in_features, device=device)
        self._sample: list[torch.Tensor] = []  # every `_stride`-th token of each batch
        self._stride, self._num_offered = 1, 0  # batches offered
        self._held: list[HeldOut] = []
        self.notes: list[str] = []  # a solver's messages, such as a raised damping
        self.cache: dict[str, object] = {}  # derived by solvers, shared by the input's linears

    def update(self, x: torch.Tensor, reference: torch.Tensor | None = None) -> None:
        """Add inputs [..., K]. `reference`: the float model's inputs of the same tokens."""
        if x.numel():
            self.add(BatchSums.of(x, reference))

    def add(self, batch: "BatchSums") -> None:
        """Add the sums of one batch, possibly from another device.

        Sums are float32, so their last digits depend on the order of batches.
        """
        device = self.moment_KK.device
        self.moment_KK += batch.moment_KK.to(device)
        if batch.drift_KK is not None:
            if self.drift_KK is None:
                self.drift_KK = torch.zeros_like(self.moment_KK)
            self.drift_KK += batch.drift_KK.to(device)
        self.num_tokens += batch.num_tokens
        self.absmax_K = torch.maximum(self.absmax_K, batch.absmax_K.to(device))
        self._keep(batch.sample_TK.to(device), batch.stride)

    def _keep(self, sample_TK: torch.Tensor, stride: int) -> None:
        """Add every `stride`-th token of a batch to the sample, and thin the sample if it is full.

        Each batch starts at another token, because the first one may be an outlier.
        """
        while self._stride < stride:
            self._thin()
        step = self._stride // stride
        first = random.Random(self._num_offered).randrange(step)
        self._num_offered += 1
        self._sample.append(sample_TK[first::step].clone())
        while sum(map(len, self._sample)) > MAX_SAMPLED:
            self._thin()

    def _thin(self) -> None:
        self._stride *= THINNING
        if self._sample:
            self._sample = [torch.cat(self._sample)[::THINNING].clone()]

    def hold_out(self, held: HeldOut) -> None:
        """Keep tokens for `held_out_error`, outside of the sums; only their range is counted."""
        device = self.moment_KK.device
        held = held.changed(lambda x_TK: x_TK.to(device))
        if held.inputs_TK.numel():
            self.absmax_K = torch.maximum(self.absmax_K, held.inputs_TK.abs().amax(0))
        if sum(len(each.inputs_TK) for each in self._held) < MAX_HELD:
            self._held.append(held)

    def to(self, device: torch.device | str) -> "InputStatistics":
        """Return this object if it is on `device`, else a copy there with an empty cache."""
        moment_KK = self.moment_KK.to(device)
        if moment_KK is self.moment_KK:
            return self
        found = copy(self)
        found.moment_KK, found.absmax_K = moment_KK, self.absmax_K.to(device)
        found.drift_KK = None if self.drift_KK is None else self.drift_KK.to(device)
        found._sample = [x_TK.to(device) for x_TK in self._sample]
        found._held = [each.changed(lambda x_TK: x_TK.to(device)) for each in self._held]
        found.notes, found.cache = list(self.notes), {}
        return found

    def sample(self) -> torch.Tensor:
        """Return the sampled tokens, float32 [T, K]."""
        return torch.cat(self._sample)

    @property
    def hessian_KK(self) -> torch.Tensor:
        """Mean of x x^T: half the second derivative of the mean squared output error."""
        return self.moment_KK / max(self.num_tokens, 1)

    @property
    def importance_K(self) -> torch.Tensor:
        """Mean of x^2 of every input."""
        return self.moment_KK.diagonal() / max(self.num_tokens, 1)

    def check(self) -> None:
        """Raise InputError, naming the input, if an activation was NaN or infinite."""
        if not torch.isfinite(self.moment_KK).all():
            raise InputError(
                self.name,
                "its activations contain NaN or infinity, or overflow when squared",
                "check that the float model works, or use `device` cpu, which computes in float32",
            )

    def scale_(self, scale_K: torch.Tensor) -> None:
        """Update the statistics for a change of the input from x to x / scale."""
        inverse_K = 1 / scale_K.float().to(self.moment_KK.device)
        self.moment_KK.mul_(inverse_K[:, None]).mul_(inverse_K)
        if self.drift_KK is not None:
            self.drift_KK.mul_(inverse_K[:, None]).mul_(inverse_K)
        self.absmax_K = self.absmax_K * inverse_K
        self._sample = [x_TK * inverse_K for x_TK in self._sample]
        self._held = [each.changed(lambda x_TK: x_TK * inverse_K) for each in self._held]
        self.cache.clear()

    def held_out_error(self, weight_NK: torch.Tensor, found_NK: torch.Tensor) -> float | None:
        """||X' W^T - X Wq^T|| / ||X' W^T|| over held-out tokens; None if there are too few.

        X' are the float model's inputs where they are known, else X. Of more than
        MAX_HELD_OUTPUTS outputs, evenly spaced ones count.
        """
        error = reference = tokens = 0.0
        weight_NK, found_NK = (
            evenly_spaced(each, MAX_HELD_OUTPUTS).float() for each in (weight_NK, found_NK)
        )
        for held in self._held:
            targets_TK = held.inputs_TK if held.targets_TK is None else held.targets_TK
            wanted_TN = targets_TK @ weight_NK.t()
            reference += float(wanted_TN.square().sum(dtype=torch.float64))
            difference_TN = wanted_TN.sub_(held.inputs_TK @ found_NK.t())
            error += float(difference_TN.square_().sum(dtype=torch.float64))
            tokens += len(held.inputs_TK)
        if tokens < FEWEST_HELD:
            return None
        return (error / reference) ** 0.5 if reference else 0.0

    def held_out_sample(self) -> torch.Tensor | None:
        """Return at most as many evenly spaced held-out tokens [T, K] as `sample` has.

        Returns None if there are too few.
        """
        held = [each.inputs_TK for each in self._held]
        if sum(map(len, held)) < FEWEST_HELD:
            return None
        held_TK = torch.cat(held)
        return evenly_spaced(held_TK, MAX_SAMPLED)

    def squared_error(self, difference_NK: torch.Tensor) -> torch.Tensor:
        """Squared output error of each row, [N], summed over all calibration tokens."""
        difference_NK = difference_NK.float()
        return (difference_NK @ self.moment_KK).mul_(difference_NK).sum(1).clamp_(min=0)

    def relative_output_error(self, weight_NK: torch.Tensor, found_NK: torch.Tensor) -> float:
        """||X (W - Wq)^T|| / ||X W^T|| over the calibration tokens; 0 where X W^T is zero.

        Only a few digits are exact: on a GPU, tensor cores compute the error from bfloat16.
        """
        weight_NK = weight_NK.float()
        difference_NK = weight_NK - found_NK.float()
        if self.moment_KK.is_cuda:
            reference, error = (self._coarse_error(each) for each in (weight_NK, difference_NK))
        else:
            reference, error = (
                float(self.squared_error(each).double().sum())
                for each in (weight_NK, difference_NK)
            )
        return (error / reference) ** 0.5 if reference else 0.0

    def _coarse_error(self, difference_NK: torch.Tensor) -> float:
        """Squared error from bfloat16 products; rounding errors cancel in the long sum."""
        moment_KK = self.cache.get("coarse moment")
        if moment_KK is None:
            moment_KK = self.cache["coarse moment"] = self.moment_KK.bfloat16()
        product_NK = torch.mm(difference_NK.bfloat16(), moment_KK, out_dtype=torch.float32)
        return max(float(product_NK.mul_(difference_NK).sum(dtype=torch.float64)), 0.0)


def _product(left_TK: torch.Tensor, right_TK: torch.Tensor) -> torch.Tensor:
    """Sum of the tokens' outer products [K, K], float32."""
    if left_TK.is_cuda and left_TK.dtype in (torch.float16, torch.bfloat16):
        # Tensor cores also compute exact products of 16-bit numbers.
        return torch.mm(left_TK.t(), right_TK, out_dtype=torch.float32)
    return left_TK.float().t() @ right_TK.float()
