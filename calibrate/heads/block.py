"""DFlash or DSpark head as a torch module, for training and calibration.

A block begins at an anchor position. Its first row has the anchor's token, the other rows have the
mask token. Rows attend to the target's states before the anchor, and to their own block
(arXiv 2602.06036).

Legend:
B: windows, S: tokens of a window, A: anchors, N: rows of a block, Q: A * N rows, K: drafts
C: hidden size, F: inputs of `fc`, D: head dim
V: target vocabulary, U: draft vocabulary
"""

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn import functional

from calibrate.heads.eagle3 import Mlp, RmsNorm, rotary_of, rotated
from calibrate.heads.losses import cross_entropy, weights_after
from formats.heads import tensors as names
from formats.heads.block_config import BlockAttention, BlockConfig

CosSin = tuple[torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    """Attention in which the rows of a block attend to the context and to their block."""

    def __init__(self, config: BlockConfig, present: frozenset[str]) -> None:
        super().__init__()
        C, self.head_dim = config.hidden_size, config.head_dim
        q, kv = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(C, q, bias="q_proj" in present)
        self.k_proj = nn.Linear(C, kv, bias="k_proj" in present)
        self.v_proj = nn.Linear(C, kv, bias="v_proj" in present)
        self.o_proj = nn.Linear(q, C, bias="o_proj" in present)
        if "q_norm" in present:
            self.q_norm = RmsNorm(self.head_dim, config.norm_eps)
            self.k_norm = RmsNorm(self.head_dim, config.norm_eps)

    def forward(
        self,
        x_BQC: torch.Tensor,
        context_BSC: torch.Tensor,
        cos_sin: CosSin,  # for the positions of the context, then of the rows
        seen: torch.Tensor,  # bool [Q, S + Q]
    ) -> torch.Tensor:
        count, both = x_BQC.shape[1], torch.cat([context_BSC, x_BQC], 1)
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj, x in ((self.q_proj, x_BQC), (self.k_proj, both), (self.v_proj, both))
        )
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q = rotated(q, *(each[:, -count:] for each in cos_sin))
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        out = functional.scaled_dot_product_attention(q, rotated(k, *cos_sin), v, attn_mask=seen)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Decoder layer whose attention also reads the context."""

    def __init__(self, config: BlockConfig, present: frozenset[str]) -> None:
        super().__init__()
        C, eps = config.hidden_size, config.norm_eps
        self.self_attn, self.mlp = Attention(config, present), Mlp(config, present)
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(C, eps), RmsNorm(C, eps)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, cos_sin: CosSin, seen: torch.Tensor
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, cos_sin, seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """DSpark's bias on a draft's logits, which depends on the preceding token."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        R, C, self.kind = config.markov_rank, config.hidden_size, config.markov_type
        self.markov_w1 = nn.Embedding(config.vocab_size, R)
        self.markov_w2 = nn.Linear(R, config.draft_vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.1)
        nn.init.zeros_(self.markov_w2.weight)  # begins without a bias
        if self.kind == "gated":
            self.gate_proj = nn.Linear(C + R, R)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * R + C, 3 * R)

    def forward(self, before_BAK: torch.Tensor, read_BAKC: torch.Tensor) -> torch.Tensor:
        """Return the bias [B, A, K, U] of the drafts that follow the tokens `before_BAK`."""
        x = self.markov_w1(before_BAK).to(read_BAKC.dtype)
        if self.kind == "gated":
            x = x * torch.sigmoid(self.gate_proj(torch.cat([read_BAKC, x], -1)))
        elif self.kind == "rnn":
            state, found = torch.zeros_like(x[..., 0, :]), []
            for index in range(x.shape[2]):
                inputs = [state, x[..., index, :], read_BAKC[..., index, :]]
                gate, new, out = self.joint_proj(torch.cat(inputs, -1)).chunk(3, -1)
                share = torch.sigmoid(gate)
                state = share * state + (1 - share) * torch.tanh(new)
                found.append(torch.tanh(out))
            x = torch.stack(found, 2)
        return self.markov_w2(x)


class BlockModule(nn.Module):
    """DFlash or DSpark head; `state_dict()` has the names of formats/heads/tensors.py."""

    def __init__(
        self,
        config: BlockConfig,
        embedding_VC: torch.Tensor,
        present: frozenset[str] = frozenset(("q_norm", "k_norm")),
    ) -> None:
        """`embedding_VC`: the target's embedding, or the head's own.

        `present`: the biases and per-head norms that exist, by the last part of the module's name.
        """
        super().__init__()
        self.config = config
        C, eps = config.hidden_size, config.norm_eps
        self.fc = nn.Linear(names.fc_inputs(config), C, bias="fc" in present)
        self.hidden_norm, self.norm = RmsNorm(C, eps), RmsNorm(C, eps)
        self.layers = nn.ModuleList(Layer(config, present) for _ in range(config.num_layers))
        self.lm_head = nn.Linear(C, config.draft_vocab_size, bias=False)
        if config.markov_rank:
            self.markov_head = MarkovHead(config)
        # In lists, so that they are neither trained nor saved
        self.embedding, self._rotary = [embedding_VC], [rotary_of(config)]
        self.mask_embedding: torch.Tensor | None = None

    def forward(
        self, ids_BS: torch.Tensor, aux_BSF: torch.Tensor, anchors_A: torch.Tensor, num_drafts: int
    ) -> torch.Tensor:
        """Return logits [B, A, K, U]; draft d predicts the token d + 1 after the anchor."""
        config, S = self.config, ids_BS.shape[1]
        first = 0 if config.samples_anchor else 1
        A, N, device = len(anchors_A), first + num_drafts, aux_BSF.device
        ids_BAN = ids_BS.new_full((len(ids_BS), A, N), config.mask_token_id)
        ids_BAN[:, :, 0] = ids_BS[:, anchors_A]
        x = functional.embedding(ids_BAN.flatten(1), self.embedding[0]).to(aux_BSF.dtype)
        if self.mask_embedding is not None:
            is_mask_Q1 = (torch.arange(A * N, device=device) % N > 0)[:, None]
            x = torch.where(is_mask_Q1, self.mask_embedding.to(x), x)
        x = x * config.embedding_factor
        offsets_N = torch.arange(N, device=device)
        positions_Q = (anchors_A[:, None] + offsets_N).flatten()
        positions = torch.cat([torch.arange(S, device=device), positions_Q])
        cos_sin = self._rotary[0].to(device)(aux_BSF, positions[None])
        context_BSC = self.hidden_norm(self.fc(aux_BSF))
        for layer, attention in zip(self.layers, config.attentions, strict=True):
            seen = seen_keys(attention, config.block_size, anchors_A, N, S)
            x = layer(x, context_BSC, cos_sin, seen)
        read_BAKC = self.norm(x).unflatten(1, (A, N))[:, :, first:]
        logits = self.lm_head(read_BAKC) * config.logits_factor
        if config.logits_cap:
            logits = torch.tanh(logits / config.logits_cap) * config.logits_cap
        if config.markov_rank:
            before = ids_BS[:, anchors_A[:, None] + torch.arange(num_drafts, device=device)]
            logits = logits + self.markov_head(before, read_BAKC)
        return logits


def seen_keys(
    attention: BlockAttention, block_size: int, anchors_A: torch.Tensor, num_rows: int, length: int
) -> torch.Tensor:
    """Return the mask [Q, S + Q] of keys that each row of the blocks attends to."""
    A, N, device = len(anchors_A), num_rows, anchors_A.device
    block_Q = torch.arange(A, device=device).repeat_interleave(N)
    row_Q = torch.arange(N, device=device).repeat(A)
    anchor_Q1, own_Q1 = anchors_A[block_Q][:, None], (anchors_A[block_Q] + row_Q)[:, None]
    context_S = torch.arange(length, device=device)
    in_context = context_S < anchor_Q1
    in_block = block_Q[:, None] == block_Q
    if attention.is_causal:
        in_block = in_block & (row_Q[:, None] >= row_Q)
    if attention.window is not None:
        first_Q1 = own_Q1 - attention.window + 1
        if not attention.is_causal:  # the window is counted from the end of the block
            first_Q1 = anchor_Q1 + N - attention.window - block_size
        in_context = in_context & (context_S >= first_Q1)
    return torch.cat([in_context, in_block], 1)


def even_anchors(length: int, num_drafts: int, most: int) -> torch.Tensor:
    """Return at most `most` evenly spaced anchors whose drafts lie within the window."""
    last = length - 1 - num_drafts
    return torch.linspace(min(1, last), last, min(most, max(1, last))).long()


def start_from_target(
    head: BlockModule, tensors: Mapping[str, torch.Tensor], draft_ids_U: torch.Tensor | None = None
) -> None:
    """Initialize the head's output matrix and last norm with the target's.

    The layers keep their random initial values, because rows of mask tokens get context only
    through them. `tensors`: the target's lm_head [V, C] and norm [C]. `draft_ids_U` None: the
    draft vocabulary is the target's.
    """
    rows = tensors["lm_head"] if draft_ids_U is None else tensors["lm_head"][draft_ids_U]
    with torch.no_grad():
        head.lm_head.weight.copy_(rows)
        head.norm.weight.copy_(tensors["norm"])


def block_losses(
    head: BlockModule,
    ids_BS: torch.Tensor,
    aux_BSF: torch.Tensor,
    target_BSV: torch.Tensor,
    anchors_A: torch.Tensor,
    *,
    num_drafts: int,
    draft_ids_U: torch.Tensor | None = None,
    after_errors: float = 1.0,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (loss, accuracy) of each draft, as `step_losses` of EAGLE-3 does.

    Accuracy is the fraction of anchors whose most likely token equals the target's. `after_errors`:
    weight of a block's losses after its first draft that is not the text's token.
    """
    logits_BAKU = head(ids_BS, aux_BSF, anchors_A, num_drafts)
    weights_BA = torch.ones(logits_BAKU.shape[:2], device=logits_BAKU.device)
    for draft in range(num_drafts):
        target_BAV, logits_BAU = target_BSV[:, anchors_A + draft], logits_BAKU[:, :, draft]
        yield cross_entropy(logits_BAU, target_BAV, draft_ids_U, weights_BA)
        ids_BA = ids_BS[:, anchors_A + draft + 1]
        weights_BA = weights_after(weights_BA, logits_BAU, ids_BA, draft_ids_U, after_errors)
