"""Decoder layer built from a family's row, for families without a class in transformers.

It takes the arguments of transformers' layers. Modules have the names of the row, so checkpoints
load as they are and every matrix is a linear that can have hooks.

Legend: B windows, S tokens of a window, T tokens of all windows, D hidden size, H heads, d head
size, G groups of experts, E experts, C choices of a token.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from calibrate.calibration.row_mixers import (
    check_lightning,
    latent_attention,
    lightning_attention,
    mamba_2,
    rotated_halves,
)
from formats.architecture.experts import Router
from formats.architecture.family import Family
from formats.architecture.flags import is_set
from formats.architecture.projection import Projection
from formats.architecture.sizes import size
from formats.numerics.alibi import alibi_slopes

STATES = {"lightning attention": lightning_attention, "Mamba-2": mamba_2}


class OffsetNorm(nn.Module):
    """RMS norm whose weight is stored minus an offset."""

    def __init__(self, size: int, eps: float, offset: float) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.empty(size)), eps, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.float() + self.offset
        return functional.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


class RowLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the MLP may be experts.

    With four norms, two of them come after attention and MLP.
    """

    def __init__(self, family: Family, config: Mapping[str, Any], layer: int) -> None:
        """`config`: config.json with defaults filled in."""
        super().__init__()
        self.family, self.config, self.layer = family, config, layer
        sizes = family.sizes(config)
        self.heads, self.kv_heads = family.heads_of_layer(layer, config)
        self.head_dim = sizes["head_dim"]
        blocks, eps = family.blocks(config, layer), family.norm_eps(config)
        for linear in family.linears_of(config, layer):
            if not _is_routed(linear.name, family):
                N, K = (size(names, sizes) for names in linear.shape)
                self._add(linear.name, nn.Linear(K, N, bias=is_set(linear.bias, config)))
        assert family.norm_kind == "rms"
        self.norms = [
            norm for norm in family.norms if is_set(norm.present, config) and norm.is_in(blocks)
        ]
        for norm in self.norms:
            offset = family.norm_offset if norm.offset is None else norm.offset
            self._add(norm.name, OffsetNorm(sizes[norm.size], eps, offset))
        self.has_state = blocks.state
        if blocks.state:
            check_lightning(config, family)
            for name, shape in family.state_mixer.tensors(config).items():
                values = torch.empty([size(names, sizes) for names in shape])
                self._add(name, nn.Parameter(values))
        if blocks.attention:
            for name, shape in family.head_norms.values():
                values = torch.empty([size(names, sizes) for names in shape])
                self._add(name, nn.Parameter(values))
        self.mixture = family.experts if blocks.experts else None
        if self.mixture is not None:
            for name, shape in self.mixture.tensors(config).items():
                values = torch.empty([size(names, sizes) for names in shape])
                self._add(name, nn.Parameter(values))
        key = family.activation_key
        self.activation = ACT2FN[config[key] if key else family.activations[0]]

    def _add(self, name: str, value: nn.Module | nn.Parameter) -> None:
        """Add a module or a parameter under a name with dots."""
        *parents, leaf = name.split(".")
        module: nn.Module = self
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, nn.Module())
            module = getattr(module, parent)
        setattr(module, leaf, value)

    def forward(
        self,
        hidden_BSD: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        past_key_values: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        before, after, before_mlp, after_mlp = self._stream_norms()
        x_BSD, o = before(hidden_BSD), self.family.o
        if self.has_state:
            o = self.family.state_mixer.out
            mixer = STATES[self.family.state_mixer.kind]
            made_BSN = mixer(self, self.family, self.config, x_BSD, position_embeddings)
        elif self.family.latent:
            made_BSN = latent_attention(
                *(self, self.family, self.config, x_BSD),
                *(position_embeddings, attention_mask, past_key_values),
            )
        else:
            made_BSN = self._attended(x_BSD, attention_mask, position_embeddings, past_key_values)
        hidden_BSD = hidden_BSD + after(self._linear(o)(made_BSN))
        return hidden_BSD + after_mlp(self._feed_forward(before_mlp(hidden_BSD)))

    def _attended(
        self,
        x_BSD: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        past_key_values: Any,
    ) -> torch.Tensor:
        """Return attention before its last linear, [B, S, N]."""
        queries, keys, values = self._heads(x_BSD)
        of_heads = [norm.name for norm in self.norms if norm.size == "head_dim"]
        if of_heads:
            norm_q, norm_k = map(self.get_submodule, of_heads)
            queries, keys = norm_q(queries), norm_k(keys)
        elif self.family.head_norms:
            queries, keys = (
                self._normed_heads(queries, "q_norm"),
                self._normed_heads(keys, "k_norm"),
            )
        if position_embeddings is not None:
            queries, keys = (rotated_halves(x, *position_embeddings) for x in (queries, keys))
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.layer)
        if self.family.alibi:
            attention_mask = self._alibi(attention_mask)
        attended_BHSd = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            enable_gqa=self.heads != self.kv_heads,
        )
        return attended_BHSd.transpose(1, 2).flatten(2)

    def _normed_heads(self, x_BHSd: torch.Tensor, name: str) -> torch.Tensor:
        """Norm each head, then multiply it by its own weights."""
        weight_Hd = self.get_parameter(self.family.head_norms[name][0])
        eps = self.family.norm_eps(self.config)
        normed = functional.rms_norm(x_BHSd, weight_Hd.shape[1:], eps=eps)
        return normed * weight_Hd[:, None]

    def _stream_norms(self) -> list[nn.Module]:
        """Return the norms before and after attention, and before and after the MLP."""
        found = [norm.name for norm in self.norms if norm.size == "hidden_size"]
        modules = [self.get_submodule(name) for name in found]
        if len(modules) == 4:
            return modules
        first, second = modules
        return [first, nn.Identity(), second, nn.Identity()]

    def _linear(self, projection: Projection) -> nn.Module:
        (linear,) = projection.linears
        return self.get_submodule(linear.name)

    def _heads(self, x_BSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, [B, heads, S, d]."""
        qkv, counts = self.family.qkv, [self.heads, self.kv_heads, self.kv_heads]
        made = [self.get_submodule(linear.name)(x_BSD) for linear in qkv.linears]
        parts_BSHd = torch.cat(made, -1).unflatten(-1, (-1, self.head_dim))
        if qkv.by_head:
            of_kv_head = [self.heads // self.kv_heads, 1, 1]
            by_head = parts_BSHd.unflatten(2, (self.kv_heads, -1)).split(of_kv_head, 3)
            parts = [part.flatten(2, 3) for part in by_head]
        else:
            parts = parts_BSHd.split(counts, 2)
        queries, keys, values = (part.transpose(1, 2) for part in parts)
        return queries, keys, values

    def _alibi(self, mask_11SS: torch.Tensor) -> torch.Tensor:
        """Return the mask with ALiBi's biases, [1, H, S, S]."""
        slopes_H = torch.tensor(alibi_slopes(self.heads)).to(mask_11SS)
        ids_S = torch.arange(mask_11SS.shape[-1]).to(mask_11SS)
        return mask_11SS + slopes_H[:, None, None] * (ids_S - ids_S[:, None])

    def _feed_forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        if self.mixture is None:
            return self._gated(self.family.gate_up, self.family.down, x_BSD)
        mixture, x_TD = self.mixture, x_BSD.flatten(0, 1)
        module, rule = self.get_submodule(mixture.module), mixture.routing
        weight_ED = self.get_parameter(f"{mixture.router}.weight")
        correction_E = None
        if rule.correction:
            correction_E = self.get_parameter(f"{mixture.module}.{rule.correction}")
        logits_TE = functional.linear(x_TD.float(), weight_ED.float())
        routed_TD = module.experts(x_TD, *routes(logits_TE, rule, self.config, correction_E))
        routed_BSD = routed_TD.view_as(x_BSD)
        if mixture.shared is None:
            return routed_BSD
        return routed_BSD + self._gated(mixture.shared.gate_up, mixture.shared.down, x_BSD)

    def _gated(self, gate_up: Projection, down: Projection, x_BSD: torch.Tensor) -> torch.Tensor:
        made = [self.get_submodule(linear.name)(x_BSD) for linear in gate_up.linears]
        gate, up = torch.cat(made, -1).chunk(2, -1)
        return self._linear(down)(self.activation(gate) * up)


def _is_routed(name: str, family: Family) -> bool:
    """Return True for a linear of a routed expert, which calibration adds (modules.Experts)."""
    return family.experts is not None and name.startswith(f"{family.experts.stem}.")


def routes(
    logits_TE: torch.Tensor,
    rule: Router,
    config: Mapping[str, Any],
    correction_E: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's experts and their routing weights, both [T, C]."""
    scores_TE = logits_TE.softmax(-1) if rule.scores == "softmax" else logits_TE.sigmoid()
    choice_TE = scores_TE if correction_E is None else scores_TE + correction_E
    if rule.group_score and is_set(rule.grouped, config):
        groups_TGE = choice_TE.unflatten(-1, (config["n_group"], -1))
        best = {"max": 1, "top2": 2}[rule.group_score]
        score_TG = groups_TGE.topk(best, -1).values.sum(-1)
        chosen_TG = torch.zeros_like(score_TG, dtype=torch.bool)
        chosen_TG.scatter_(1, score_TG.topk(config["topk_group"], -1).indices, True)
        choice_TE = groups_TGE.masked_fill(~chosen_TG[..., None], -torch.inf).flatten(1)
    experts_TC = choice_TE.topk(config["num_experts_per_tok"], -1).indices
    shares_TC = scores_TE.gather(1, experts_TC)
    if is_set(rule.normalized, config):
        shares_TC = shares_TC / shares_TC.sum(-1, keepdim=True)
    return experts_TC, shares_TC * config.get(rule.factor_key, 1.0)
