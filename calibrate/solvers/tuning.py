"""Block tuning: adjust codes and scales of a layer until its outputs fit the float layer's.

Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of Large
Language Models" (AutoRound, 2023). Tuning starts from a solver's codes instead of the float
weights, so a weight may change to a neighbouring code. The gradient passes through the rounding
unchanged (straight-through), and the rates of Adam decay to 0.

Legend: N outputs, K inputs, G groups, L inputs of a group, B blocks of a K-quant's row, W windows,
S tokens, D hidden size.
"""

from dataclasses import replace
from itertools import islice

import torch
from torch import nn
from torch.func import functional_call

from calibrate.calibration.layer_runner import LayerRunner
from calibrate.calibration.vision import Media
from calibrate.layer import FinishedLayer
from calibrate.solvers.norms import TrainableNorms
from calibrate.solvers.solving import LayerState, Tuning
from calibrate.texts.data import endless_batches
from formats.gguf.k_quants.grid import read_blocks
from formats.in_memory.k_weight import KWeight
from formats.in_memory.packed import PackedWeight
from formats.numerics import affine
from formats.numerics.multiples import nearest_multiples, units_of
from formats.scheme import K_TYPES

# Number of windows held out. The tuned layer is used only if it is better on these.
KEPT_OUT = 8
BETAS = (0.9, 0.99)
LARGEST_D = 65504.0  # largest float16


class _Grid(nn.Module):
    """One linear with trainable codes and scales."""

    def __init__(self, packed: PackedWeight, weight_NK: torch.Tensor) -> None:
        super().__init__()
        if packed.input_order is not None:
            weight_NK = weight_NK[:, packed.input_order]
        self.place_K = None if packed.input_order is None else packed.input_order.argsort()
        codes_NGL = packed.codes().float().unflatten(1, (packed.num_groups, -1))
        scales_NG1 = packed.scales_NG.float()[..., None]
        zeros_NG1 = packed.zeros_NG.float()[..., None]
        self.packed = packed
        in_multiples = packed.spec.in_multiples and packed.num_groups > 1
        self.units_N1 = units_of(packed.scales_NG) if in_multiples else None
        self.scales_NG1, self.zeros_NG1 = scales_NG1, zeros_NG1
        self.places_NGL = places_of_codes(codes_NGL, scales_NG1, zeros_NG1, weight_NK)
        self.move_NGL = nn.Parameter(torch.zeros_like(self.places_NGL))
        self.gain = nn.Parameter(torch.zeros_like(scales_NG1))

    def scales(self) -> torch.Tensor:
        wanted_NG1 = self.scales_NG1 * (1 + self.gain)
        if self.units_N1 is None:
            return wanted_NG1
        with torch.no_grad():  # the gradient passes through the rounding unchanged
            change_NG = nearest_multiples(wanted_NG1[..., 0], self.units_N1) - wanted_NG1[..., 0]
        return wanted_NG1 + change_NG[..., None]

    def codes(self) -> torch.Tensor:
        return rounded_codes(self.places_NGL + self.move_NGL, self.packed.spec.max_code)

    def weight(self) -> torch.Tensor:
        """Return the weight [N, K] that the layer computes with."""
        weight_NK = ((self.codes() - self.zeros_NG1) * self.scales()).flatten(1)
        return weight_NK if self.place_K is None else weight_NK[:, self.place_K]

    def finished(self, name: str) -> PackedWeight:
        """Return the weight with integer codes, and scales in the checkpoint's dtype."""
        with torch.no_grad():
            scales_NG = self.scales().squeeze(-1)
            if self.units_N1 is None:
                size_NG = scales_NG.abs().clamp(affine.MIN_SCALE, affine.MAX_SCALE)
                scales_NG = size_NG.copysign(scales_NG)
            stored_NG = scales_NG.to(self.packed.scales_NG.dtype)
            codes_NK = self.codes().flatten(1).to(torch.uint8)
        found = PackedWeight.from_codes(
            codes_NK, stored_NG, self.packed.zeros_NG, self.packed.spec, name
        )
        return replace(
            found,
            activation=self.packed.activation,
            input_scale=self.packed.input_scale,
            input_order=self.packed.input_order,
        )


class _BlockGrid(nn.Module):
    """One linear in K-quant blocks with trainable codes and block scales d.

    The integer scales and minima of groups, and dmin, are fixed.
    """

    def __init__(self, weight: KWeight, weight_NK: torch.Tensor) -> None:
        super().__init__()
        codes_NK, self.grid = read_blocks(weight.bytes_NX, weight.spec)
        steps_NG1, self.lows_NG1 = self.grid.steps()[..., None], self.grid.lows()[..., None]
        codes_NGL = codes_NK.float().unflatten(1, (steps_NG1.shape[1], -1))
        divisors_NG1 = torch.where(steps_NG1 == 0, 1.0, steps_NG1)
        zeros_NG1 = self.lows_NG1 / divisors_NG1
        self.steps_NG1 = steps_NG1
        self.places_NGL = places_of_codes(codes_NGL, divisors_NG1, zeros_NG1, weight_NK)
        self.move_NGL = nn.Parameter(torch.zeros_like(self.places_NGL))
        self.gain = nn.Parameter(torch.zeros_like(self.grid.d_NB, dtype=torch.float32))

    def codes(self) -> torch.Tensor:
        return rounded_codes(self.places_NGL + self.move_NGL, self.grid.spec.max_code)

    def weight(self) -> torch.Tensor:
        """Return the weight [N, K] that the layer computes with."""
        groups = self.steps_NG1.shape[1] // self.gain.shape[1]
        gain_NG1 = 1 + self.gain.repeat_interleave(groups, 1)[..., None]
        lows_NG1 = self.lows_NG1
        if not self.grid.has_minima:  # the minimum of Q6_K is a multiple of d
            lows_NG1 = lows_NG1 * gain_NG1
        return (self.codes() * self.steps_NG1 * gain_NG1 - lows_NG1).flatten(1)

    def finished(self, name: str) -> KWeight:
        """Return the weight as blocks of a file."""
        with torch.no_grad():
            d_NB = self.grid.d_NB.float() * (1 + self.gain)
            d_NB = d_NB.clamp(-LARGEST_D, LARGEST_D).half()
            codes_NK = self.codes().flatten(1).to(torch.uint8)
        found = KWeight.from_codes(codes_NK, replace(self.grid, d_NB=d_NB))
        found.check(name)
        return found


def places_of_codes(
    codes_NGL: torch.Tensor,
    scales_NG1: torch.Tensor,
    zeros_NG1: torch.Tensor,
    weight_NK: torch.Tensor,
) -> torch.Tensor:
    """Return real numbers that round to `codes_NGL`, shifted towards the float weight.

    A number near the boundary to a neighbouring code needs a small change to reach that code.
    """
    places_NGL = weight_NK.float().unflatten(1, (codes_NGL.shape[1], -1)) / scales_NG1
    rest_NGL = (places_NGL + zeros_NG1 - codes_NGL).mul_(0.5).clamp_(-0.45, 0.45)
    return rest_NGL.add_(codes_NGL)


def rounded_codes(places: torch.Tensor, max_code: int) -> torch.Tensor:
    """Round real numbers to codes, with a straight-through gradient."""
    return (places + (places.round() - places).detach()).clamp(0, max_code)


def tune_layer(
    runner: LayerRunner,
    layer: int,
    loaded: LayerState,
    finished: FinishedLayer,
    inputs_WSD: torch.Tensor,
    targets_WSD: torch.Tensor,
    tuning: Tuning,
    seed: int = 0,
    media: Media = (),
) -> FinishedLayer:
    """Train codes, scales and norms of a solved layer so that its outputs approach `targets_WSD`.

    `loaded`: the float layer after its transforms. `inputs_WSD`: the layer's inputs. `media`:
    images of each window. If the result is no better on the held-out windows, the layer is returned
    unchanged.
    """
    state = {name: tensor.float() for name, tensor in finished.apply(loaded).items()}
    module = runner.build(layer, state)
    after = {**loaded, **finished.changed}
    grids: dict[str, _Grid | _BlockGrid] = {}
    for name, packed in finished.packed.items():
        if isinstance(packed, PackedWeight):
            grids[name] = _Grid(packed, after[f"{name}.weight"])
        elif isinstance(packed, KWeight) and packed.spec.type in K_TYPES:
            grids[name] = _BlockGrid(packed, after[f"{name}.weight"])
    if not grids:
        return finished
    norms = TrainableNorms(runner.layer_map, after).to(runner.device)
    windows = inputs_WSD.shape[0]
    kept = min(KEPT_OUT, windows // 2)
    generator = torch.Generator().manual_seed(seed + layer)
    batch = max(1, tuning.tokens // inputs_WSD.shape[1])
    scale = 1 / float(targets_WSD[-KEPT_OUT:].float().square().mean().clamp(min=1e-20))

    def loss(rows: torch.Tensor | slice) -> torch.Tensor:
        weights = {f"{name}.weight": grid.weight() for name, grid in grids.items()}
        weights = {n: w.to(runner.dtype) for n, w in (weights | norms.weights()).items()}

        def call(*args: object, **kwargs: object) -> object:
            return functional_call(module, weights, args, kwargs)

        inputs_BSD = inputs_WSD[rows].to(runner.device)
        chosen = range(windows)[rows] if isinstance(rows, slice) else rows.tolist()
        images = [media[window] for window in chosen] if media else ()
        found_BSD = runner.run(call, layer, inputs_BSD, grad=True, media=images)
        wanted_BSD = targets_WSD[rows].to(runner.device)
        return (found_BSD.float() - wanted_BSD.float()).square().mean() * scale

    def judged() -> float:
        with torch.no_grad():
            return sum(float(loss(slice(i, i + 1))) for i in range(windows - kept, windows))

    before = judged()
    optimizer = torch.optim.Adam(
        [
            {"params": [grid.move_NGL for grid in grids.values()], "lr": tuning.rate},
            {"params": [grid.gain for grid in grids.values()], "lr": tuning.scale_rate},
            {"params": list(norms.parameters()), "lr": tuning.norm_rate},
        ],
        betas=BETAS,
        fused=next(iter(grids.values())).gain.is_cuda,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / tuning.steps)
    batches = endless_batches(torch.arange(windows - kept), batch, generator)
    for rows in islice(batches, tuning.steps):
        loss(rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    after_loss = judged()
    if not after_loss < before:
        return finished
    packed = {name: grid.finished(name) for name, grid in grids.items()}
    return replace(
        finished,
        packed={**finished.packed, **packed},
        changed={**finished.changed, **norms.finished()},
    )
