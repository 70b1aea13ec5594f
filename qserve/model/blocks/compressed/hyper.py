"""Hyper-connections: several streams of hidden states, mixed before and after each block.

A block reads a weighted sum of the streams; its output, times one weight per stream, is added to a
mixture of the streams. The weights of a token come from its streams. The matrix that mixes streams
is normalized to rows and columns that sum to 1 (Sinkhorn's iterations). Weights are float32.

Xie et al., "mHC: Manifold-Constrained Hyper-Connections" (2026).

T: tokens of the step. C: hidden size. N: streams.
"""

from typing import NamedTuple

import torch
from torch.nn import functional

from qkernels.operands.split_k import reduced
from qserve.model.blocks.attention import StepInputs
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.norm import Norm
from qserve.model.cache_spec import Cache


class HyperWeights(NamedTuple):
    """Learned parameters, float32: a product with the streams, its scales and an offset."""

    fn: torch.Tensor  # [weights of a token, N C]
    base: torch.Tensor  # [weights of a token]
    scale: torch.Tensor  # one number per kind of weights


class _Mixes(torch.nn.Module):
    """The product with normalized streams, from which the weights of a token are computed."""

    def __init__(self, weights: HyperWeights, *, norm_eps: float, eps: float) -> None:
        super().__init__()
        self.norm_eps, self.eps = norm_eps, eps
        for name, tensor in weights._asdict().items():
            self.register_buffer(name, tensor)

    def mixes(self, x_TNC: torch.Tensor) -> torch.Tensor:
        """Return the product [T, weights of a token] in float32."""
        x_TX = x_TNC.flatten(1).float()
        root_T1 = (x_TX.square().mean(-1, keepdim=True) + self.norm_eps).rsqrt()
        return functional.linear(x_TX * root_T1, self.fn)


class HyperConnection(_Mixes):
    """Computes the weights of a token before a block."""

    def __init__(
        self, weights: HyperWeights, *, norm_eps: float, eps: float, iterations: int
    ) -> None:
        super().__init__(weights, norm_eps=norm_eps, eps=eps)
        self.iterations = iterations

    def forward(self, x_TNC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the block's input [T, C], and in float32 its output's weights and the mixture."""
        N = x_TNC.shape[1]
        kinds = [N, N, N * N]
        parts = zip(self.mixes(x_TNC).split(kinds, 1), self.base.split(kinds), strict=True)
        pre_TN, post_TN, comb_TX = (
            mixes * scale + base
            for (mixes, base), scale in zip(parts, self.scale.unbind(), strict=True)
        )
        pre_TN, post_TN = pre_TN.sigmoid() + self.eps, 2 * post_TN.sigmoid()
        comb_TNN = comb_TX.unflatten(1, (N, N)).softmax(-1) + self.eps
        comb_TNN = comb_TNN / (comb_TNN.sum(-2, keepdim=True) + self.eps)
        for _ in range(self.iterations - 1):
            comb_TNN = comb_TNN / (comb_TNN.sum(-1, keepdim=True) + self.eps)
            comb_TNN = comb_TNN / (comb_TNN.sum(-2, keepdim=True) + self.eps)
        input_TC = (pre_TN[..., None] * x_TNC).sum(1).to(x_TNC.dtype)
        return input_TC, post_TN, comb_TNN


class HyperStreams(_Mixes):
    """Copies embeddings to all streams, and merges the last layer's streams."""

    def split(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Return the streams, [T, N C]."""
        return x_TC.repeat(1, len(self.base))

    def merge(self, x_TX: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the streams, [T, C]."""
        x_TNC = x_TX.unflatten(1, (len(self.base), -1))
        pre_TN = (self.mixes(x_TNC) * self.scale + self.base).sigmoid() + self.eps
        return (pre_TN[..., None] * x_TNC).sum(1).to(x_TX.dtype)


class HyperLayer(Layer):
    """A layer with hyper-connections. It takes and returns streams [T, N C] and no residual."""

    def __init__(
        self, *, attention_hyper: HyperConnection, mlp_hyper: HyperConnection, **blocks: object
    ) -> None:
        """`blocks`: arguments of Layer."""
        super().__init__(**blocks)
        self.attention_hyper, self.mlp_hyper = attention_hyper, mlp_hyper
        self._sum = Norm(None, 0.0)

    def forward(
        self,
        x_TC: torch.Tensor,
        residual_TC: torch.Tensor | None,
        step: StepInputs,
        cache: Cache,
        aux_states: list[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Run the layer, as Layer.forward does. `aux_states` gets the input of attention."""
        x_TNC = x_TC.unflatten(1, (-1, self.attention_norm.weight.shape[0]))
        input_TC, post_TN, comb_TNN = self.attention_hyper(x_TNC)
        if aux_states is not None:
            aux_states.append(input_TC)
        plan = self.attention.plan(len(input_TC))
        normed_TC, _ = self.attention_norm(input_TC, None, plan.input)
        made_TC = reduced(self.attention(normed_TC, plan, step, cache))
        x_TNC = _added(x_TNC, made_TC, post_TN, comb_TNN)
        input_TC, post_TN, comb_TNN = self.mlp_hyper(x_TNC)
        plan = self.mlp.plan(len(input_TC))
        normed_TC, _ = self.mlp_norm(input_TC, None, plan.input)
        made = self.mlp(normed_TC, plan, token_ids_T=step.token_ids_T)
        _, made_TC = self._sum(self.mlp_end(made), torch.zeros_like(input_TC), None)
        return _added(x_TNC, made_TC, post_TN, comb_TNN).flatten(1), None


def _added(
    x_TNC: torch.Tensor, made_TC: torch.Tensor, post_TN: torch.Tensor, comb_TNN: torch.Tensor
) -> torch.Tensor:
    """Return the mixed streams plus a block's output, times its weight in each stream."""
    mixed_TNC = torch.bmm(comb_TNN.to(x_TNC.dtype).transpose(1, 2), x_TNC)
    return post_TN.to(x_TNC.dtype)[..., None] * made_TC[:, None] + mixed_TNC
