"""The Llama-like decoder: embedding, layers, norm, head. Knows a step's tensors, not requests.

Legend: T tokens of the step, S rows whose logits are wanted, C hidden size, V vocabulary.
"""

import torch
from torch.nn import functional

from qkernels import ops
from qkernels.linear import input_forms
from qkernels.linear.input_forms import LinearInput
from qkernels.operands.split_k import LinearOutput
from qserve.model.attention import Attention, LayerCache, StepInputs
from qserve.model.linear import Linear
from qserve.model.model_config import ModelConfig


class Mlp(torch.nn.Module):
    """SiLU-gated feed-forward, for the norm that follows; gate and up come from one matrix."""

    def __init__(self, gate_up_proj: Linear, down_proj: Linear) -> None:
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    def forward(self, x_TC: LinearInput) -> LinearOutput:
        hidden_T2I = self.gate_up_proj(x_TC)
        form = self.down_proj.input_form(hidden_T2I.shape[0])
        return self.down_proj(input_forms.silu_and_mul(hidden_T2I, form), "norm")


class Layer(torch.nn.Module):
    """One decoder layer."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        attention: Attention,
        mlp: Mlp,
        input_norm: torch.Tensor,
        post_norm: torch.Tensor,
    ) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.attention = attention
        self.mlp = mlp
        self.register_buffer("input_norm", input_norm)
        self.register_buffer("post_norm", post_norm)

    def forward(
        self,
        x_TC: LinearOutput,
        residual_TC: torch.Tensor | None,
        step: StepInputs,
        cache: LayerCache,
        cos_sin: torch.Tensor,
    ) -> tuple[LinearOutput, torch.Tensor]:
        """Returns what this layer adds, and the residual it is to be added to."""
        attention, mlp = self.attention, self.mlp
        x_TC, residual_TC = self._norm(x_TC, residual_TC, self.input_norm, attention.qkv_proj)
        x_TC = attention(x_TC, step, cache, cos_sin)
        x_TC, residual_TC = self._norm(x_TC, residual_TC, self.post_norm, mlp.gate_up_proj)
        return mlp(x_TC), residual_TC

    def _norm(
        self,
        x_TC: LinearOutput,
        residual_TC: torch.Tensor | None,
        weight_C: torch.Tensor,
        linear: Linear,
    ) -> tuple[LinearInput, torch.Tensor]:
        """The norm of the sum in the form that `linear` takes; the sum."""
        form = linear.input_form(x_TC.shape[0])
        if residual_TC is None:
            return input_forms.rms_norm(x_TC, weight_C, self.eps, form), x_TC
        return input_forms.add_rms_norm(x_TC, residual_TC, weight_C, self.eps, form)


class Decoder(torch.nn.Module):
    """A causal language model over paged keys and values."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding_VC: torch.Tensor,
        layers: list[Layer],
        norm: torch.Tensor,
        head: Linear,
        cos_sin: torch.Tensor,
    ) -> None:
        super().__init__()
        self.config = config
        self.layers = torch.nn.ModuleList(layers)
        self.head = head
        self.register_buffer("embedding", embedding_VC)
        self.register_buffer("norm", norm)
        self.register_buffer("cos_sin", cos_sin)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def forward(
        self, token_ids_T: torch.Tensor, step: StepInputs, caches: list[LayerCache]
    ) -> torch.Tensor:
        """Hidden states [T, C] after the final norm; writes the tokens' keys and values."""
        x_TC, residual_TC = functional.embedding(token_ids_T, self.embedding), None
        for layer, cache in zip(self.layers, caches, strict=True):
            x_TC, residual_TC = layer(x_TC, residual_TC, step, cache, self.cos_sin)
        return ops.add_rms_norm(x_TC, residual_TC, self.norm, self.config.rms_norm_eps)[0]

    def logits(self, hidden_SC: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] of hidden states [S, C]."""
        return self.head(hidden_SC)
