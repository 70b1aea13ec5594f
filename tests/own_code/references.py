"""Plain torch forward passes of families whose code is in the model's folder.

Each reads config.json and the tensors by their published names, and shares no code with the
project. T: tokens, H: heads, J: KV heads, d: head size.
"""

import json

import torch
from safetensors.torch import load_file
from torch.nn.functional import layer_norm, linear, normalize, silu, softmax, softplus


def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x_TNd, theta, width=None):
    """Turn the first `width` channels of each head; channel i and channel i + width / 2 pair."""
    width = width or x_TNd.shape[-1]
    angles = torch.outer(
        torch.arange(len(x_TNd)).float(), theta ** (-torch.arange(0, width, 2).float() / width)
    )
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x_TNd[..., : width // 2], x_TNd[..., width // 2 : width]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*turned, x_TNd[..., width:]], -1)


def attend(q_THd, k_TJd, v_TJd, slopes=None):
    T, H, d = q_THd.shape
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k_TJd, v_TJd))
    scores = torch.einsum("thd,shd->hts", q_THd, k) * d**-0.5
    ids = torch.arange(T)
    if slopes is not None:
        scores = scores + torch.tensor(slopes)[:, None, None] * (ids - ids[:, None])
    scores = scores.masked_fill(ids > ids[:, None], -torch.inf)
    return torch.einsum("hts,shd->thd", softmax(scores, -1), v).flatten(1)


def swiglu(x, gate, up, down):
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def sequential(ids, table, layers, last, head):
    """`layers`: pairs of functions whose results are added one after the other."""
    x = table[torch.tensor(ids)]
    for attention, feed_forward in layers:
        x = x + attention(x)
        x = x + feed_forward(x)
    return linear(last(x), head)


def exaone(c, t, ids):
    J, d, eps = c["num_key_value_heads"], c["head_dim"], c["layer_norm_epsilon"]

    def layer(i):
        p = f"transformer.h.{i}"

        def attention(x):
            x = rms(x, t[f"{p}.ln_1.weight"], eps)
            q, k, v = (linear(x, t[f"{p}.attn.attention.{n}_proj.weight"]) for n in "qkv")
            q = rotate(q.unflatten(1, (-1, d)), c["rope_theta"])
            k = rotate(k.unflatten(1, (J, d)), c["rope_theta"])
            out = attend(q, k, v.unflatten(1, (J, d)))
            return linear(out, t[f"{p}.attn.attention.out_proj.weight"])

        def feed_forward(x):
            names = ("c_fc_0", "c_fc_1", "c_proj")
            x = rms(x, t[f"{p}.ln_2.weight"], eps)
            return swiglu(x, *(t[f"{p}.mlp.{n}.weight"] for n in names))

        return attention, feed_forward

    table = t["transformer.wte.weight"]
    layers = [layer(i) for i in range(c["num_layers"])]
    head = t.get("lm_head.weight", table)
    return sequential(ids, table, layers, lambda x: rms(x, t["transformer.ln_f.weight"], eps), head)


def internlm2(c, t, ids):
    """A KV head's queries, its key and its value follow each other."""
    J, eps = c["num_key_value_heads"], c["rms_norm_eps"]
    H = c["num_attention_heads"]
    d = c["hidden_size"] // H

    def layer(i):
        p = f"model.layers.{i}"

        def attention(x):
            x = rms(x, t[f"{p}.attention_norm.weight"], eps)
            qkv = linear(x, t[f"{p}.attention.wqkv.weight"], t.get(f"{p}.attention.wqkv.bias"))
            grouped = qkv.view(len(x), J, H // J + 2, d)
            q, k, v = grouped[:, :, :-2].reshape(len(x), H, d), grouped[:, :, -2], grouped[:, :, -1]
            out = attend(rotate(q, c["rope_theta"]), rotate(k, c["rope_theta"]), v)
            return linear(out, t[f"{p}.attention.wo.weight"], t.get(f"{p}.attention.wo.bias"))

        def feed_forward(x):
            x = rms(x, t[f"{p}.ffn_norm.weight"], eps)
            return swiglu(x, *(t[f"{p}.feed_forward.{n}.weight"] for n in ("w1", "w3", "w2")))

        return attention, feed_forward

    layers = [layer(i) for i in range(c["num_hidden_layers"])]
    table = t["model.tok_embeddings.weight"]
    return sequential(
        ids, table, layers, lambda x: rms(x, t["model.norm.weight"], eps), t["output.weight"]
    )


# of 6 heads: those of 4, then the first, third, ... of 8
SIX_SLOPES = [2.0 ** (-2 * i) for i in (1, 2, 3, 4)] + [2.0**-1, 2.0**-3]


def baichuan(c, t, ids):
    """W_pack has queries, keys and values; 13B has ALiBi; the second's head is normalized."""
    H, eps = c["num_attention_heads"], c["rms_norm_eps"]
    d, rotates = c["hidden_size"] // H, c["architectures"] == ["BaiChuanForCausalLM"]

    def layer(i):
        p = f"model.layers.{i}"

        def attention(x):
            x = rms(x, t[f"{p}.input_layernorm.weight"], eps)
            q, k, v = linear(x, t[f"{p}.self_attn.W_pack.weight"]).view(len(x), 3, H, d).unbind(1)
            if rotates:
                q, k = rotate(q, 10000.0), rotate(k, 10000.0)
            out = attend(q, k, v, None if rotates else SIX_SLOPES)
            return linear(out, t[f"{p}.self_attn.o_proj.weight"])

        def feed_forward(x):
            x = rms(x, t[f"{p}.post_attention_layernorm.weight"], eps)
            names = ("gate_proj", "up_proj", "down_proj")
            return swiglu(x, *(t[f"{p}.mlp.{n}.weight"] for n in names))

        return attention, feed_forward

    head = t["lm_head.weight"]
    head = normalize(head) if c.get("norm_head") else head
    layers = [layer(i) for i in range(c["num_hidden_layers"])]
    return sequential(
        ids,
        t["model.embed_tokens.weight"],
        layers,
        lambda x: rms(x, t["model.norm.weight"], eps),
        head,
    )


def qwen(c, t, ids):
    """The second of a feed-forward's two matrices is the gate."""
    H, eps = c["num_attention_heads"], c["layer_norm_epsilon"]
    d = c["kv_channels"]

    def layer(i):
        p = f"transformer.h.{i}"

        def attention(x):
            x = rms(x, t[f"{p}.ln_1.weight"], eps)
            qkv = linear(x, t[f"{p}.attn.c_attn.weight"], t[f"{p}.attn.c_attn.bias"])
            q, k, v = qkv.view(len(x), 3, H, d).unbind(1)
            theta = c["rotary_emb_base"]
            return linear(
                attend(rotate(q, theta), rotate(k, theta), v), t[f"{p}.attn.c_proj.weight"]
            )

        def feed_forward(x):
            x = rms(x, t[f"{p}.ln_2.weight"], eps)
            first, second, down = (t[f"{p}.mlp.{n}.weight"] for n in ("w1", "w2", "c_proj"))
            return linear(linear(x, first) * silu(linear(x, second)), down)

        return attention, feed_forward

    layers = [layer(i) for i in range(c["num_hidden_layers"])]
    return sequential(
        ids,
        t["transformer.wte.weight"],
        layers,
        lambda x: rms(x, t["transformer.ln_f.weight"], eps),
        t["lm_head.weight"],
    )


def llama_layer(c, t, i, norm):
    """Attention and feed-forward of Llama, with the given norm(x, name)."""
    J, p = c["num_key_value_heads"], f"model.layers.{i}"
    d = c["hidden_size"] // c["num_attention_heads"]

    def attention(x):
        x = norm(x, f"{p}.input_layernorm")
        q, k, v = (
            linear(x, t[f"{p}.self_attn.{n}_proj.weight"]).unflatten(1, (-1, d)) for n in "qkv"
        )
        assert k.shape[1] == J
        out = attend(rotate(q, c["rope_theta"]), rotate(k, c["rope_theta"]), v)
        return linear(out, t[f"{p}.self_attn.o_proj.weight"])

    def feed_forward(x):
        x = norm(x, f"{p}.post_attention_layernorm")
        return swiglu(x, *(t[f"{p}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down")))

    return attention, feed_forward


def solar(c, t, ids):
    """Two states are kept before some layers, and mixed in before others."""

    def norm(x, name):
        return rms(x, t[f"{name}.weight"], c["rms_norm_eps"])

    x, factor = t["model.embed_tokens.weight"][torch.tensor(ids)], c["bskcn_tv"][1]
    first = second = None
    for i in range(c["num_hidden_layers"]):
        first = x if i in c["bskcn_1"] else first
        second = x if i in c["bskcn_2"] else second
        if i in c["bskcn_3"]:
            x = first * factor + x * (1 - factor)
        if i in c["bskcn_4"]:
            x = second * factor + x * (1 - factor)
        attention, feed_forward = llama_layer(c, t, i, norm)
        x = x + attention(x)
        x = x + feed_forward(x)
    return linear(norm(x, "model.norm"), t["lm_head.weight"])


def deepseek_moe(c, t, ids):
    """Llama with experts, whose shares are parts of a softmax over all of them."""

    def norm(x, name):
        return rms(x, t[f"{name}.weight"], c["rms_norm_eps"])

    def mlp(x, stem):
        names = ("gate_proj", "up_proj", "down_proj")
        return swiglu(x, *(t[f"{stem}.{n}.weight"] for n in names))

    def layer(i):
        p = f"model.layers.{i}"
        attention, dense = llama_layer(c, t, i, norm)

        def routed(x):
            x = norm(x, f"{p}.post_attention_layernorm")
            scores = softmax(linear(x, t[f"{p}.mlp.gate.weight"]), -1)
            shares, chosen = scores.topk(c["num_experts_per_tok"], -1)
            shares = shares * c.get("routed_scaling_factor", 1.0)
            out = mlp(x, f"{p}.mlp.shared_experts")
            for row in range(len(x)):
                for expert, share in zip(chosen[row].tolist(), shares[row], strict=True):
                    out[row] += share * mlp(x[row], f"{p}.mlp.experts.{expert}")
            return out

        return attention, dense if i < c["first_k_dense_replace"] else routed

    layers = [layer(i) for i in range(c["num_hidden_layers"])]
    table, head = t["model.embed_tokens.weight"], t["lm_head.weight"]
    return sequential(ids, table, layers, lambda x: norm(x, "model.norm"), head)


def orion(c, t, ids):
    def norm(x, name):
        weight, bias = t[f"{name}.weight"], t[f"{name}.bias"]
        return layer_norm(x, x.shape[-1:], weight, bias, c["rms_norm_eps"])

    layers = [llama_layer(c, t, i, norm) for i in range(c["num_hidden_layers"])]
    table, head = t["model.embed_tokens.weight"], t["lm_head.weight"]
    return sequential(ids, table, layers, lambda x: norm(x, "model.norm"), head)


def plamo3(c, t, ids):
    """Norms before and after each branch, stored with different offsets; windows in some layers."""
    H, J, d = (c[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    x, eps = t["model.embed_tokens.weight"][torch.tensor(ids)], c["rms_norm_eps"]
    T = len(ids)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.layers.{i}"

        def norm(x, name, offset, p=p):
            return rms(x, t[f"{p}.{name}.weight"] + offset, eps)

        is_full = (i + 1) % c["sliding_window_pattern"] == 0
        theta = c["rope_theta"] if is_full else c["rope_local_theta"]
        qkv = linear(norm(x, "pre_mixer_norm", 1), t[f"{p}.mixer.qkv_proj.weight"])
        q, k, v = qkv.view(T, -1, d).split((H, J, J), 1)
        q = rotate(norm(q, "mixer.q_norm", 1), theta)
        k = rotate(norm(k, "mixer.k_norm", 1), theta)
        k, v = (each.repeat_interleave(H // J, 1) for each in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * d**-0.5
        back = torch.arange(T)[:, None] - torch.arange(T)
        hidden = (back < 0) | ((back >= c["window_size"]) & (not is_full))
        shares = softmax(scores.masked_fill(hidden, -torch.inf), -1)
        out = linear(
            torch.einsum("hts,shd->thd", shares, v).flatten(1), t[f"{p}.mixer.o_proj.weight"]
        )
        x = x + norm(out, "post_mixer_norm", 1 / 5)
        both = linear(norm(x, "pre_mlp_norm", 1), t[f"{p}.mlp.gate_up_proj.weight"])
        gate, up = both.chunk(2, -1)
        made = linear(silu(gate) * up, t[f"{p}.mlp.down_proj.weight"])
        x = x + norm(made, "post_mlp_norm", 1 / 5**1.5)
    return linear(rms(x, t["model.norm.weight"] + 1, eps), t["model.embed_tokens.weight"])


def plamo2(c, t, ids):
    """Layers of PLaMo 3. Heads have norms of their own, and most layers a state."""
    H, J, d, N = (
        c[key]
        for key in (
            *("num_attention_heads", "num_key_value_heads"),
            *("hidden_size_per_head", "mamba_d_state"),
        )
    )
    x, eps = t["model.embed_tokens.weight"][torch.tensor(ids)], c["rms_norm_eps"]
    T, step, full = len(ids), c["mamba_step"], c["full_attention_idx"] or ()

    def attention(x, p, i):
        qkv = linear(x, t[f"{p}.qkv_proj.weight"]).view(T, -1, d)
        q, k, v = qkv.split((H, J, J), 1)
        theta = c["rope_theta"] if i in full else c["rope_local_theta"]
        q, k = (
            rotate(rms(each, torch.ones(d), 1e-6) * t[f"{p}.{name}_weight"], theta)
            for each, name in ((q, "q"), (k, "k"))
        )
        k, v = (each.repeat_interleave(H // J, 1) for each in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * d**-0.5
        back = torch.arange(T)[:, None] - torch.arange(T)
        hidden = (back < 0) | ((back > c["attention_window_size"]) & (i not in full))
        shares = softmax(scores.masked_fill(hidden, -torch.inf), -1)
        out = torch.einsum("hts,shd->thd", shares, v).flatten(1)
        return linear(out, t[f"{p}.o_proj.weight"])

    def mamba(x, p):
        heads, taps = c["mamba_num_heads"], t[f"{p}.conv1d.weight"][:, 0]
        z, x = linear(x, t[f"{p}.in_proj.weight"]).view(T, heads, 2 * d).chunk(2, -1)
        before = torch.cat([torch.zeros(taps.shape[1] - 1, heads * d), x.flatten(1)])
        x = silu(torch.stack([(before[i : i + taps.shape[1]] * taps.T).sum(0) for i in range(T)]))
        made = linear(x, t[f"{p}.bcdt_proj.weight"])
        b, c_, dt = (
            rms(part, t[f"{p}.{name}_norm_weight"], eps)
            for part, name in zip(
                made.split((N, N, made.shape[1] - 2 * N), 1), ("B", "C", "dt"), strict=True
            )
        )
        dt = softplus(linear(dt, t[f"{p}.dt_proj.weight"]) + t[f"{p}.dt_bias"])
        state, out, x = torch.zeros(heads, d, N), [], x.view(T, heads, d)
        for i in range(T):
            left = torch.exp(-dt[i] * t[f"{p}.A_log"].exp())
            written = dt[i][:, None, None] * x[i][:, :, None] * b[i]
            state = left[:, None, None] * state + written
            out.append((state @ c_[i] + t[f"{p}.D"][:, None] * x[i]) * silu(z[i]))
        return linear(torch.stack(out).flatten(1), t[f"{p}.out_proj.weight"])

    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.layers.{i}"

        def norm(x, name, offset, p=p):
            return rms(x, t[f"{p}.{name}.weight"] + offset, eps)

        attends, inner = not c["mamba_enabled"] or i % step == step // 2, f"{p}.mixer"
        read = norm(x, "pre_mixer_norm", 1)
        made = attention(read, inner, i) if attends else mamba(read, inner)
        x = x + norm(made, "post_mixer_norm", 1 / 5)
        gate, up = linear(norm(x, "pre_mlp_norm", 1), t[f"{p}.mlp.gate_up_proj.weight"]).chunk(
            2, -1
        )
        made = linear(silu(gate) * up, t[f"{p}.mlp.down_proj.weight"])
        x = x + norm(made, "post_mlp_norm", 1 / 5**1.5)
    return linear(rms(x, t["model.norm.weight"] + 1, eps), t["model.embed_tokens.weight"])


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


REFERENCES = {
    "ExaoneForCausalLM": exaone,
    "InternLM2ForCausalLM": internlm2,
    "BaiChuanForCausalLM": baichuan,
    "BaichuanForCausalLM": baichuan,
    "QWenLMHeadModel": qwen,
    "SolarForCausalLM": solar,
    "OrionForCausalLM": orion,
    "StableLmForCausalLM": orion,  # a file of Orion as the project's reader presents it
    "Plamo2ForCausalLM": plamo2,
    "Plamo3ForCausalLM": plamo3,
    "BailingMoeForCausalLM": bailing,
    "DeepseekForCausalLM": deepseek_moe,
    "BailingMoeV2ForCausalLM": bailing,
    "BailingMoeV2_5ForCausalLM": bailing,
    "BailingMoeLinearV2ForCausalLM": bailing,
}


class Reference:
    """Logits [T, V] of a folder's float model."""

    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = load_file(folder / "model.safetensors")
        self.forward = REFERENCES[self.config["architectures"][0]]

    def logits(self, ids):
        with torch.no_grad():
            return self.forward(self.config, self.tensors, ids)
