"""Plain torch forward passes of families whose code is in the model's folder.

Each reads config.json and the tensors by their published names, and shares no code with the
project. T: tokens, H: heads, J: KV heads, d: head size.
"""

import json

import torch
import transformers
from safetensors.torch import load_file
from torch.nn.functional import layer_norm, linear, normalize, silu, softmax

from tests.own_code.bailing import bailing
from tests.own_code.parts import attend, rms, rotate, sequential, swiglu
from tests.own_code.plamo import plamo2, plamo3
from tests.tiny_families.merged import with_stacked_experts


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


def sarvam(c, t, ids):
    """Ling 2, with whole rotations, a bias without its mean, and other defaults."""
    own = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "use_qk_norm": True}
    biases = {n: b - b.mean() if n.endswith("expert_bias") else b for n, b in t.items()}
    return bailing({**c, **own, "partial_rotary_factor": 1.0}, biases, ids)


def sarvam_mla(c, t, ids):
    """transformers' DeepSeek-V3 with 4 groups of 8 experts, of which 2 are chosen."""
    yarn = {"rope_type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
    stated = c["rope_scaling"] or {"original_max_position_embeddings": 4096}
    length = stated["original_max_position_embeddings"]
    yarn |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": length}
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    sizes += ("moe_intermediate_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim")
    sizes += ("qk_rope_head_dim", "v_head_dim", "num_experts_per_tok", "first_k_dense_replace")
    config = transformers.DeepseekV3Config(
        **{key: c[key] for key in (*sizes, "rms_norm_eps", "max_position_embeddings")},
        **{"num_key_value_heads": c["num_attention_heads"], "q_lora_rank": None},
        **{"n_routed_experts": 32, "n_shared_experts": 1, "n_group": 4, "topk_group": 2},
        **{"routed_scaling_factor": 2.5, "norm_topk_prob": True, "pad_token_id": 0},
        rope_parameters={**yarn, "rope_theta": c["rope_theta"]},
    )
    model = transformers.DeepseekV3ForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(with_stacked_experts(t), strict=False)
    assert not missing and not unexpected
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


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
    "SarvamMoEForCausalLM": sarvam,
    "SarvamMLAForCausalLM": sarvam_mla,
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
