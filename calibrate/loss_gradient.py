"""Gradient of the model's loss with respect to each layer's output, one layer in memory at a time.

The forward pass runs through all layers and keeps their inputs; the backward pass runs from the
last layer to the first. Labels are drawn from the model's own predictions. For a small change of a
layer's output, the mean of (gradient . change)^2 is then twice the KL divergence that the change
causes in the predictions (Fisher information).

Legend: W windows, S tokens, D hidden size, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from calibrate.calibration.capture import HiddenStates
from calibrate.calibration.layer_runner import LayerRunner
from calibrate.calibration.vision import Media, predicted_WS
from calibrate.float_model import FloatModel
from calibrate.solvers.solving import LayerState


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGradient:
    """One layer of the float model: its tensors, inputs, outputs and the gradient of the loss."""

    layer: int
    state: LayerState
    inputs_WSD: torch.Tensor
    outputs_WSD: torch.Tensor  # float32
    gradient_WSD: torch.Tensor  # d loss / d outputs, float32; the loss is a sum over tokens

    def divergence(self, outputs_WSD: torch.Tensor) -> float:
        """Estimate the KL divergence, in nats per token, if the layer had these outputs."""
        change_WSD = outputs_WSD.float() - self.outputs_WSD
        return 0.5 * float((change_WSD * self.gradient_WSD).sum(-1).square().double().mean())


def layer_gradients(
    model: FloatModel,
    runner: LayerRunner,
    ids_WS: torch.Tensor,
    seed: int = 0,
    media: Media = (),
) -> Iterator[LayerGradient]:
    """Yield the gradient of every layer, from the last to the first.

    The inputs of all layers are in memory. `media`: images of each window, or (): no images.
    Predictions of image tokens are not part of the loss.
    """
    hidden = HiddenStates(ids_WS, model.get(model.layer_map.embedding), runner, media=media)
    inputs = []
    for layer in range(model.num_layers):
        inputs.append(hidden.states_WSD.clone())
        hidden.advance(runner, runner.build(layer, model.layer(layer, runner.device)), layer)
    counts_WS = predicted_WS(media, ids_WS.shape)
    gradient_WSD = _head_gradient(model, runner, hidden.states_WSD, counts_WS, seed)
    for layer in reversed(range(model.num_layers)):
        state = model.layer(layer, runner.device)
        module = runner.build(layer, state)
        outputs_WSD = torch.empty_like(gradient_WSD)
        before_WSD = torch.empty_like(gradient_WSD)
        for window in range(len(ids_WS)):
            rows = slice(window, window + 1)
            outputs_WSD[rows], before_WSD[rows] = _back(
                runner, module, layer, inputs[layer][rows], gradient_WSD[rows], media[rows]
            )
        yield LayerGradient(
            layer=layer,
            state=state,
            inputs_WSD=inputs.pop(),
            outputs_WSD=outputs_WSD,
            gradient_WSD=gradient_WSD,
        )
        gradient_WSD = before_WSD


def _back(
    runner: LayerRunner,
    module: nn.Module,
    layer: int,
    inputs_WSD: torch.Tensor,
    gradient_WSD: torch.Tensor,
    media: Media,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one layer forward and backward; return its outputs and the gradient of its inputs."""
    inputs_WSD = inputs_WSD.detach().to(runner.device).requires_grad_()
    outputs_WSD = runner.run(module, layer, inputs_WSD, grad=True, media=media)
    outputs_WSD.backward(gradient_WSD.to(outputs_WSD.dtype))
    return outputs_WSD.detach(), inputs_WSD.grad


def _head_gradient(
    model: FloatModel,
    runner: LayerRunner,
    hidden_WSD: torch.Tensor,
    counts_WS: torch.Tensor,
    seed: int,
) -> torch.Tensor:
    """Return d loss / d last layer's outputs, float32."""
    norm_D, head_VD = model.get(model.layer_map.last_norm), model.head()
    head_VD = head_VD.to(runner.device, runner.dtype)
    generator = torch.Generator().manual_seed(seed)
    gradients = []
    for hidden_SD, counts_S in zip(hidden_WSD, counts_WS, strict=True):
        hidden_SD = hidden_SD.detach().to(runner.device).requires_grad_()
        logits_SV = runner.final_logits(hidden_SD, norm_D, head_VD, grad=True).float()
        # Drawn on the CPU, so that labels do not depend on the device.
        chance_SV = logits_SV.detach().softmax(-1).cpu()
        label_S = torch.multinomial(chance_SV, 1, generator=generator).squeeze(-1)
        loss_S = torch.nn.functional.cross_entropy(
            logits_SV, label_S.to(logits_SV.device), reduction="none"
        )
        (loss_S * counts_S.to(loss_S.device)).sum().backward()
        gradients.append(hidden_SD.grad.float())
    return torch.stack(gradients)
