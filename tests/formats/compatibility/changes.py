"""Changes of a checkpoint's tensors and config.json, each of which makes a rule apply."""

import torch

from formats.codecs import compressed_tensors, gptq
from formats.codecs.kv_cache import write_kv_scheme
from formats.in_memory.weights import round_to_nearest
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme

Q0 = "model.layers.0.self_attn.q_proj"
O0 = "model.layers.0.self_attn.o_proj"


def block(**values):
    return lambda tensors, config: config[BLOCK].update(values)


def config_of(**values):
    return lambda tensors, config: config.update(values)


def act_order(tensors, config):
    for name in [name for name in tensors if name.endswith("g_idx")]:
        tensors[name] = tensors[name].flip(0).contiguous()
    config[BLOCK]["desc_act"] = True


def nan(tensors, config):
    tensors["model.norm.weight"][0] = float("nan")


def other_label(tensors, config):
    config[BLOCK].update(checkpoint_format="gptq_v2", format="gptq_v2")


def asymmetric_v1(tensors, config):
    for name in [name for name in tensors if name.endswith("qzeros")]:
        tensors[name] = torch.full_like(tensors[name], 0x56565656)
    config[BLOCK].update(checkpoint_format="gptq", format="gptq")


def member_in_float(tensors, config):
    for field in gptq.TENSOR_NAMES:
        del tensors[f"{Q0}.{field}"]
    tensors[f"{Q0}.weight"] = torch.zeros(64, 64)
    config[BLOCK]["dynamic"] = {rf"-:^{Q0.replace('.', '[.]')}$": {}}


def o_in_float(tensors, config):
    for layer in range(2):
        name = O0.replace("0", str(layer))
        for field in gptq.TENSOR_NAMES:
            tensors.pop(f"{name}.{field}")
        tensors[f"{name}.weight"] = torch.zeros(64, 64)
    config[BLOCK]["dynamic"] = {r"-:.*\.o_proj$": {}}


def only_second_file(tensors, config):
    config["second file"] = config.pop(BLOCK)


def no_zeros(tensors, config):
    config[BLOCK]["zero_point"] = False
    for name in [name for name in tensors if name.endswith("qzeros")]:
        del tensors[name]


def group(**weights):
    def change(tensors, config):
        config[BLOCK]["config_groups"]["group_0"]["weights"].update(weights)

    return change


def activations(kind, **weights):
    def change(tensors, config):
        own = config[BLOCK]["config_groups"]["group_0"]
        own["weights"].update(weights)
        own["input_activations"] = {
            **{"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token"},
            "dynamic": True,
        }

    return change


def w4a8_fp8_of_another_module(tensors, config):
    second_group(tensors, config)
    other = {BLOCK: {"config_groups": {"group_0": config[BLOCK]["config_groups"]["group_1"]}}}
    activations("float", num_bits=4, group_size=128)({}, other)


def other_input_groups(tensors, config):
    own = config[BLOCK]["config_groups"]["group_0"]
    own["input_activations"]["group_size"] = 64


def weight_zeros(tensors, config):
    tensors[f"{Q0}.weight_zero_point"] = torch.full((8, 2), -2004318072, dtype=torch.int32)


def weight_g_idx(tensors, config):
    tensors[f"{Q0}.weight_g_idx"] = (torch.arange(64) // 32).flip(0).int()
    group(actorder="group")(tensors, config)


def int8_kv(tensors, config):
    config[BLOCK]["kv_cache_scheme"] = write_kv_scheme("int8")
    for layer in range(2):
        for kind in ("k_scale", "v_scale"):
            tensors[f"model.layers.{layer}.self_attn.{kind}"] = torch.ones(1)


def heads_kv(tensors, config):
    config[BLOCK]["kv_cache_scheme"] = write_kv_scheme("fp8", per_head=True)
    for layer in range(2):
        for kind in ("k_scale", "v_scale"):
            tensors[f"model.layers.{layer}.self_attn.{kind}"] = torch.ones(2, 1, 1)


def second_group(tensors, config):
    other = QuantConfig(scheme=Scheme.parse("w8a16-sym"), method="compressed-tensors").to_dict()
    added = {**other["config_groups"]["group_0"], "targets": ["model.layers.9.mlp.down_proj"]}
    config[BLOCK]["config_groups"]["group_1"] = added


def hybrid_experts(tensors, config):
    config["architectures"] = ["Qwen3_5MoeForCausalLM"]
    for name in [name for name in tensors if ".mlp." in name]:
        tensors[name.replace(".mlp.", ".mlp.experts.0.")] = tensors[name].clone()


def granite_experts(tensors, config):
    config |= {"architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe"}
    config["num_local_experts"] = 1
    for name in [name for name in tensors if ".mlp." in name]:
        own = name.replace(".mlp.", ".block_sparse_moe.experts.0.")
        for leaf, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            own = own.replace(leaf, theirs)
        tensors[own] = tensors.pop(name)


def vision_experts(tensors, config):
    quantized, text = config.pop(BLOCK), {**config, "num_experts": 1}
    text |= {"model_type": "qwen3_vl_moe_text", "moe_intermediate_size": text["intermediate_size"]}
    del text["architectures"]
    config.clear()
    config |= {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "text_config": text,
        BLOCK: quantized,
    }
    for name in [name for name in tensors if name.startswith("model.")]:
        own = name.replace("model.", "model.language_model.", 1)
        tensors[own.replace(".mlp.", ".mlp.experts.0.")] = tensors.pop(name)


def media_experts(tensors, config):
    size = config["intermediate_size"]
    config |= {
        **{"architectures": ["Ernie4_5_VLMoeForConditionalGeneration"]},
        **{"model_type": "ernie4_5_moe_vl", "moe_num_experts": [1, 1], "moe_k": 1},
        **{"moe_intermediate_size": [size, size], "vision_config": {}},
    }
    for name in [name for name in tensors if ".mlp." in name]:
        for number in range(2):
            tensors[name.replace(".mlp.", f".mlp.experts.{number}.")] = tensors[name].clone()


def gemma_experts(tensors, config):
    config |= {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text"}
    config |= {"enable_moe_block": True, "num_experts": 1, "hidden_size_per_layer_input": 0}
    config |= {"attention_k_eq_v": True, "moe_intermediate_size": config["intermediate_size"]}
    config["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
    for name in [name for name in tensors if ".mlp." in name]:
        tensors[name.replace(".mlp.", ".experts.0.")] = tensors[name].clone()


def unplaced(tensors, config):
    for layer in range(2):
        tensors[f"model.layers.{layer}.mlp.extra.weight"] = torch.ones(4)


def asymmetric_inputs(tensors, config):
    config[BLOCK]["config_groups"]["group_0"]["input_activations"]["symmetric"] = False


def auto_round(packing, **values):
    def change(tensors, config):
        own = {name: config[BLOCK][name] for name in ("bits", "group_size", "sym")}
        own |= {"quant_method": "auto-round", "packing_format": packing}
        config[BLOCK] = {**own, **values}

    return change


def five_bits(tensors, config):
    extra = {"model.layers.9.mlp.down_proj": {"bits": 5}}
    auto_round("auto_round:auto_gptq", extra_config=extra)(tensors, config)


def native_fp8(tensors, config):
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        tensors[f"{name}_inv"] = tensors.pop(name)
    config[BLOCK] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config[BLOCK]["activation_scheme"] = "dynamic"


def modelopt(algorithm, **values):
    def change(tensors, config):
        config[BLOCK] = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
        config[BLOCK].update(values)
        for name in [name for name in tensors if name.endswith("input_scale")]:
            if algorithm == "W8A16":
                del tensors[name]
        for layer in range(2) if "kv_cache_quant_algo" in values else ():
            for kind in ("k", "v"):
                tensors[f"model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale"] = torch.ones(())

    return change


def input_factors(tensors, config):
    modelopt("FP8")(tensors, config)
    tensors[f"{Q0}.pre_quant_scale"] = torch.ones(64)


def quark(tensors, config):
    spec = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
    config[BLOCK] = {
        "quant_method": "quark",
        "global_quant_config": {"weight": spec, "input_tensors": spec},
        "exclude": ["lm_head"],
    }


def quark_int4(tensors, config):
    weight = {"dtype": "uint4", "qscheme": "per_group", "group_size": 32}
    config[BLOCK] = {"quant_method": "quark", "global_quant_config": {"weight": weight}}
    config[BLOCK]["exclude"] = ["lm_head"]
    own = {"qweight": "weight", "scales": "weight_scale", "qzeros": "weight_zero_point"}
    for name in list(tensors):
        module, _, field = name.rpartition(".")
        if field in own:
            tensors[f"{module}.{own[field]}"] = tensors.pop(name)


def auto_round_float8(tensors, config):
    config[BLOCK] = {"quant_method": "auto-round", "packing_format": "auto_round:fp8_static"}
    config[BLOCK] |= {"bits": 8, "group_size": 0, "data_type": "fp", "act_bits": 8}


def mxfp8(tensors, config):
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        rows, columns = tensors[name.replace("_scale", "")].shape
        tensors[name] = torch.full((rows, columns // 32), 120, dtype=torch.uint8)
    group = config[BLOCK]["config_groups"]["group_0"]
    weights = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    group["weights"].update(weights)
    group["format"] = config[BLOCK]["format"] = "mxfp8-quantized"


def four_bit_inputs(tensors, config):
    activations("int")(tensors, config)
    config[BLOCK]["config_groups"]["group_0"]["input_activations"]["num_bits"] = 4


def renamed_experts(tensors, config):
    config.update(architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=1)
    for layer in range(2):
        for leaf, shape in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96))):
            name = f"model.layers.{layer}.block_sparse_moe.experts.0.{leaf}_proj.weight"
            tensors[name] = torch.zeros(shape)


def packed_embedding(tensors, config):
    spec = Scheme.parse("w4a16-sym-g32").weight
    weight = round_to_nearest(tensors.pop("model.embed_tokens.weight"), spec)
    for field, tensor in compressed_tensors.encode(weight).items():
        tensors[f"model.embed_tokens.{field}"] = tensor
    config[BLOCK]["config_groups"]["group_0"]["targets"].append("Embedding")


def tied_packed_embedding(tensors, config):
    packed_embedding(tensors, config)
    tensors.pop("lm_head.weight", None)
    config["tie_word_embeddings"] = True


def quantized_head(tensors, config):
    """A head of 64 tokens in the codes of the linears."""
    block = config[BLOCK]
    generator = torch.Generator().manual_seed(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.randn(64, 64, generator=generator)
    config["vocab_size"] = 64
    weight = round_to_nearest(tensors.pop("lm_head.weight"), Scheme.parse("w4a16-sym-g32").weight)
    codec = compressed_tensors if block["quant_method"] == "compressed-tensors" else gptq
    for field, tensor in codec.encode(weight).items():
        tensors[f"lm_head.{field}"] = tensor
    if codec is gptq:
        block["lm_head"] = True
    else:
        block["ignore"] = []


def experts(tensors, config):
    """The feed-forwards of a folder as experts of a Mixtral: one each."""
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for name in [name for name in tensors if ".mlp." in name]:
        module, local, field = name.rsplit(".", 2)
        place = module.replace("mlp", "block_sparse_moe.experts.0")
        tensors[f"{place}.{names[local]}.{field}"] = tensors.pop(name)
    for layer in range(2):
        tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"] = torch.ones(1, 64)
    config.update(architectures=["MixtralForCausalLM"], model_type="mixtral")
    config.update(num_local_experts=1, num_experts_per_tok=1)


def mixed_experts(tensors, config):
    """The second projection of the experts of the first layer is in float."""
    experts(tensors, config)
    name = "model.layers.0.block_sparse_moe.experts.0.w2"
    for field in ("weight_packed", "weight_scale", "weight_shape"):
        del tensors[f"{name}.{field}"]
    tensors[f"{name}.weight"] = torch.ones(64, 96)
    config[BLOCK]["ignore"].append(name)


def mixed_layers_of_experts(tensors, config):
    """All experts of the first layer are in float."""
    experts(tensors, config)
    for local, shape in (("w1", (96, 64)), ("w2", (64, 96)), ("w3", (96, 64))):
        name = f"model.layers.0.block_sparse_moe.experts.0.{local}"
        for field in ("weight_packed", "weight_scale", "weight_shape"):
            del tensors[f"{name}.{field}"]
        tensors[f"{name}.weight"] = torch.ones(shape)
        config[BLOCK]["ignore"].append(name)


def staged_gguf(tensors, config):
    config[BLOCK] = {"quant_method": "gguf-blocks", "type": "q4_0", "modules": []}


def mxfp8_experts(tensors, config):
    mxfp8(tensors, config)
    experts(tensors, config)


def stacked_experts(tensors, config):
    """One expert in a layer, its gate above up in one tensor."""
    experts(tensors, config)
    for layer in range(2):
        stem = f"model.layers.{layer}.block_sparse_moe.experts"
        for stack, leaves in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
            for field in ("weight_packed", "weight_scale", "weight_shape"):
                parts = [tensors.pop(f"{stem}.0.{leaf}.{field}") for leaf in leaves]
                tensors[f"{stem}.{stack}.{field}"] = torch.cat(parts)[None]


def with_mamba_1(tensors, config):
    """The first layer has Jamba's mixer instead of attention."""
    for name in [name for name in tensors if ".layers.0.self_attn." in name]:
        value = tensors.pop(name)
        if ".o_proj." in name:
            tensors[name.replace("self_attn.o_proj", "mamba.out_proj")] = value
    sizes = {"mamba_expand": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}
    config.update(architectures=["JambaForCausalLM"], model_type="jamba", **sizes)
