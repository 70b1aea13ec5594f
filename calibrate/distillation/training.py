"""Train the student to minimize the KL divergence of its predictions from the float model's.

This follows the second stage of Chen et al., "EfficientQAT: Efficient Quantization-Aware Training
for Large Language Models" (2024), where codes are fixed and scales are trained end to end. Here the
loss is the KL divergence instead of the next token's, norm weights are trained, too, and optionally
codes. Memory holds the activations of one layer at a time: the forward pass keeps the layers'
inputs, and the backward pass runs each layer again.

Legend: W windows, B windows of a step, S tokens of a window, R rows, D hidden size, V vocabulary.
"""

import logging
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn
from torch.nn import functional
from tqdm import tqdm

from calibrate.calibration.capture import HiddenStates, held_out_windows
from calibrate.calibration.layer_runner import LayerRunner
from calibrate.calibration.stream import HELD_EVERY
from calibrate.calibration.vision import Media, predicted_WS
from calibrate.distillation.student import Student
from calibrate.float_model import FloatModel
from calibrate.texts.data import endless_batches

CHECKS = 8  # evaluations on the held-out windows during training
ROWS = 512  # positions whose logits are in memory at a time
BETAS = (0.9, 0.99)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """Number of steps and learning rates. Rates decay to 0."""

    steps: int = 200
    tokens: int = 4096  # per step
    rate: float = 0.002  # rate of scales, relative to each scale
    norm_rate: float = 0.0005  # rate of norm weights, relative to each weight
    code_rate: float = 0.0  # rate of codes, in units of codes; 0: codes are fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Divergence on held-out windows in nats per token, before and after training."""

    before: float
    after: float  # of the kept state
    kept_step: int  # 0: no state was better than the first
    steps: int  # completed before the end, or before an interrupt


class Teacher:
    """The float model: computes its last hidden states and its logits."""

    def __init__(
        self, model: FloatModel, device: str, axis_rotary: nn.Module | None = None
    ) -> None:
        """`axis_rotary`: see LayerRunner."""
        self.model = model
        self.runner = LayerRunner(model, model.layer_map, device, axis_rotary)
        self.norm_D = model.get(model.layer_map.last_norm).to(device)
        self.head_VD = model.head().to(device, self.runner.dtype)

    def last_states(self, *data_WS: torch.Tensor, media: Media = ()) -> list[torch.Tensor]:
        """Return the last layer's outputs [W, S, D] for each set of windows in `data_WS`.

        Each layer is read once, and one layer is in memory at a time. `media`: images of the first
        set's windows.
        """
        embedding_VD = self.model.get(self.model.layer_map.embedding)
        hidden = [
            HiddenStates(ids_WS, embedding_VD, self.runner, media=() if number else media)
            for number, ids_WS in enumerate(data_WS)
        ]
        for layer in range(self.model.num_layers):
            module = self.runner.build(layer, self.model.layer(layer, self.runner.device))
            for each in hidden:
                each.advance(self.runner, module, layer)
        return [each.states_WSD for each in hidden]

    def logits(self, rows_RD: torch.Tensor) -> torch.Tensor:
        return self.runner.final_logits(rows_RD, self.norm_D, self.head_VD)


class Comparison:
    """A student and its teacher on the same windows."""

    def __init__(
        self,
        student: Student,
        teacher: Teacher,
        ids_WS: torch.Tensor,
        taught_WSD: torch.Tensor,
        media: Media = (),
    ) -> None:
        """`taught_WSD`: the teacher's last hidden states. `media`: images of the windows."""
        self.student, self.teacher, self.taught_WSD = student, teacher, taught_WSD
        runner = student.runner
        self.hidden_WSD = HiddenStates(ids_WS, student.embedding, runner, media=media).states_WSD
        self.media, self.counts_WS = media, predicted_WS(media, ids_WS.shape)

    def logits(self, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits [S, V] of (teacher, student) for one window."""
        last_SD = self._forward(torch.tensor([window]))[-1][0]
        return self.teacher.logits(self.taught_WSD[window]), self.student.logits(last_SD)

    def divergence(self, windows: torch.Tensor) -> float:
        """Mean KL(teacher || student) in nats per token of text."""
        total = 0.0
        for window in windows.tolist():
            counts_S = self.counts_WS[window].to(self.taught_WSD.device)
            last_SD = self._forward(torch.tensor([window]))[-1][0][counts_S]
            taught_SD = self.taught_WSD[window][counts_S]
            for own_RD, taught_RD in zip(last_SD.split(ROWS), taught_SD.split(ROWS), strict=True):
                own_RV, taught_RV = self.student.logits(own_RD), self.teacher.logits(taught_RD)
                total += float(_divergence(own_RV, taught_RV))
        return total / int(self.counts_WS[windows].sum())

    def _forward(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the inputs of all layers, followed by the outputs of the last layer."""
        states = [self.hidden_WSD[rows].to(self.student.device)]
        for layer in self.student.layers:
            states.append(layer.run(states[-1], media=self._media_of(rows)))
        return states

    def _media_of(self, rows: torch.Tensor) -> Media:
        return [self.media[row] for row in rows.tolist()] if self.media else ()


class Training(Comparison):
    """Training of a student on the windows of a comparison."""

    def run(self, settings: TrainingSettings, seed: int, progress: bool = True) -> Trained:
        """Train, then restore the state with the least divergence on the held-out windows.

        An interrupt (Ctrl-C) ends the training if a better state than the first is known; otherwise
        KeyboardInterrupt is raised.
        """
        layers = [layer.parameters() for layer in self.student.layers]
        scales, norms, codes = ([p for layer in layers for p in layer[kind]] for kind in range(3))
        trained = [*scales, *norms, *codes]
        groups = [
            {"params": scales, "lr": settings.rate},
            {"params": norms, "lr": settings.norm_rate},
        ]
        if codes:
            groups.append({"params": codes, "lr": settings.code_rate})
        optimizer = torch.optim.Adam(groups, betas=BETAS)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1 - step / settings.steps
        )
        windows = torch.arange(len(self.hidden_WSD))
        held_W = held_out_windows(len(windows), 0, min(HELD_EVERY, len(windows)))
        held_out, fitted = windows[held_W], windows[~held_W]
        before = best = self.divergence(held_out)
        kept, kept_step, done = [each.detach().clone() for each in trained], 0, 0
        check_every = max(1, settings.steps // CHECKS)
        batch = max(1, settings.tokens // self.hidden_WSD.shape[1])
        batches = endless_batches(fitted, batch, torch.Generator().manual_seed(seed))
        try:
            with tqdm(total=settings.steps, unit="step", disable=not progress) as bar:
                for step, rows in enumerate(islice(batches, settings.steps), 1):
                    self._backward(rows)
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
                    done = step
                    bar.update()
                    if step % check_every == 0 or step == settings.steps:
                        found = self.divergence(held_out)
                        bar.set_description(f"divergence {before:.4f} -> {found:.4f}")
                        if found < best:
                            state = [each.detach().clone() for each in trained]
                            kept, best, kept_step = state, found, step
        except KeyboardInterrupt:
            if not kept_step:
                raise
            logger.warning(
                "Interrupted after %d of %d steps. Writing the state after step %d, the best on"
                " held-out windows; interrupt again to write nothing",
                *(done, settings.steps, kept_step),
            )
        with torch.no_grad():
            for each, value in zip(trained, kept, strict=True):
                each.copy_(value)
        return Trained(before=before, after=best, kept_step=kept_step, steps=done)

    def _backward(self, rows: torch.Tensor) -> None:
        """Accumulate the gradients of the mean divergence on these windows."""
        states = self._forward(rows)
        last_BSD = states.pop()
        taught_BSD = self.taught_WSD[rows].to(self.student.device)
        counts_BS = self.counts_WS[rows].to(self.student.device)
        gradient_BSD = torch.zeros_like(last_BSD, dtype=torch.float32)
        gradients = []
        parts = (each[counts_BS].split(ROWS) for each in (last_BSD, taught_BSD))
        for own_RD, taught_RD in zip(*parts, strict=True):
            own_RD = own_RD.detach().requires_grad_()
            own_RV = self.student.logits(own_RD, grad=True)
            (_divergence(own_RV, self.teacher.logits(taught_RD)) / counts_BS.sum()).backward()
            gradients.append(own_RD.grad.float())
        gradient_BSD[counts_BS] = torch.cat(gradients)
        for layer in reversed(self.student.layers):
            inputs_BSD = states.pop().requires_grad_()
            outputs_BSD = layer.run(inputs_BSD, grad=True, media=self._media_of(rows))
            outputs_BSD.backward(gradient_BSD.to(outputs_BSD.dtype))
            gradient_BSD = inputs_BSD.grad


def _divergence(own_RV: torch.Tensor, taught_RV: torch.Tensor) -> torch.Tensor:
    """Sum over rows of KL(taught || own)."""
    return functional.kl_div(
        own_RV.float().log_softmax(-1),
        taught_RV.float().log_softmax(-1),
        log_target=True,
        reduction="sum",
    )
