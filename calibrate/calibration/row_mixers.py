"""Mixers of RowLayer: latent attention, Ling's lightning attention and PLaMo 2's Mamba-2.

Legend: B windows, S tokens of a window, H heads, d head size, N state size of a channel.
K channels of a key, P of a key's part without RoPE, R with RoPE.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from formats.architecture.family import Family
from formats.architecture.rows.latent_parts import norm_of, queries_of
from formats.errors import InputError
from formats.numerics.alibi import alibi_slopes, ling_decay_factor

CosSin = tuple[torch.Tensor, torch.Tensor]  # cosines and sines [1, S, R]


def latent_attention(
    layer: nn.Module,
    family: Family,
    config: Mapping[str, Any],
    x_BSD: torch.Tensor,
    cos_sin: CosSin,
    mask: torch.Tensor | None,
    cache: Any,
) -> torch.Tensor:
    """Return latent attention before its last linear, [B, S, H d]."""
    H, P, R = (config[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    up = queries_of(family)
    first, second = (layer.get_submodule(linear.name) for linear in family.qkv.linears)
    queries = first(x_BSD)
    if up is not None:
        normed = layer.get_submodule(norm_of(family, "q_lora_rank"))(queries)
        queries = layer.get_submodule(up.name)(normed)
    latents, shared = second(x_BSD).split((config["kv_lora_rank"], R), -1)
    latents = layer.get_submodule(norm_of(family, "kv_lora_rank"))(latents)
    made = layer.get_submodule(family.latent[-1].name)(latents)
    q_BHSK, made_BHSK = (x.unflatten(-1, (H, -1)).transpose(1, 2) for x in (queries, made))
    rotated = rotated_neighbors(q_BHSK[..., P:], *cos_sin)
    q_BHSK = torch.cat([q_BHSK[..., :P], rotated], -1)
    key_BHSR = rotated_neighbors(shared[:, None], *cos_sin).expand(-1, H, -1, -1)
    keys, values = torch.cat([made_BHSK[..., :P], key_BHSR], -1), made_BHSK[..., P:]
    if cache is not None:
        keys, values = cache.update(keys, values, layer.layer)
    out_BHSd = functional.scaled_dot_product_attention(
        *(q_BHSK, keys, values),
        attn_mask=mask,
        is_causal=mask is None,
        scale=_score_scale(config, keys.shape[-1]),
    )
    return out_BHSd.transpose(1, 2).flatten(2)


def _score_scale(config: Mapping[str, Any], width: int) -> float:
    """Return the factor of scores: 1 / sqrt(width), times DeepSeek's factor of YaRN squared."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    factor, every = rope.get("factor"), rope.get("mscale_all_dim")
    if rope.get("rope_type", rope.get("type")) != "yarn" or not factor or not every:
        return width**-0.5
    return width**-0.5 * (0.1 * every * math.log(max(factor, 1.0)) + 1.0) ** 2


def rotated_neighbors(
    x_BHSR: torch.Tensor, cos_1SR: torch.Tensor, sin_1SR: torch.Tensor
) -> torch.Tensor:
    """Rotate channels 2 i and 2 i + 1 as a pair."""
    left, right = x_BHSR[..., ::2], x_BHSR[..., 1::2]
    half = x_BHSR.shape[-1] // 2
    cos, sin = cos_1SR[:, None, :, :half], sin_1SR[:, None, :, :half]
    rotated = [left * cos - right * sin, right * cos + left * sin]
    return torch.stack(rotated, -1).flatten(-2)


def check_lightning(config: Mapping[str, Any], family: Family) -> None:
    """Raise InputError if lightning attention and attention rotate different numbers of channels.

    All layers get one rotary table.
    """
    if not config.get("linear_rope", True) or not family.latent:
        return
    rotated = int(config["lightning_rotary_factor"] * config["linear_head_dim"])
    if rotated != config["qk_rope_head_dim"]:
        raise InputError(
            "config.json qk_rope_head_dim",
            f"lightning attention rotates {rotated} channels of a head, latent attention"
            f" {config['qk_rope_head_dim']}; calibration computes one rotary table for both",
            "use `recipe` rtn",
        )


def lightning_attention(
    layer: nn.Module,
    family: Family,
    config: Mapping[str, Any],
    x_BSD: torch.Tensor,
    cos_sin: CosSin,
) -> torch.Tensor:
    """Return lightning attention before its last linear, [B, S, H d]."""
    mixer, H, d = family.state_mixer, config["linear_num_heads"], config["linear_head_dim"]
    first, second = (layer.get_submodule(linear.name) for linear in mixer.inputs.linears)
    made = first(x_BSD)
    if config.get("use_linear_silu", config.get("linear_silu", False)):
        made = functional.silu(made)
    q, k, v_BHSd = (x.transpose(1, 2) for x in made.unflatten(-1, (3, H, d)).unbind(2))
    if config.get("use_qk_norm"):
        q, k = (_of_heads(layer, config, x, n) for x, n in ((q, "query"), (k, "key")))
    if config.get("linear_rope", True):
        q, k = (rotated_halves(x, *cos_sin) for x in (q, k))
    slopes_H = torch.tensor(alibi_slopes(H), device=x_BSD.device)
    rates_H = slopes_H * ling_decay_factor(layer.layer, config["num_hidden_layers"])
    ids_S = torch.arange(x_BSD.shape[1], device=x_BSD.device)
    back_SS = ids_S[:, None] - ids_S
    left_HSS = torch.exp(-rates_H[:, None, None] * back_SS.clamp_min(0)) * (back_SS >= 0)
    scores_BHSS = (q.float() * d**-0.5) @ k.float().mT * left_HSS
    out_BSN = (scores_BHSS @ v_BHSd.float()).transpose(1, 2).flatten(2)
    grouped = out_BSN.unflatten(-1, (config.get("group_norm_size", 1), -1))
    normed = functional.rms_norm(grouped, grouped.shape[-1:], eps=config["rms_norm_eps"])
    weight = layer.get_parameter(f"{mixer.module}.g_norm.weight")
    return (normed.flatten(2) * weight).to(x_BSD.dtype) * second(x_BSD).sigmoid()


def mamba_2(
    layer: nn.Module,
    family: Family,
    config: Mapping[str, Any],
    x_BSD: torch.Tensor,
    _: CosSin | None,
) -> torch.Tensor:
    """Return PLaMo 2's Mamba-2 before its last linear, [B, S, H d]. Heads share B and C."""
    mixer, H, N = family.state_mixer, config["mamba_n_heads"], config["mamba_d_state"]
    make_selection, make_dt = (layer.get_submodule(each.name) for each in mixer.selection)

    def tensor(name: str) -> torch.Tensor:
        return layer.get_parameter(f"{mixer.module}.{name}")

    z_BSHd, x_BSHd = (
        layer.get_submodule(mixer.inputs.name)(x_BSD).unflatten(-1, (H, 2, -1)).unbind(3)
    )
    taps_I1K = tensor("conv1d.weight")
    padded = functional.pad(x_BSHd.flatten(2).mT, (taps_I1K.shape[-1] - 1, 0))
    x_BSI = functional.silu(functional.conv1d(padded, taps_I1K, groups=len(taps_I1K)).mT)
    made = make_selection(x_BSI)
    b_BSN, c_BSN, dt = (
        functional.rms_norm(part, part.shape[-1:], tensor(f"{name}_norm_weight"), eps)
        for eps in (config["rms_norm_eps"],)
        for part, name in zip(
            made.split((N, N, made.shape[-1] - 2 * N), -1), ("B", "C", "dt"), strict=True
        )
    )
    dt_BSH = functional.softplus(make_dt(dt).float() + tensor("dt_bias").float())
    decays_BSH = (-tensor("A_log").float().exp() * dt_BSH).cumsum(1)
    x_BSHd = x_BSI.float().unflatten(-1, (H, -1))
    shares_BSS = c_BSN.float() @ b_BSN.float().mT
    ahead_SS = torch.ones_like(shares_BSS[0], dtype=torch.bool).triu(1)
    heads = []
    for head in range(H):  # one after the other: the matrices [S, S] of all heads are large
        decay_BS = decays_BSH[..., head]
        left = (decay_BS[:, :, None] - decay_BS[:, None]).masked_fill(ahead_SS, -torch.inf).exp()
        written_BSd = dt_BSH[:, :, head, None] * x_BSHd[:, :, head]
        heads.append((shares_BSS * left) @ written_BSd)
    out_BSHd = torch.stack(heads, 2) + tensor("D").float()[:, None] * x_BSHd
    return (out_BSHd * functional.silu(z_BSHd.float())).flatten(2).to(x_BSD.dtype)


def _of_heads(
    layer: nn.Module, config: Mapping[str, Any], x_BHSd: torch.Tensor, name: str
) -> torch.Tensor:
    module = layer.family.state_mixer.module
    weight = layer.get_parameter(f"{module}.{name}_layernorm.weight")
    return functional.rms_norm(x_BHSd, weight.shape, weight, config["rms_norm_eps"])


def rotated_halves(
    x_BHSd: torch.Tensor, cos_1Sr: torch.Tensor, sin_1Sr: torch.Tensor
) -> torch.Tensor:
    """Rotate the first r channels of each head; channel i forms a pair with i + r/2."""
    width = cos_1Sr.shape[-1]
    rotated, rest = x_BHSd[..., :width], x_BHSd[..., width:]
    left, right = rotated.chunk(2, -1)
    cos, sin = cos_1Sr[:, None], sin_1Sr[:, None]
    return torch.cat([rotated * cos + torch.cat([-right, left], -1) * sin, rest], -1)
