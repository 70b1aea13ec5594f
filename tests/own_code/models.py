"""Tiny random models of families whose code is in the model's folder: published keys and names."""

import json

import torch
from safetensors.torch import save_file

C, INNER, V, L = 64, 96, 512, 3  # hidden size, feed-forward, vocabulary, layers
USUAL = {
    "hidden_size": C,
    "intermediate_size": INNER,
    "vocab_size": V,
    "num_hidden_layers": L,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def without(*names):
    return {key: value for key, value in USUAL.items() if key not in names}


def ends(embedding, norm, head="lm_head"):
    return {f"{embedding}.weight": (V, C), f"{norm}.weight": (C,), f"{head}.weight": (V, C)}


def layered(layer, shapes, count=L):
    return {f"{layer}.{i}.{n}": shape for i in range(count) for n, shape in shapes.items()}


def mlp(stem, gate, up, down, width=INNER):
    return {
        f"{stem}.{gate}.weight": (width, C),
        f"{stem}.{up}.weight": (width, C),
        f"{stem}.{down}.weight": (C, width),
    }


def norms(*names, leaves=("weight",)):
    return {f"{name}.{leaf}": (C,) for name in names for leaf in leaves}


def exaone(**different):
    config = {
        **without("num_hidden_layers", "rms_norm_eps", "hidden_act"),
        **{"architectures": ["ExaoneForCausalLM"], "model_type": "exaone", "num_layers": L},
        **{"layer_norm_epsilon": 1e-5, "activation_function": "silu", "head_dim": 24},
        **different,
    }
    widths = {"q": 96, "k": 48, "v": 48}
    shapes = {
        **{f"attn.attention.{n}_proj.weight": (width, C) for n, width in widths.items()},
        **{"attn.attention.out_proj.weight": (C, 96), **norms("ln_1", "ln_2")},
        **mlp("mlp", "c_fc_0", "c_fc_1", "c_proj"),
    }
    tensors = {**layered("transformer.h", shapes), **ends("transformer.wte", "transformer.ln_f")}
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    return config, tensors


def internlm2(**different):
    config = {
        **USUAL,
        **{"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": True},
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
        **different,
    }
    shapes = {
        **{"attention.wqkv.weight": (128, C), "attention.wo.weight": (C, C)},
        **{"attention.wqkv.bias": (128,), "attention.wo.bias": (C,)},
        **norms("attention_norm", "ffn_norm"),
        **mlp("feed_forward", "w1", "w3", "w2"),
    }
    shapes = {n: s for n, s in shapes.items() if config["bias"] or not n.endswith("bias")}
    tensors = layered("model.layers", shapes)
    return config, {**tensors, **ends("model.tok_embeddings", "model.norm", "output")}


def baichuan(heads, **different):
    width = 16 * heads
    config = {
        **without("num_key_value_heads", "rope_theta", "max_position_embeddings"),
        **{"num_attention_heads": heads, "hidden_size": width, "model_max_length": 256},
        **{"model_type": "baichuan", **different},
    }
    shapes = {
        **{"self_attn.W_pack.weight": (3 * width, width), "self_attn.o_proj.weight": (width,) * 2},
        **{f"{n}.weight": (width,) for n in ("input_layernorm", "post_attention_layernorm")},
        **{f"mlp.{n}_proj.weight": (INNER, width) for n in ("gate", "up")},
        "mlp.down_proj.weight": (width, INNER),
    }
    outside = {"model.embed_tokens.weight": (V, width), "model.norm.weight": (width,)}
    return config, {**layered("model.layers", shapes), **outside, "lm_head.weight": (V, width)}


def qwen(**different):
    config = {
        **without("num_key_value_heads", "rms_norm_eps", "rope_theta", "hidden_act"),
        **{
            "architectures": ["QWenLMHeadModel"],
            "model_type": "qwen",
            "intermediate_size": 2 * INNER,
        },
        **{"layer_norm_epsilon": 1e-6, "kv_channels": 16, "rotary_emb_base": 1000},
        **{"seq_length": 128, "rotary_pct": 1.0, "no_bias": True, "use_dynamic_ntk": True},
        **{"use_logn_attn": True, "scale_attn_weights": True, **different},
    }
    shapes = {
        **{"attn.c_attn.weight": (3 * C, C), "attn.c_attn.bias": (3 * C,)},
        **{"attn.c_proj.weight": (C, C), **norms("ln_1", "ln_2")},
        **mlp("mlp", "w1", "w2", "c_proj"),
    }
    return config, {
        **layered("transformer.h", shapes),
        **ends("transformer.wte", "transformer.ln_f"),
    }


def of_llama(leaves=("weight",)):
    return {
        **{f"self_attn.{n}_proj.weight": (w, C) for n, w in (("q", 64), ("k", 32), ("v", 32))},
        "self_attn.o_proj.weight": (C, C),
        **norms("input_layernorm", "post_attention_layernorm", leaves=leaves),
        **mlp("mlp", "gate_proj", "up_proj", "down_proj"),
    }


def solar(**different):
    config = {
        **USUAL,
        **{"architectures": ["SolarForCausalLM"], "model_type": "solar", "num_hidden_layers": 5},
        **{"bskcn_1": [1, 3], "bskcn_2": [1, 2], "bskcn_3": [2, 4], "bskcn_4": [3]},
        **{"bskcn_tv": [0.9, 0.8], "sliding_window": 2047, **different},
    }
    tensors = layered("model.layers", of_llama(), config["num_hidden_layers"])
    return config, {**tensors, **ends("model.embed_tokens", "model.norm")}


def orion(**different):
    config = {**USUAL, "architectures": ["OrionForCausalLM"], "model_type": "orion", **different}
    tensors = layered("model.layers", of_llama(("weight", "bias")))
    outside = {**ends("model.embed_tokens", "model.norm"), "model.norm.bias": (C,)}
    return config, {**tensors, **outside}


def plamo3(**different):
    config = {
        **without("hidden_act", "tie_word_embeddings"),
        **{"architectures": ["Plamo3ForCausalLM"], "model_type": "plamo3", "head_dim": 24},
        **{"window_size": 7, "sliding_window_pattern": 2, "rope_local_theta": 100},
        **different,
    }
    shapes = {
        **{"mixer.qkv_proj.weight": (192, C), "mixer.o_proj.weight": (C, 96)},
        **{"mixer.q_norm.weight": (24,), "mixer.k_norm.weight": (24,)},
        **norms("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm"),
        **{"mlp.gate_up_proj.weight": (2 * INNER, C), "mlp.down_proj.weight": (C, INNER)},
    }
    outside = ends("model.embed_tokens", "model.norm")
    del outside["lm_head.weight"]
    return config, {**layered("model.layers.layers", shapes), **outside}


def plamo2(**different):
    config = {
        **without("hidden_act", "tie_word_embeddings", "rope_theta"),
        **{"architectures": ["Plamo2ForCausalLM"], "model_type": "plamo2", "rms_norm_eps": 1e-6},
        **{"num_hidden_layers": 4, "hidden_size_per_head": 24, "mamba_num_heads": 4},
        **{"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_step": 2, "mamba_enabled": True},
        **{"attention_window_size": 6, "full_attention_idx": [3]},
        **{"rope_theta": 1000, "rope_local_theta": 100},
        **different,
    }
    tensors = {}
    for i in range(config["num_hidden_layers"]):
        shapes = {
            **norms("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm"),
            **{"mlp.gate_up_proj.weight": (2 * INNER, C), "mlp.down_proj.weight": (C, INNER)},
        }
        if i % config["mamba_step"] == config["mamba_step"] // 2 or not config["mamba_enabled"]:
            shapes |= {
                **{"mixer.qkv_proj.weight": (192, C), "mixer.o_proj.weight": (C, 96)},
                **{"mixer.q_weight": (4, 24), "mixer.k_weight": (2, 24)},
            }
        else:
            shapes |= {
                **{"mixer.in_proj.weight": (192, C), "mixer.conv1d.weight": (96, 1, 4)},
                **{"mixer.bcdt_proj.weight": (96, 96), "mixer.dt_proj.weight": (4, 64)},
                **{f"mixer.{name}": (4,) for name in ("A_log", "D", "dt_bias")},
                **{"mixer.B_norm_weight": (16,), "mixer.C_norm_weight": (16,)},
                **{"mixer.dt_norm_weight": (64,), "mixer.out_proj.weight": (C, 96)},
            }
        tensors |= {f"model.layers.layers.{i}.{n}": shape for n, shape in shapes.items()}
    outside = ends("model.embed_tokens", "model.norm")
    del outside["lm_head.weight"]
    return config, {**tensors, **outside}


def bailing(second=False, **different):
    config = {
        **without("hidden_act"),
        **{"hidden_act": "silu", "head_dim": 24, "num_experts": 8, "num_experts_per_tok": 3},
        **{"moe_intermediate_size": 32, "num_shared_experts": 2, "norm_topk_prob": True},
        **{"first_k_dense_replace": 1, "use_bias": False, "use_qkv_bias": True},
        **{"architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe"},
        **{"norm_head": not second, "sliding_window": 4096, "use_sliding_window": False},
    }
    if second:
        config |= {
            **{"architectures": ["BailingMoeV2ForCausalLM"], "partial_rotary_factor": 0.5},
            **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "use_qk_norm": True},
            **{"score_function": "sigmoid", "moe_router_enable_expert_bias": True},
            **{"moe_shared_expert_intermediate_size": 48, "num_nextn_predict_layers": 1},
            **{"use_qkv_bias": False, "router_dtype": "fp32"},
        }
    config |= different
    stem, shared = "attention.query_key_value", 96 if second else 64
    shapes = {
        **{f"{stem}.weight": (192, C), "attention.dense.weight": (C, 96)},
        **norms("input_layernorm", "post_attention_layernorm"),
    }
    if config["use_qkv_bias"]:
        shapes[f"{stem}.bias"] = (192,)
    if second:
        shapes |= {f"attention.{n}_layernorm.weight": (24,) for n in ("query", "key")}
    names = ("gate_proj", "up_proj", "down_proj")
    routed = {"mlp.gate.weight": (8, C), **mlp("mlp.shared_experts", *names, shared)}
    if second:
        routed["mlp.gate.expert_bias"] = (8,)
    for number in range(8):
        routed |= mlp(f"mlp.experts.{number}", *names, 32)
    tensors = {}
    for i in range(L):
        own = mlp("mlp", *names) if i < config["first_k_dense_replace"] else routed
        tensors |= {f"model.layers.{i}.{n}": shape for n, shape in {**shapes, **own}.items()}
    if second:  # an MTP layer, which is not read
        tensors["model.layers.3.eh_proj.weight"] = (C, 2 * C)
    return config, {**tensors, **ends("model.word_embeddings", "model.norm")}


def deepseek_moe(**different):
    config = {
        **without("hidden_act"),
        **{"architectures": ["DeepseekForCausalLM"], "model_type": "deepseek"},
        **{"hidden_act": "silu", "n_routed_experts": 8, "num_experts_per_tok": 3},
        **{"n_shared_experts": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
        **{"moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax"},
        **different,
    }
    names, own = ("gate_proj", "up_proj", "down_proj"), of_llama()
    dense = {name: own.pop(name) for name in list(own) if name.startswith("mlp.")}
    routed = {"mlp.gate.weight": (8, C), **mlp("mlp.shared_experts", *names, 64)}
    for number in range(8):
        routed |= mlp(f"mlp.experts.{number}", *names, 32)
    tensors = ends("model.embed_tokens", "model.norm")
    for i in range(L):
        feed_forward = dense if i < config["first_k_dense_replace"] else routed
        tensors |= {f"model.layers.{i}.{n}": s for n, s in {**own, **feed_forward}.items()}
    return config, tensors


LATENT = {
    **{"q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 12},
    "v_head_dim": 40,
}


def lightning_ling(latent=True, **different):
    """Ling 2.6, or Ring-linear: the last layer of each group has attention, and a tail, too."""
    name, own = ("BailingMoeV2_5", "bailing_hybrid") if latent else ("BailingMoeLinearV2", "")
    config, tensors = bailing(second=True)
    config |= {
        **{"architectures": [f"{name}ForCausalLM"], "model_type": own or "bailing_moe_linear"},
        **{"layer_group_size": 3, "group_norm_size": 2, "linear_silu": False, "rms_norm_eps": 1e-6},
        **({**LATENT, "num_key_value_heads": 4} if latent else {}),
        **different,
    }
    stem, inner, every = "model.layers.{}.attention.", 96, config["layer_group_size"]
    for i in range(L):
        p = stem.format(i)
        own = {name: tensors.pop(name) for name in list(tensors) if name.startswith(p)}
        if (i + 1) % every and i < L // every * every:
            own[f"{p}query_key_value.weight"] = (3 * inner, C)
            own |= {f"{p}g_proj.weight": (inner, C), f"{p}g_norm.weight": (inner,)}
        elif latent:
            keys, rank, up = 36 * 4, config["q_lora_rank"], {}
            if rank:
                up = {f"{p}q_a_proj.weight": (rank, C), f"{p}q_a_layernorm.weight": (rank,)}
            own = {
                **up,
                f"{p}q_b_proj.weight" if rank else f"{p}q_proj.weight": (keys, rank or C),
                f"{p}kv_a_proj_with_mqa.weight": (44, C),
                f"{p}kv_a_layernorm.weight": (32,),
                f"{p}kv_b_proj.weight": (4 * 64, 32),
                f"{p}dense.weight": (C, 160),
            }
        if not config["use_qk_norm"]:
            own = {name: shape for name, shape in own.items() if "y_layernorm" not in name}
        tensors |= own
    return config, tensors


def sarvam():
    """Ling 2's files with other defaults; the rotated part of heads is stated, but not used."""
    own = {"architectures": ["SarvamMoEForCausalLM"], "model_type": "sarvam_moe"}
    config, tensors = bailing(second=True, **own)
    for key in ("n_group", "topk_group", "routed_scaling_factor", "use_qk_norm", "norm_head"):
        del config[key]
    return config, {n: shape for n, shape in tensors.items() if "eh_proj" not in n}


def sarvam_mla(**different):
    """DeepSeek-V3's tensors; keys of published files, which leave out the groups of experts."""
    latent = {"kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 12, "v_head_dim": 40}
    yarn = {"type": "deepseek_yarn", "factor": 40, "original_max_position_embeddings": 16}
    config = {
        **without("hidden_act", "num_key_value_heads"),
        **{"architectures": ["SarvamMLAForCausalLM"], "model_type": "sarvam_mla", **latent},
        **{"hidden_act": "silu", "num_experts": 32, "num_experts_per_tok": 3, "head_dim": 44},
        **{"num_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
        "rope_scaling": {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32},
        **different,
    }
    names = ("gate_proj", "up_proj", "down_proj")
    own = {
        **norms("input_layernorm", "post_attention_layernorm"),
        "self_attn.q_proj.weight": (4 * 36, C),
        "self_attn.kv_a_proj_with_mqa.weight": (44, C),
        "self_attn.kv_a_layernorm.weight": (32,),
        "self_attn.kv_b_proj.weight": (4 * 64, 32),
        "self_attn.o_proj.weight": (C, 160),
    }
    routed = {"mlp.gate.weight": (32, C), **mlp("mlp.shared_experts", *names, 32)}
    routed["mlp.gate.e_score_correction_bias"] = (32,)
    for number in range(32):
        routed |= mlp(f"mlp.experts.{number}", *names, 32)
    tensors = ends("model.embed_tokens", "model.norm")
    for i in range(L):
        feed_forward = mlp("mlp", *names) if i < config["first_k_dense_replace"] else routed
        tensors |= {f"model.layers.{i}.{n}": s for n, s in {**own, **feed_forward}.items()}
    return config, tensors


SECOND = {"architectures": ["BaichuanForCausalLM"], "norm_head": True}
TINY_MODELS = {
    "exaone": lambda: exaone(),
    "internlm2": lambda: internlm2(),
    "baichuan_7b": lambda: baichuan(4, architectures=["BaiChuanForCausalLM"]),
    "baichuan_13b": lambda: baichuan(6, **SECOND),
    "qwen": lambda: qwen(),
    "solar": lambda: solar(),
    "orion": lambda: orion(),
    "plamo2": lambda: plamo2(),
    "plamo3": lambda: plamo3(),
    "ling": lambda: bailing(),
    "ling_2": lambda: bailing(second=True),
    "sarvam": lambda: sarvam(),
    "sarvam_mla": lambda: sarvam_mla(),
    "ling_2_6": lambda: lightning_ling(),
    "ring_linear": lambda: lightning_ling(latent=False),
    "deepseek_moe": lambda: deepseek_moe(routed_scaling_factor=1.5),
}
VARIANTS = {
    "exaone, tied": lambda: exaone(tie_word_embeddings=True),
    "internlm2 without biases": lambda: internlm2(bias=False),
    "plamo2 without states": lambda: plamo2(mamba_enabled=False, full_attention_idx=None),
    "ling without biases": lambda: bailing(use_qkv_bias=False, norm_head=False),
    "ling 2, one group": lambda: bailing(second=True, n_group=1, topk_group=1),
    "sarvam 105b, its own yarn": lambda: sarvam_mla(rope_scaling=None),
    "ling 2.6 without query latents": lambda: lightning_ling(
        q_lora_rank=None, group_norm_size=1, linear_silu=True, partial_rotary_factor=1.0
    ),
    "ring-linear, a tail of attention": lambda: lightning_ling(
        latent=False, layer_group_size=2, use_qk_norm=False, linear_rope=False
    ),
}


def write(folder, made):
    """Write the folder of a model."""
    config, shapes = made
    generator, tensors = torch.Generator().manual_seed(5), {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator) * 0.2
        is_norm = "norm" in name or ".ln_" in name
        tensors[name] = values + 1 if is_norm and name.endswith(".weight") else values
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
