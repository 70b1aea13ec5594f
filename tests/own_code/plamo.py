"""PLaMo 2 and 3, written out from their code."""

import torch
from torch.nn.functional import linear, silu, softmax, softplus

from tests.own_code.parts import rms, rotate


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
