"""EAGLE-3 head as a torch module, for training and calibration (arXiv 2503.01840).

Row i of a window reads token i + 1 and the target's auxiliary hidden states of position i, and
predicts token i + 2. Training follows the paper's "training-time test": step j reads the state that
step j - 1 produced in the same row, and the next token.

Legend:
B: windows, S: tokens of a window, J: earlier steps
C: hidden size, F: inputs of `fc`, H: heads, D: head dim
V: target vocabulary, U: draft vocabulary
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from formats.architecture.rope_types import axes_of_pairs, one_axis
from formats.heads import tensors as names
from formats.heads.config import ROPE_KEYS, EagleConfig
from formats.heads.layers_config import LayersConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetImages:
    """Images of windows, as embedded by the target."""

    is_image_BS: torch.Tensor  # bool: tokens whose embeddings come from the vision tower
    rows_BSC: torch.Tensor  # the embeddings of these tokens; other rows are not read
    positions_3BS: torch.Tensor | None  # int64; None: plain positions 0, 1, ...


class RmsNorm(nn.Module):
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    """Causal attention over the rows of the first step, and over later steps of the same row."""

    def __init__(self, config: EagleConfig, ins: int, biases: frozenset[str]) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(ins, q, bias="q_proj" in biases)
        self.k_proj = nn.Linear(ins, kv, bias="k_proj" in biases)
        self.v_proj = nn.Linear(ins, kv, bias="v_proj" in biases)
        self.o_proj = nn.Linear(q, config.hidden_size, bias="o_proj" in biases)
        if "q_norm" in biases:
            self.q_norm = RmsNorm(self.head_dim, config.norm_eps)
            self.k_norm = RmsNorm(self.head_dim, config.norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        past: list[tuple[torch.Tensor, torch.Tensor]],
        seen_SS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention's output for x [B, S, inputs].

        `past`: keys and values [B, H, S, D] of earlier steps; this step's are appended. `seen_SS`:
        mask of keys that each row attends to, for a single step; None: causal.
        """
        B, S, _ = x.shape
        q, k, v = (
            proj(x).view(B, S, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotated(q, *cos_sin), rotated(k, *cos_sin)
        shared = self.num_heads // self.num_kv_heads
        k, v = (each.repeat_interleave(shared, 1) for each in (k, v))
        past.append((k, v))
        if seen_SS is not None:
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen_SS)
        elif len(past) == 1:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = _with_own_steps(q, past)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def _with_own_steps(
    q_BHSD: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Attention in which row i reads rows 0 to i of the first step, and row i of later steps."""
    (first_k, first_v), *later = past
    S, scale = q_BHSD.shape[2], q_BHSD.shape[3] ** -0.5
    scores_BHSS = q_BHSD @ first_k.transpose(2, 3) * scale
    future = torch.ones(S, S, dtype=torch.bool, device=q_BHSD.device).triu(1)
    scores_BHSS = scores_BHSS.masked_fill(future, float("-inf"))
    own_BHSJ = torch.stack([(q_BHSD * k).sum(-1) * scale for k, _ in later], -1)
    shares = torch.cat([scores_BHSS.float(), own_BHSJ.float()], -1).softmax(-1).to(first_v.dtype)
    out_BHSD = shares[..., :S] @ first_v
    for number, (_, v) in enumerate(later):
        out_BHSD = out_BHSD + shares[..., S + number, None] * v
    return out_BHSD


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [B, H, S, D] by cos and sin [1, S, D]. Channel i is paired with i + D / 2."""
    low, high = x.chunk(2, -1)
    turned = torch.cat([-high, low], -1)
    return (x * cos[:, None] + turned * sin[:, None]).to(x.dtype)


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LayersConfig, biases: frozenset[str]) -> None:
        super().__init__()
        C, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(C, inner, bias="gate_proj" in biases)
        self.up_proj = nn.Linear(C, inner, bias="up_proj" in biases)
        self.down_proj = nn.Linear(inner, C, bias="down_proj" in biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Decoder layer. The first one reads embedding and state; the others are as in Llama."""

    def __init__(self, config: EagleConfig, number: int, biases: frozenset[str]) -> None:
        super().__init__()
        C, eps = config.hidden_size, config.norm_eps
        self.is_first, self.norm_before_residual = number == 0, config.norm_before_residual
        self.self_attn = Attention(config, 2 * C if self.is_first else C, biases)
        self.mlp = Mlp(config, biases)
        self.input_layernorm = RmsNorm(C, eps)
        self.post_attention_layernorm = RmsNorm(C, eps)
        if self.is_first:
            self.hidden_norm = RmsNorm(C, eps)

    def forward(
        self,
        state_BSC: torch.Tensor,
        embedded_BSC: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        past: list[tuple[torch.Tensor, torch.Tensor]],
        seen_SS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.is_first:
            normed = self.hidden_norm(state_BSC)
            x = torch.cat([self.input_layernorm(embedded_BSC), normed], -1)
            residual = normed if self.norm_before_residual else state_BSC
        else:
            x, residual = self.input_layernorm(state_BSC), state_BSC
        residual = residual + self.self_attn(x, cos_sin, past, seen_SS)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle3Module(nn.Module):
    """EAGLE-3 head; `state_dict()` has the names of formats/heads/tensors.py."""

    def __init__(
        self, config: EagleConfig, embedding_VC: torch.Tensor, present: frozenset[str] = frozenset()
    ) -> None:
        """`embedding_VC`: the target's embedding, or the head's own.

        `present`: the biases and per-head norms that exist, by the last part of the module's name.
        """
        super().__init__()
        self.config = config
        C, eps = config.hidden_size, config.norm_eps
        self.fc = nn.Linear(names.fc_inputs(config), C, bias="fc" in present)
        if config.norm_before_fc:
            self.input_norm = RmsNorm(names.fc_inputs(config), eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RmsNorm(config.target_hidden_size, eps) for _ in range(config.num_aux)
            )
        self.layers = nn.ModuleList(
            Layer(config, number, present) for number in range(config.num_layers)
        )
        self.norm = RmsNorm(C, eps)
        self.lm_head = nn.Linear(C, config.draft_vocab_size, bias=False)
        # In lists, so that they are neither trained nor saved
        self.embedding = [embedding_VC]
        self._rotary = [rotary_of(config)]

    def fused(self, aux_BSF: torch.Tensor) -> torch.Tensor:
        """Project the target's auxiliary states [B, S, F] to the head's first state [B, S, C]."""
        if self.config.norm_before_fc:
            aux_BSF = self.input_norm(aux_BSF)
        if self.config.fc_norm:
            parts = aux_BSF.chunk(self.config.num_aux, -1)
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            aux_BSF = torch.cat(parts, -1)
        return self.fc(aux_BSF)

    def steps(
        self,
        ids_BS: torch.Tensor,
        aux_BSF: torch.Tensor,
        num_steps: int,
        images: TargetImages | None = None,
    ) -> Iterator[torch.Tensor]:
        """Yield the logits [B, S - 1 - j, U] of each step j: row i predicts token i + 2 + j.

        `images`: images of the windows. The config decides whether the head reads their embeddings
        and their positions.
        """
        B, S = ids_BS.shape
        embedded_BSC = functional.embedding(ids_BS, self.embedding[0]).to(aux_BSF.dtype)
        if images is not None and self.config.reads_images:
            rows_BSC = images.rows_BSC.to(embedded_BSC)
            embedded_BSC = torch.where(images.is_image_BS[..., None], rows_BSC, embedded_BSC)
        state_BSC = self.fused(aux_BSF)
        pasts: list[list] = [[] for _ in self.layers]
        for step in range(num_steps):
            shifted = torch.zeros_like(embedded_BSC)
            shifted[:, : S - 1 - step] = embedded_BSC[:, 1 + step :]
            cos_sin = self._cos_sin(step, aux_BSF, None if images is None else images.positions_3BS)
            for layer, past in zip(self.layers, pasts, strict=True):
                state_BSC = layer(state_BSC, shifted, cos_sin, past)
            normed_BSC = self.norm(state_BSC)
            yield self.lm_head(normed_BSC[:, : S - 1 - step])
            if self.config.norm_output:
                state_BSC = normed_BSC

    def rotary(
        self, like: torch.Tensor, positions_1S: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [1, S, D] of plain positions, in the dtype of `like`."""
        return self._rotary[0].to(like.device)(like, positions_1S)

    def _cos_sin(
        self, step: int, like_BSF: torch.Tensor, positions_3BS: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [B, S, D] of step j, in which row i has position i + j."""
        rotary, S, pairs = self._rotary[0].to(like_BSF.device), like_BSF.shape[1], ()
        if positions_3BS is not None:
            pairs = self.config.axis_pairs
        if not pairs:
            positions = torch.arange(step, S + step, device=like_BSF.device)[None]
            return rotary(like_BSF, positions)
        # the last rows have no token in this step
        shifted_3BS = positions_3BS.roll(-step, -1).to(like_BSF.device)
        axes = axes_of_pairs(
            pairs, self.config.head_dim // 2, is_interleaved=self.config.has_interleaved_axes
        )
        of_axes = [rotary(like_BSF, positions_BS) for positions_BS in shifted_3BS]
        columns = torch.arange(2 * len(axes), device=like_BSF.device)
        chosen = torch.tensor(axes * 2, device=like_BSF.device)
        cos_BSD, sin_BSD = (
            torch.stack(each)[chosen, ..., columns].movedim(0, -1)
            for each in zip(*of_axes, strict=True)
        )
        return cos_BSD, sin_BSD


def rotary_of(config: LayersConfig) -> nn.Module:
    """Build a head's rotary embedding with transformers' class."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    wanted = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
    rope = {key: config.values[key] for key in wanted if config.values.get(key) is not None}
    rope |= {key: one_axis(rope[key]) for key in ROPE_KEYS if key in rope}
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            head_dim=config.head_dim,
            **rope,
        )
    )


def start_from_target(
    head: Eagle3Module, tensors: Mapping[str, torch.Tensor], draft_ids_U: torch.Tensor | None
) -> None:
    """Initialize output matrix and last norm with the target's, and make the layers' outputs small.

    `tensors`: the target's lm_head [V, C] and norm [C]. `draft_ids_U` None: the draft vocabulary is
    the target's.
    """
    rows = tensors["lm_head"] if draft_ids_U is None else tensors["lm_head"][draft_ids_U]
    with torch.no_grad():
        if rows.shape[1] == head.lm_head.weight.shape[1]:
            head.lm_head.weight.copy_(rows)
            head.norm.weight.copy_(tensors["norm"])
        for layer in head.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.mul_(0.1)


def step_losses(
    head: Eagle3Module,
    ids_BS: torch.Tensor,
    aux_BSF: torch.Tensor,
    target_BSV: torch.Tensor,
    *,
    num_steps: int,
    draft_ids_U: torch.Tensor | None = None,
    images: TargetImages | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (loss, accuracy) of each step.

    The loss is the cross entropy with the target's distribution over the draft vocabulary. Accuracy
    is the fraction of rows whose most likely token equals the target's. If the target's most likely
    token is not in the draft vocabulary, the row has no loss but counts as wrong.
    """
    best_BS = target_BSV.argmax(-1)
    inside_BS = torch.ones_like(best_BS, dtype=torch.bool)
    if draft_ids_U is not None:
        inside_BS = torch.isin(best_BS, draft_ids_U)
        target_BSV = target_BSV[..., draft_ids_U]
    judged_BS = torch.ones_like(inside_BS)
    if images is not None:  # placeholders are never drafted
        judged_BS[:, :-1] = ~images.is_image_BS[:, 1:]
    for step, logits in enumerate(head.steps(ids_BS, aux_BSF, num_steps, images)):
        shift = 1 + step
        wanted = target_BSV[:, shift:].float().softmax(-1)
        counted = (inside_BS & judged_BS)[:, shift:]
        entropy = -(wanted * logits.float().log_softmax(-1)).sum(-1)
        loss = (entropy * counted).sum() / counted.sum().clamp(min=1)
        drawn = logits.argmax(-1)
        drawn = drawn if draft_ids_U is None else draft_ids_U[drawn]
        is_right = (drawn == best_BS[:, shift:])[judged_BS[:, shift:]]
        yield loss, is_right.float().mean()
