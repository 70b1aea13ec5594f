"""The Llama-like decoder: embedding, layers, norm, head. Knows a step's tensors, not requests.

Legend: T tokens of the step, S rows whose logits are wanted, C hidden size, V vocabulary.
"""

import torch
from torch.nn import functional

from qkernels import ops
from qkernels.linear.plan import LinearInput
from qkernels.operands.split_k import LinearOutput
from qserve.model.attention import Attention, LayerCache, StepInputs
from qserve.model.linear import Linear, LinearPlan
from qserve.model.model_config import ModelConfig


class Mlp(torch.nn.Module):
    """SiLU-gated feed-forward, for the norm that follows; gate and up come from one matrix."""

    def __init__(self, gate_up_proj: Linear, down_proj: Linear) -> None:
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    def forward(self, x_TC: LinearInput, plan: LinearPlan) -> LinearOutput:
        """`plan` is that of gate_up_proj, whose input the norm made."""
        hidden_T2I = self.gate_up_proj(x_TC, plan)
        down = self.down_proj.plan(hidden_T2I.shape[0], "norm")
        return self.down_proj(ops.silu_and_mul_into(hidden_T2I, down.input), down)


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
        attention, mlp, rows = self.attention, self.mlp, x_TC.shape[0]
        plan = attention.qkv_proj.plan(rows, "rope")
        x_TC, residual_TC = self._norm(x_TC, residual_TC, self.input_norm, plan)
        x_TC = attention(x_TC, plan, step, cache, cos_sin)
        plan = mlp.gate_up_proj.plan(rows)
        x_TC, residual_TC = self._norm(x_TC, residual_TC, self.post_norm, plan)
        return mlp(x_TC, plan), residual_TC

    def _norm(
        self,
        x_TC: LinearOutput,
        residual_TC: torch.Tensor | None,
        weight_C: torch.Tensor,
        plan: LinearPlan,
    ) -> tuple[LinearInput, torch.Tensor]:
        """The norm of the sum, in the form that the plan's product takes; the sum."""
        if residual_TC is None:
            return ops.rms_norm_into(x_TC, weight_C, self.eps, plan.input), x_TC
        return ops.add_rms_norm_into(x_TC, residual_TC, weight_C, self.eps, plan.input)


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
