"""Training loop of draft heads: Muon and AdamW, warm-up and cosine schedule, a time limit.

Matrices are trained by Muon (Jordan et al. 2024), which needs far fewer tokens for them than AdamW.
Norms, biases, and output matrices (which start from the target's) are trained by AdamW. On a CPU,
where Muon's bfloat16 products take seconds, AdamW trains everything.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tqdm import tqdm

from calibrate.heads.target import batches


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """Duration and learning rates of a training."""

    epochs: int = 1
    batch: int = 32  # windows per step
    rate: float = 3e-3  # peak rate of Muon, decays to a twentieth; AdamW on a CPU uses a quarter
    output_rate: float = 3e-4  # peak rate of AdamW for output matrices
    warm_up: float = 0.03  # fraction of training during which the rate rises
    decay: float = 0.8  # weight of step j's loss is decay^j
    clip: float = 0.5
    seconds: float = math.inf  # time limit; the schedule ends at it
    watch: int = 100  # batches between two evaluations on the held-out windows
    seed: int = 0


# Maps a batch of windows to (loss, accuracy) of each step or head.
Losses = Callable[[torch.Tensor], "list[tuple[torch.Tensor, torch.Tensor]]"]


def fit(
    module: torch.nn.Module,
    ids_WS: torch.Tensor,
    losses: Losses,
    settings: FitSettings,
    *,
    outputs: tuple[torch.nn.Parameter, ...] = (),
    held_WS: torch.Tensor | None = None,
    progress: bool = True,
) -> int:
    """Train a module in place on windows, and return the number of batches.

    A row of `ids_WS` is a window's token ids, or any other key that `losses` accepts. `outputs`:
    matrices that start from the target's. The accuracy on `held_WS` is printed during training: if
    it falls while the accuracy of the batches rises, there is too little data.
    """
    optimizers = _optimizers(module, outputs, settings)
    parameters = [each for each in module.parameters() if each.requires_grad]
    per_epoch = max(1, len(ids_WS) // settings.batch)
    total, started, done = settings.epochs * per_epoch, time.monotonic(), 0
    with tqdm(total=total, unit="batch", disable=not progress) as bar:
        for epoch in range(settings.epochs):
            for ids_BS in batches(ids_WS, settings.batch, settings.seed + epoch):
                share = max(done / total, (time.monotonic() - started) / settings.seconds)
                if share >= 1:
                    return done
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = group["highest"] * _schedule(share, settings.warm_up)
                    optimizer.zero_grad(set_to_none=True)
                found = losses(ids_BS)
                loss = sum(
                    settings.decay**step * own_loss for step, (own_loss, _) in enumerate(found)
                )
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
                for optimizer in optimizers:
                    optimizer.step()
                done += 1
                bar.update()
                if held_WS is not None and done % settings.watch == 0:
                    seen = [float(right) for _, right in found]
                    held = accuracies(held_WS, losses, settings.batch)
                    bar.write(f"{done} batches: accuracy {_text(seen)}, held out {_text(held)}")
    return done


def _text(accuracy: list[float]) -> str:
    return " ".join(f"{each:.3f}" for each in accuracy)


def _optimizers(
    module: torch.nn.Module, outputs: tuple[torch.nn.Parameter, ...], settings: FitSettings
) -> list[torch.optim.Optimizer]:
    """Return Muon for matrices on a GPU, and AdamW for the rest."""
    is_output = {id(each) for each in outputs}
    trained = [each for each in module.parameters() if each.requires_grad]
    matrices = [each for each in trained if each.ndim == 2 and id(each) not in is_output]
    vectors = [each for each in trained if each.ndim < 2]
    made: list[torch.optim.Optimizer] = []
    on_cpu = []
    if not trained[0].is_cuda:
        matrices, on_cpu = [], matrices
    if matrices:
        made.append(
            torch.optim.Muon(
                [{"params": matrices, "highest": settings.rate}],
                weight_decay=0.01,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    groups = [
        {"params": vectors, "highest": settings.rate, "weight_decay": 0.0},
        {"params": list(outputs), "highest": settings.output_rate, "weight_decay": 0.0},
        {"params": on_cpu, "highest": settings.rate / 4, "weight_decay": 0.01},
    ]
    groups = [group for group in groups if group["params"]]
    if groups:
        made.append(torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=trained[0].is_cuda))
    return made


def _schedule(share: float, warm_up: float) -> float:
    """Return the learning rate relative to the peak, after the fraction `share` of training."""
    if share < warm_up:
        return (share + 1e-3) / (warm_up + 1e-3)
    return 0.05 + 0.475 * (1 + math.cos(math.pi * (share - warm_up) / (1 - warm_up)))


@torch.no_grad()
def accuracies(ids_WS: torch.Tensor, losses: Losses, batch: int) -> list[float]:
    """Return the mean accuracy of each step over all windows."""
    rows = []
    for ids_BS in ids_WS.split(batch):
        rows.append([float(right) * len(ids_BS) for _, right in losses(ids_BS)])
    return [sum(column) / len(ids_WS) for column in zip(*rows, strict=True)]


def in_16_bits(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context with bfloat16 autocast on a GPU, and without effect on a CPU."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.autocast("cuda", torch.bfloat16)
