"""Gemma 3n's layers, with AltUp and LAuReL.

AltUp: the model has several streams of hidden states, and a layer computes one of them. LAuReL: a
low-rank product runs in parallel with attention.

Baykal et al., "Alternating Updates for Efficient Transformers" (2023).

T: tokens of the step. C: hidden size. N: streams. Layers compute stream 0.
"""

import torch
from torch.nn import functional

from qkernels import ops
from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import LinearOutput, reduced
from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.gemma.layer_inputs import LayerInput
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.linear import Linear, LinearPlan, Product, products_of
from qserve.model.blocks.norm import Norm
from qserve.model.cache_spec import Cache
from qserve.parallel.communicator import Communicator

MIN_SQUARE = 1e-5  # lower limit of a stream's mean square


def _as_large_as(x_TC: torch.Tensor, target_TC: torch.Tensor) -> torch.Tensor:
    """Scale each row of x to the root mean square of the target's row."""
    root_T1 = target_TC.square().mean(-1, keepdim=True).sqrt()
    return x_TC * root_T1 / x_TC.square().mean(-1, keepdim=True).clamp(min=MIN_SQUARE).sqrt()


class Streams(torch.nn.Module):
    """Splits embeddings into streams [T, N C], and merges the last layer's streams."""

    def __init__(self, into: list[torch.Tensor], back: list[torch.Tensor]) -> None:
        """`into`, `back`: matrices [C, C] for streams 1, 2, ..."""
        super().__init__()
        self.register_buffer("into", torch.stack(into))
        self.register_buffer("back", torch.stack(back))

    def split(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Return the streams, [T, N C]."""
        others = [_as_large_as(functional.linear(x_TC, matrix), x_TC) for matrix in self.into]
        return torch.cat([x_TC, *others], dim=1)

    def merge(self, x_TNC: torch.Tensor) -> torch.Tensor:
        """Return the mean of all streams, [T, C]."""
        first, *others = x_TNC.chunk(len(self.back) + 1, dim=1)
        made = [
            _as_large_as(functional.linear(x_TC, matrix), first)
            for x_TC, matrix in zip(others, self.back, strict=True)
        ]
        return torch.stack([first, *made]).mean(0)


class AltUp(torch.nn.Module):
    """Predicts all streams before a layer; corrects them with the layer's result for stream 0."""

    def __init__(
        self,
        *,
        router_norm: Norm,
        modality_router: torch.Tensor,  # [N, C]
        prediction_coefs: torch.Tensor,  # [N N, N]
        correction_coefs: torch.Tensor,  # [N, N]
    ) -> None:
        super().__init__()
        self.router_norm = router_norm
        self.register_buffer("modality_router", modality_router)
        self.register_buffer("prediction_coefs", prediction_coefs)
        self.register_buffer("correction_coefs", correction_coefs)

    def _modalities(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Return the router's output, [T, N]."""
        normed_TC, _ = self.router_norm(x_TC, None, None)
        routed = functional.linear(normed_TC * x_TC.shape[1] ** -1.0, self.modality_router)
        return torch.tanh(routed.float()).to(x_TC.dtype)

    def predict(self, x_TNC: torch.Tensor) -> torch.Tensor:
        """Return the predicted streams [T, N, C]: the streams plus a mixture of them."""
        num_streams = x_TNC.shape[1]
        coefs = functional.linear(self._modalities(x_TNC[:, 0]), self.prediction_coefs)
        return torch.baddbmm(x_TNC, coefs.unflatten(1, (num_streams, num_streams)), x_TNC)

    def correct(self, predicted_TNC: torch.Tensor, computed_TC: torch.Tensor) -> torch.Tensor:
        """Return the corrected streams [T, N, C]: each moves by a multiple of stream 0's change."""
        coefs_TN = functional.linear(self._modalities(computed_TC), self.correction_coefs) + 1.0
        innovation_TC = computed_TC - predicted_TNC[:, 0]
        return predicted_TNC + coefs_TN[..., None] * innovation_TC[:, None]


class Laurel(torch.nn.Module):
    """x + norm(right(left(x)))."""

    def __init__(self, *, left: torch.Tensor, right: torch.Tensor, norm: Norm) -> None:
        super().__init__()
        self.register_buffer("left", left)
        self.register_buffer("right", right)
        self.norm = norm

    def forward(self, x_TC: torch.Tensor) -> torch.Tensor:
        low = functional.linear(functional.linear(x_TC, self.left), self.right)
        return x_TC + self.norm(low, None, None)[0]


class AltUpLayer(Layer):
    """A layer of Gemma 3n. It takes and returns streams [T, N C] and no residual."""

    def __init__(
        self,
        *,
        altup: AltUp,
        laurel: Laurel,
        output_scale: torch.Tensor,  # [C]: scales stream 0 before layer_input reads it
        layer_input: LayerInput,
        **blocks: object,
    ) -> None:
        """`blocks`: arguments of Layer."""
        super().__init__(**blocks)
        self.altup, self.laurel, self.layer_input = altup, laurel, layer_input
        self.register_buffer("output_scale", output_scale)
        self._sum = Norm(None, 0.0)

    def forward(
        self,
        x_TC: torch.Tensor,
        residual_TC: torch.Tensor | None,
        step: StepInputs,
        cache: Cache,
        aux_states: list[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Run the layer, as Layer.forward does. `aux_states` gets the predicted stream 0."""
        streams_TNC = x_TC.unflatten(1, (-1, len(self.output_scale)))
        predicted_TNC = self.altup.predict(streams_TNC)
        active_TC = predicted_TNC[:, 0].contiguous()
        if aux_states is not None:
            aux_states.append(active_TC)
        normed_TC, _ = self.attention_norm(active_TC, None, None)
        beside_TC = self.laurel(normed_TC)
        plan = self.attention.plan(x_TC.shape[0])
        attended = self.attention(ops.in_form(normed_TC, plan.input), plan, step, cache)
        _, attended_TC = self._sum(self.attention_end(attended), active_TC, None)
        mixed_TC = (attended_TC + beside_TC) * 2**-0.5
        plan = self.mlp.plan(x_TC.shape[0])
        read, _ = self.mlp_norm(mixed_TC, None, plan.input)
        _, computed_TC = self._sum(self.mlp_end(self.mlp(read, plan)), mixed_TC, None)
        corrected_TNC = self.altup.correct(predicted_TNC, computed_TC)
        first_TC = corrected_TNC[:, 0] * self.output_scale
        added_TC = self.layer_input(first_TC, step.layer_input_TP, torch.zeros_like(first_TC))
        others_TNC = corrected_TNC[:, 1:] + added_TC[:, None]
        return torch.cat([corrected_TNC[:, :1], others_TNC], dim=1).flatten(1), None


class SparseMlp(torch.nn.Module):
    """down(gelu(relu(gate(x) - cutoff)) * up(x)), in plain torch between the linears.

    The cutoff of a token sets a fraction `sparsity` of its gates to 0, assuming that the gates are
    normally distributed.
    """

    def __init__(
        self,
        *,
        up_proj: Linear,
        down_proj: Linear,
        sparsity: float,
        total: int,  # number of gates of all ranks
        communicator: Communicator | None = None,  # None: this rank has all gates
    ) -> None:
        super().__init__()
        self.up_proj, self.down_proj = up_proj, down_proj
        self.total, self.communicator = total, communicator
        self.deviations = float(torch.special.ndtri(torch.tensor(sparsity, dtype=torch.float64)))

    def products(self) -> "list[Product]":
        """Return the quantized products, each with the operation that consumes its result."""
        return [*products_of(self.up_proj, None), *products_of(self.down_proj, "norm")]

    def plan(self, rows: int) -> LinearPlan:
        """Return the plan of the first linear, which sets the output form of the norm before it."""
        return self.up_proj.plan(rows)

    def forward(self, x_TC: LinearInput, plan: LinearPlan) -> LinearOutput:
        """Return the block's result, the input of the next norm."""
        gate_TI, up_TI = reduced(self.up_proj(x_TC, plan)).chunk(2, dim=1)
        gate = gate_TI.float()
        mean_T1 = self._mean(gate)
        cutoff_T1 = mean_T1 + self.deviations * self._mean((gate - mean_T1).square()).sqrt()
        kept_TI = functional.gelu(functional.relu(gate - cutoff_T1), approximate="tanh")
        down = self.down_proj.plan(gate_TI.shape[0], "norm")
        return self.down_proj(ops.in_form(kept_TI.to(up_TI.dtype) * up_TI, down.input), down)

    def _mean(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Return the mean of each row [T, 1] over the channels of all ranks."""
        if self.communicator is None:
            return x_TI.mean(-1, keepdim=True)
        return self.communicator.all_reduce(x_TI.sum(-1, keepdim=True)) / self.total
