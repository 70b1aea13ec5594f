"""Training by the divergence of the student's predictions from the float model's.

Chen et al., "EfficientQAT: Efficient Quantization-Aware Training for Large Language Models" (2024),
second stage: codes are fixed and scales are trained end to end; here on the Kullback-Leibler
divergence instead of the next token, and with the weights of norms. One layer's activations are
kept at a time: the forward pass keeps the layers' inputs, the backward pass runs each layer again.

Legend: W windows, B windows of a step, S tokens of a window, R rows, D hidden size, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional
from tqdm import tqdm

from calibrate.calibration.capture import HiddenStates, LayerRunner
from calibrate.distillation.student import Student
from calibrate.float_model import FloatModel

HELD_EVERY = 8  # one window in this many is held out
CHECKS = 8  # comparisons on the held-out windows during training
ROWS = 512  # positions whose logits exist at a time
BETAS = (0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """Steps and rates of training. Rates decay to 0."""

    steps: int = 200
    tokens: int = 4096  # per step
    rate: float = 0.002  # of scales, relative to them
    norm_rate: float = 0.0005  # of norms' weights, relative to their factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Divergence on held-out windows in nats per token, before and after training."""

    before: float
    after: float  # of the kept state
    kept_step: int  # 0: no state was better than the first


class Teacher:
    """The float model's last hidden states of all windows, and its head."""

    def __init__(self, model: FloatModel, ids_WS: torch.Tensor, device: str) -> None:
        """Run the model, one layer in memory at a time."""
        names = model.layer_map
        self.runner = LayerRunner(model, names, device)
        hidden = HiddenStates(ids_WS, model.get(names.embedding), self.runner)
        for layer in range(model.num_layers):
            module = self.runner.build(layer, model.layer(layer, device))
            hidden.advance(self.runner, module, layer)
        self.last_WSD = hidden.states_WSD
        self.norm_D = model.get(names.last_norm).to(device)
        self.head_VD = model.head().to(device, self.runner.dtype)

    def logits(self, rows_RD: torch.Tensor) -> torch.Tensor:
        return self.runner.final_logits(rows_RD, self.norm_D, self.head_VD)


class Training:
    """A student with the windows that it is trained on."""

    def __init__(self, student: Student, teacher: Teacher, ids_WS: torch.Tensor) -> None:
        self.student, self.teacher = student, teacher
        self.hidden_WSD = HiddenStates(ids_WS, student.embedding, student.runner).states_WSD
        self.norm_D = student.last_norm.to(student.device)
        self.head_VD = student.head.to(student.device, student.runner.dtype)
        held = min(HELD_EVERY, len(ids_WS))
        windows = torch.arange(len(ids_WS))
        self.held_out = windows[windows % held == held - 1]
        self.fitted = windows[windows % held != held - 1]

    def logits(self, rows_RD: torch.Tensor, grad: bool = False) -> torch.Tensor:
        return self.student.runner.final_logits(rows_RD, self.norm_D, self.head_VD, grad=grad)

    def last_states(self, window: int) -> torch.Tensor:
        """[S, D], outputs of the student's last layer for a window."""
        return self._forward(torch.tensor([window]))[-1][0]

    def run(self, settings: TrainingSettings, seed: int, progress: bool = True) -> Trained:
        """Train, then go back to the state with the least divergence on held-out windows."""
        layers = [layer.parameters() for layer in self.student.layers]
        scales, norms = ([p for layer in layers for p in layer[kind]] for kind in (0, 1))
        trained = [*scales, *norms]
        optimizer = torch.optim.Adam(
            [{"params": scales, "lr": settings.rate}, {"params": norms, "lr": settings.norm_rate}],
            betas=BETAS,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1 - step / settings.steps
        )
        before = best = self.divergence(self.held_out)
        kept, kept_step = [each.detach().clone() for each in trained], 0
        check_every = max(1, settings.steps // CHECKS)
        batch = max(1, settings.tokens // self.hidden_WSD.shape[1])
        generator = torch.Generator().manual_seed(seed)
        order = torch.empty(0, dtype=torch.long)
        with tqdm(total=settings.steps, unit="step", disable=not progress) as bar:
            for step in range(1, settings.steps + 1):
                while len(order) < batch:  # every window once before one repeats
                    drawn = torch.randperm(len(self.fitted), generator=generator)
                    order = torch.cat([order, self.fitted[drawn]])
                rows, order = order[:batch], order[batch:]
                self._backward(rows)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                bar.update()
                if step % check_every == 0 or step == settings.steps:
                    found = self.divergence(self.held_out)
                    bar.set_description(f"divergence {before:.4f} -> {found:.4f}")
                    if found < best:
                        best, kept_step = found, step
                        kept = [each.detach().clone() for each in trained]
        with torch.no_grad():
            for each, value in zip(trained, kept, strict=True):
                each.copy_(value)
        return Trained(before=before, after=best, kept_step=kept_step)

    def divergence(self, windows: torch.Tensor) -> float:
        """Mean KL(float model || student) in nats per token."""
        total = 0.0
        for window in windows.tolist():
            last_SD = self.last_states(window)
            rows = zip(last_SD.split(ROWS), self.teacher.last_WSD[window].split(ROWS), strict=True)
            for own_RD, wanted_RD in rows:
                total += float(_divergence(self.logits(own_RD), self.teacher.logits(wanted_RD)))
        return total / (len(windows) * self.hidden_WSD.shape[1])

    def _forward(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Inputs of all layers, and the outputs of the last."""
        states = [self.hidden_WSD[rows].to(self.student.device)]
        for layer in self.student.layers:
            states.append(layer.run(states[-1]))
        return states

    def _backward(self, rows: torch.Tensor) -> None:
        """Add the gradients of the mean divergence of these windows."""
        states = self._forward(rows)
        last_BSD = states.pop().requires_grad_()
        wanted_BSD = self.teacher.last_WSD[rows].to(self.student.device)
        count = last_BSD[..., 0].numel()
        parts = zip(
            last_BSD.flatten(0, 1).split(ROWS), wanted_BSD.flatten(0, 1).split(ROWS), strict=True
        )
        gradient_BSD = torch.zeros_like(last_BSD, dtype=torch.float32)
        places = gradient_BSD.flatten(0, 1).split(ROWS)
        for (own_RD, wanted_RD), place_RD in zip(parts, places, strict=True):
            own_RD = own_RD.detach().requires_grad_()
            loss = _divergence(self.logits(own_RD, grad=True), self.teacher.logits(wanted_RD))
            (loss / count).backward()
            place_RD.copy_(own_RD.grad)
        for layer in reversed(self.student.layers):
            inputs_BSD = states.pop().requires_grad_()
            outputs_BSD = layer.run(inputs_BSD, grad=True)
            outputs_BSD.backward(gradient_BSD.to(outputs_BSD.dtype))
            gradient_BSD = inputs_BSD.grad


def _divergence(own_RV: torch.Tensor, wanted_RV: torch.Tensor) -> torch.Tensor:
    """Sum over rows of KL(wanted || own)."""
    return functional.kl_div(
        own_RV.float().log_softmax(-1),
        wanted_RV.float().log_softmax(-1),
        log_target=True,
        reduction="sum",
    )
