"""Every rule of who loads what: a file that it is about, the verdict, and the evidence."""

import json
from pathlib import Path

import pytest
import torch

from formats.codecs import compressed_tensors, gptq
from formats.codecs.kv_cache import write_kv_scheme
from formats.compatibility.rules import RULES, loads_in
from formats.in_memory.weights import round_to_nearest
from formats.inspection import inspect
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme
from tests.formats.gguf.written import Q3_K, llama_metadata, llama_tensors, write_gguf

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
    codec = compressed_tensors if block["quant_method"] == CT else gptq
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


def stacked_experts(tensors, config):
    """One expert in a layer, its gate above up in one tensor."""
    experts(tensors, config)
    for layer in range(2):
        stem = f"model.layers.{layer}.block_sparse_moe.experts"
        for stack, leaves in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
            for field in ("weight_packed", "weight_scale", "weight_shape"):
                parts = [tensors.pop(f"{stem}.0.{leaf}.{field}") for leaf in leaves]
                tensors[f"{stem}.{stack}.{field}"] = torch.cat(parts)[None]


def made_by(name):
    """A folder that another tool wrote."""
    return (MADE_BY / name,)


MADE_BY = Path(__file__).parents[1] / "made_by"
CT = "compressed-tensors"
FP8 = (CT, "w8a8-fp8-static")
# rule -> format, scheme and the change that make a file which the rule is about
CASES = {
    "ct-embedding-vllm": (CT, "w4a16-sym-g32", packed_embedding),
    "ct-tied-embedding-vllm": (CT, "w4a16-sym-g32", tied_packed_embedding),
    "ct-head-vllm": (CT, "w4a16-sym-g32", quantized_head),
    "ct-head-sglang": (CT, "w4a16-sym-g32", quantized_head),
    "gptq-head-transformers": ("gptq", "w4a16-sym-g32", quantized_head),
    "ct-embedding-sglang": (CT, "w4a16-sym-g32", packed_embedding),
    "ct-embedding-transformers": (CT, "w4a16-sym-g32", packed_embedding),
    "own-error": ("gptq", "w4a16-sym-g32", nan),
    "damaged": ("gptq", "w4a16-sym-g32", nan),
    "unreadable": ("gptq", "w4a16-sym-g32", block(quant_method="of another world")),
    "refused-family": ("gptq", "w4a16-sym-g32", config_of(architectures=["ChatGLMModel"])),
    "no-family": ("gptq", "w4a16-sym-g32", config_of(architectures=["A", "B"])),
    "family": ("gptq", "w4a16-sym-g32", config_of(architectures=["OtherForCausalLM"])),
    "activation": ("gptq", "w4a16-sym-g32", config_of(hidden_act="gelu")),
    "unplaced": ("gptq", "w4a16-sym-g32", unplaced),
    "second-file-transformers": ("gptq", "w4a16-sym-g32", only_second_file),
    "second-file-servers": ("gptq", "w4a16-sym-g32", only_second_file),
    "fused-mixed": ("gptq", "w4a16-sym-g32", member_in_float),
    "variant": (
        "gptq",
        "w4a16-sym-g32",
        config_of(architectures=["CohereForCausalLM"], use_qk_norm=True),
    ),
    "granite-experts-apart": (CT, "w4a16-sym-g32", granite_experts),
    "granite-experts": (CT, "w4a16-sym-g32", granite_experts),
    "vision-experts": (CT, "w4a16-sym-g32", vision_experts),
    "gemma-experts": (CT, "w4a16-sym-g32", gemma_experts),
    "unlisted-linears": (CT, "w4a16-sym-g32", hybrid_experts),
    "delta-net": ("gptq", "w4a16-sym-g32", config_of(architectures=["Qwen3_5ForCausalLM"])),
    "own-act-order": ("gptq", "w4a16-sym-g32", act_order),
    "own-bits": ("gptq", "w3a16-sym-g32", None),
    "gptq-without-desc-act": (
        "gptq",
        "w4a16-sym-g32",
        lambda tensors, config: config[BLOCK].pop("desc_act"),
    ),
    "gptq-bits": ("gptq", "w4a16-asym-g32", None),
    "gptq-groups": ("gptq", "w4a16-sym-g16", None),
    "gptq-desc-act": ("gptq", "w4a16-sym-g32", act_order),
    "gptq-mislabelled": ("gptq", "w4a16-sym-g32", other_label),
    "gptq-plain-kernel": ("gptq", "w4a16-asym-g32", None),
    "gptq-groups-sglang": ("gptq", "w4a16-sym-g16", None),
    "gptq-act-order-sglang": ("gptq", "w4a16-sym-g32", act_order),
    "gptq-shapes": ("gptq", "w4a16-sym-g32", None),
    "gptq-dynamic": ("gptq", "w4a16-sym-g32", o_in_float),
    "gptq-mislabelled-transformers": ("gptq", "w4a16-sym-g32", other_label),
    "gptq-v1-asymmetric": ("gptq", "w4a16-asym-g32", asymmetric_v1),
    "gptq-transformers": ("gptq", "w4a16-sym-g32", None),
    "gptq-activations": ("gptq", "w8a8", None),
    "awq-no-zeros": ("awq", "w4a16-sym-g32", no_zeros),
    "awq-symmetric": ("awq", "w4a16-sym-g32", block(zero_point=False)),
    "awq-groups": ("awq", "w4a16-asym-g16", None),
    "awq-transformers": ("awq", "w4a16-asym-g32", None),
    "ct-actorder": (CT, "w4a16-sym-g32", weight_g_idx),
    "ct-weight-zeros": (CT, "w4a16-sym-g32", weight_zeros),
    "ct-heads-kv-vllm": (CT, "w4a16-sym-g32", heads_kv),
    "ct-heads-kv-sglang": (CT, "w4a16-sym-g32", heads_kv),
    "ct-int8-kv-vllm": (CT, "w8a8", int8_kv),
    "ct-int8-kv-sglang": (CT, "w8a8", int8_kv),
    "ct-humming": (CT, "w4a16-sym-g16", None),
    "ct-groups-sglang": (CT, "w4a16-sym-g16", None),
    "ct-fp8": (CT, "w8a8-fp8", None),
    "ct-packed-asymmetric-mixed": (CT, "w4a16-asym-g32", second_group),
    "ct-packed-asymmetric": (CT, "w4a16-asym-g32", None),
    "ct-transformers": (CT, "w8a8", None),
    "ct-bits-sglang": (CT, "w3a16-sym-g32", None),
    "ct-w4a8-int": (CT, "w4a16-sym-g32", activations("int")),
    "ct-w4a8-fp8": (CT, "w4a16-sym-g32", w4a8_fp8_of_another_module),
    "ct-w4a8-fp8-groups": (CT, "w4a16-sym-g32", activations("float")),
    "own-inputs": (CT, "w8a8", asymmetric_inputs),
    "own-w4a8": (CT, "w4a16-asym-g32", activations("int")),
    "ct-mxfp4-sglang": (CT, "w4a16-mxfp4", None),
    "auto-round-packing": ("gptq", "w4a16-sym-g32", auto_round("auto_round:gptqmodel")),
    "auto-round-bits": ("gptq", "w3a16-sym-g32", auto_round("auto_round:auto_gptq")),
    "auto-round-bits-sglang": ("gptq", "w4a16-sym-g32", five_bits),
    "auto-round-transformers": ("gptq", "w4a16-sym-g32", auto_round("auto_round:auto_gptq")),
    "fp8-transformers": (CT, "w8a8-fp8-block", native_fp8),
    "modelopt-transformers": (*FP8, modelopt("FP8")),
    "modelopt-vllm": (CT, "w8a8", modelopt("W8A16")),
    "modelopt-sglang": (CT, "w8a8", modelopt("W8A16")),
    "modelopt-int8-kv": (*FP8, modelopt("FP8", kv_cache_quant_algo="INT8")),
    "own-input-factors": (*FP8, input_factors),
    "quark-transformers": (*FP8, quark),
    "quark-int4": ("awq", "w4a16-asym-g32", quark_int4),
    "auto-round-float": (*FP8, auto_round_float8),
    "auto-round-float-sglang": (*FP8, auto_round_float8),
    "own-mxfp8": (CT, "w8a16-fp8", mxfp8),
    "mxfp8-sglang": (CT, "w8a16-fp8", mxfp8),
    "own-narrow-inputs": (CT, "w4a16-sym-g32", four_bit_inputs),
    "w4a4-servers": (CT, "w4a16-sym-g32", four_bit_inputs),
    "stacked-experts": (CT, "w4a16-sym-g32", stacked_experts),
    "renamed-experts": (CT, "w4a16-sym-g32", renamed_experts),
    "ct-w4a8-sglang": (CT, "w4a16-sym-g32", activations("int")),
    "renamed-experts-vllm": made_by("gptqmodel-mixtral-w4"),
    "renamed-experts-sglang": made_by("llmcompressor-mixtral-w4a16"),
    "ct-bfloat16": made_by("llmcompressor-nvfp4a16"),
    "ct-w4a8-bytes": made_by("llmcompressor-w4a8"),
    "ct-block-input-groups": (CT, "w8a8-fp8-block", other_input_groups),
    "ct-experts-w8a8": (CT, "w8a8", experts),
    "ct-experts-nvfp4": (CT, "w4a16-nvfp4", experts),
    "ct-experts-asymmetric": (CT, "w4a16-asym-g32", experts),
    "own-dense": made_by("bitsandbytes-nf4"),
    "bitsandbytes-vllm": made_by("bitsandbytes-nf4"),
    "bitsandbytes-sglang": made_by("bitsandbytes-nf4"),
    "bitsandbytes-transformers": made_by("bitsandbytes-int8"),
    "torchao-vllm": made_by("torchao-int4"),
    "torchao-sglang": made_by("torchao-int4"),
    "torchao-transformers": made_by("torchao-fp8"),
    "hqq-servers": made_by("hqq-w4"),
    "hqq-transformers": made_by("hqq-w4"),
    **dict.fromkeys(("gguf-own", "gguf-vllm", "gguf-sglang", "gguf-transformers"), ("gguf",)),
}


@pytest.fixture
def gguf_file(docs_5m, tmp_path, monkeypatch):
    """gguf_file() -> the bundled model in Q3_K, which no kernel takes."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def make():
        tensors = llama_tensors(docs_5m, Q3_K)
        return write_gguf(tmp_path / "model.gguf", llama_metadata(docs_5m), tensors)

    return make


@pytest.fixture
def folder_of(model, write_folder, gguf_file):
    """folder_of(format, scheme, change), folder_of(folder) or folder_of("gguf") -> a model."""

    def make(method, scheme=None, change=None):
        if method == "gguf":
            return gguf_file()
        if scheme is None:
            return method
        tensors, config = model(method, scheme)
        if change is not None:
            change(tensors, config)
        second = config.pop("second file", None)
        folder = write_folder(tensors, config)
        if second is not None:
            (folder / "quantize_config.json").write_text(json.dumps(second))
        return folder

    return make


def test_every_rule_has_a_case_and_says_where_it_is_from():
    assert set(CASES) == {rule.name for rule in RULES}
    assert len(CASES) == len(RULES)
    assert all(len(rule.evidence) > 10 for rule in RULES)


@pytest.mark.parametrize("scheme", ["w8a16-sym-channel", "w4a16-mxfp4", "w8a8-fp8"])
def test_experts_that_transformers_loads_are_not_refused(scheme, folder_of):
    found = inspect.inspect_checkpoint(folder_of(CT, scheme, experts))
    assert not [problem for problem in found.problems if problem.severity == "error"]
    assert {v.program: v.answer for v in found.loads_in}["transformers"] == "yes"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_gives_its_verdict(rule, folder_of, monkeypatch):
    seen = []
    monkeypatch.setattr(inspect, "loads_in", lambda facts: seen.append(facts) or loads_in(facts))
    found = inspect.inspect_checkpoint(folder_of(*CASES[rule.name]))
    verdicts = {verdict.program: verdict for verdict in found.loads_in}
    for program in rule.programs:
        reason = rule.applies(program, seen[-1])
        assert reason, f"{rule.name} says nothing of {program}"
        may = ("yes", "slow") if rule.answer == "yes" else (rule.answer,)
        assert verdicts[program].answer in may, verdicts[program]
        assert reason in verdicts[program].reason
