"""Ling and Ring, written out from their code."""

import torch
from torch.nn.functional import linear, normalize, silu, softmax

from tests.own_code.parts import attend, rms, rotate, sequential, swiglu


def shares_of_softmax(c, t, logits, p):
    scores = softmax(logits, -1)
    best, chosen = scores.topk(c["num_experts_per_tok"], -1)
    return chosen, best / best.sum(-1, keepdim=True)


def shares_of_groups(c, t, logits, p):
    """Choose among the groups with the best pairs of experts; a bias affects only the choice."""
    scores, G = logits.sigmoid(), c["n_group"]
    choice = (scores + t[f"{p}.gate.expert_bias"]).view(len(logits), G, -1)
    of_groups = choice.topk(2, -1).values.sum(-1)
    best = of_groups.topk(c["topk_group"], -1).indices
    for row, groups in zip(choice, best, strict=True):
        for group in set(range(G)) - set(groups.tolist()):
            row[group] = -torch.inf
    chosen = choice.flatten(1).topk(c["num_experts_per_tok"], -1).indices
    shares = scores.gather(1, chosen)
    return chosen, shares / shares.sum(-1, keepdim=True) * c["routed_scaling_factor"]


def bailing(c, t, ids):
    H, J, d = (c[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    eps, is_second = c["rms_norm_eps"], c["architectures"] != ["BailingMoeForCausalLM"]
    width = int(d * c.get("partial_rotary_factor", 1.0))

    def mlp(x, stem):
        names = ("gate_proj", "up_proj", "down_proj")
        return swiglu(x, *(t[f"{stem}.{n}.weight"] for n in names))

    def layer(i):
        p = f"model.layers.{i}"

        def attention(x):
            x = rms(x, t[f"{p}.input_layernorm.weight"], eps)
            every = c.get("layer_group_size")
            if every and (i + 1) % every and i < c["num_hidden_layers"] // every * every:
                return lightning_attention(c, t, x, f"{p}.attention", i)
            if "kv_lora_rank" in c:
                return latent_attention(c, t, x, f"{p}.attention")
            stem = f"{p}.attention.query_key_value"
            qkv = linear(x, t[f"{stem}.weight"], t.get(f"{stem}.bias")).view(len(x), -1, d)
            q, k, v = qkv[:, :H], qkv[:, H : H + J], qkv[:, H + J :]
            if is_second and c["use_qk_norm"]:
                q = rms(q, t[f"{p}.attention.query_layernorm.weight"], eps)
                k = rms(k, t[f"{p}.attention.key_layernorm.weight"], eps)
            q, k = rotate(q, c["rope_theta"], width), rotate(k, c["rope_theta"], width)
            return linear(attend(q, k, v), t[f"{p}.attention.dense.weight"])

        def feed_forward(x):
            x = rms(x, t[f"{p}.post_attention_layernorm.weight"], eps)
            if i < c["first_k_dense_replace"]:
                return mlp(x, f"{p}.mlp")
            logits = linear(x, t[f"{p}.mlp.gate.weight"])
            rule = shares_of_groups if is_second else shares_of_softmax
            chosen, shares = rule(c, t, logits, f"{p}.mlp")
            out = mlp(x, f"{p}.mlp.shared_experts")
            for row in range(len(x)):
                for expert, share in zip(chosen[row].tolist(), shares[row], strict=True):
                    out[row] += share * mlp(x[row], f"{p}.mlp.experts.{expert}")
            return out

        return attention, feed_forward

    head = t["lm_head.weight"]
    head = normalize(head, dim=0) if c.get("norm_head") else head
    layers = [layer(i) for i in range(c["num_hidden_layers"])]
    return sequential(
        ids,
        t["model.word_embeddings.weight"],
        layers,
        lambda x: rms(x, t["model.norm.weight"], eps),
        head,
    )


def rotate_neighbors(x_TNd, theta):
    """Channels 2 i and 2 i + 1 of each head form a pair."""
    ordered = torch.cat([x_TNd[..., ::2], x_TNd[..., 1::2]], -1)
    first, second = rotate(ordered, theta).chunk(2, -1)
    return torch.stack([first, second], -1).flatten(-2)


def latent_attention(c, t, x, p):
    """Keys and values of all heads come from one latent, and one rotated key serves all heads."""
    H, P, R = (c[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    eps = c["rms_norm_eps"]
    if c["q_lora_rank"] is None:
        q = linear(x, t[f"{p}.q_proj.weight"])
    else:
        low = rms(linear(x, t[f"{p}.q_a_proj.weight"]), t[f"{p}.q_a_layernorm.weight"], eps)
        q = linear(low, t[f"{p}.q_b_proj.weight"])
    q = q.view(len(x), H, P + R)
    latents, key = linear(x, t[f"{p}.kv_a_proj_with_mqa.weight"]).split((c["kv_lora_rank"], R), -1)
    latents = rms(latents, t[f"{p}.kv_a_layernorm.weight"], eps)
    made = linear(latents, t[f"{p}.kv_b_proj.weight"]).view(len(x), H, -1)
    key = rotate_neighbors(key[:, None], c["rope_theta"]).expand(-1, H, -1)
    q = torch.cat([q[..., :P], rotate_neighbors(q[..., P:], c["rope_theta"])], -1)
    return linear(
        attend(q, torch.cat([made[..., :P], key], -1), made[..., P:]), t[f"{p}.dense.weight"]
    )


def lightning_attention(c, t, x, p, layer):
    """A state of each head that decays by the same factor at every token."""
    H, d, eps = c["num_attention_heads"], c["head_dim"], c["rms_norm_eps"]
    made = linear(x, t[f"{p}.query_key_value.weight"])
    made = silu(made) if c["linear_silu"] else made
    q, k, v = made.view(len(x), 3, H, d).unbind(1)
    if c["use_qk_norm"]:
        q = rms(q, t[f"{p}.query_layernorm.weight"], eps)
        k = rms(k, t[f"{p}.key_layernorm.weight"], eps)
    if c.get("linear_rope", True):
        width = int(d * c["partial_rotary_factor"])
        q, k = rotate(q, c["rope_theta"], width), rotate(k, c["rope_theta"], width)
    rates = torch.tensor([2.0 ** (-8 * (head + 1) / H) for head in range(H)])
    rates = rates * (1 - (layer - 1) / (c["num_hidden_layers"] - 1) + 1e-5)
    state, rows = torch.zeros(H, d, d), []
    for row in range(len(x)):
        state = state * torch.exp(-rates)[:, None, None] + k[row, :, :, None] * v[row, :, None]
        rows.append(torch.einsum("hkv,hk->hv", state, q[row] * d**-0.5))
    grouped = torch.stack(rows).view(len(x), c["group_norm_size"], -1)
    normed = rms(grouped, 1.0, eps).flatten(1) * t[f"{p}.g_norm.weight"]
    gated = normed * linear(x, t[f"{p}.g_proj.weight"]).sigmoid()
    return linear(gated, t[f"{p}.dense.weight"])
