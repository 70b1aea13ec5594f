"""`inspect` reports nothing on good folders, and one named finding for every kind of damage."""

import json

import pytest
import torch

from formats.inspection.inspect import inspect_checkpoint
from formats.quant_config import BLOCK
from tests.formats.inspection.findings import problem_of

Q0 = "model.layers.0.self_attn.q_proj"


V2_ZERO = -2004318072  # 0x88888888


@pytest.mark.parametrize("num_shards", [1, 3])
def test_valid_quantized_folder_has_no_problems(gptq_model, write_folder, num_shards):
    tensors, config = gptq_model
    inspection = inspect_checkpoint(write_folder(tensors, config, num_shards))
    assert inspection.problems == ()
    assert inspection.ok
    assert (inspection.architecture, inspection.format) == ("LlamaForCausalLM", "gptq")
    assert inspection.scheme == "w4a16-sym-g32"
    assert len(inspection.linears) == 14
    down = {linear.name: linear for linear in inspection.linears}["model.layers.1.mlp.down_proj"]
    assert (down.out_features, down.in_features, down.scheme) == (64, 96, "w4a16-sym-g32")
    assert down.num_bytes == 64 * 96 // 2 + 3 * 64 * 2 + 3 * 64 // 2 + 96 * 4
    assert inspection.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
    others = sum(t.nbytes for name, t in tensors.items() if "_proj" not in name)
    assert inspection.other_bytes == others
    weights = sum(linear.out_features * linear.in_features for linear in inspection.linears)
    assert inspection.bits_per_weight == pytest.approx(
        8 * (inspection.total_bytes - others) / weights
    )
    assert json.loads(json.dumps(inspection.to_dict()))["ok"] is True
    assert "no problems found" in inspection.to_text()


def test_valid_float_folder_has_no_problems(float_model, write_folder):
    inspection = inspect_checkpoint(write_folder(*float_model))
    assert inspection.problems == ()
    assert (inspection.format, inspection.scheme) == ("float", "")
    assert inspection.bits_per_weight == 16
    assert {linear.scheme for linear in inspection.linears} == {"bfloat16"}


def change_tensor(name, value):
    def change(tensors, config):
        tensors[name] = value(tensors[name])

    return change


def drop(name):
    return lambda tensors, config: tensors.pop(name)


def change_block(**values):
    return lambda tensors, config: config[BLOCK].update(values)


def put(tensor, index, value):
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


def float_weight_for(name):
    def change(tensors, config):
        for field in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{name}.{field}"]
        tensors[f"{name}.weight"] = torch.zeros(64, 64)

    return change


@pytest.mark.parametrize(
    ("change", "severity", "subject", "text"),
    [
        (drop(f"{Q0}.qweight"), "error", f"{Q0}.qweight", "missing"),
        (drop(f"{Q0}.scales"), "error", f"{Q0}.scales", "missing"),
        (drop(f"{Q0}.qzeros"), "error", f"{Q0}.qzeros", "missing"),
        (change_tensor(f"{Q0}.scales", lambda s: s[:, :32]), "error", Q0, "do not fit together"),
        (change_tensor(f"{Q0}.qzeros", lambda z: z[:1]), "error", Q0, "do not fit together"),
        (change_tensor(f"{Q0}.scales", lambda s: s[0]), "error", f"{Q0}.scales", "2 dimensions"),
        (change_tensor(f"{Q0}.qweight", lambda w: w.long()), "error", f"{Q0}.qweight", "int32"),
        (change_tensor(f"{Q0}.scales", lambda s: s.int()), "error", f"{Q0}.scales", "floating"),
        (
            change_tensor(f"{Q0}.qzeros", lambda z: torch.full_like(z, V2_ZERO)),
            "error",
            f"{Q0}.qzeros",
            "holds v2 zeros (8)",
        ),
        (
            change_tensor(f"{Q0}.qzeros", lambda z: put(z, (1, 3), 0x77777778)),
            "error",
            f"{Q0}.qzeros",
            "expected only 7 (v1) or only 8 (v2) in a symmetric scheme, found [7, 8]",
        ),
        (
            change_tensor(f"{Q0}.g_idx", lambda g: g.flip(0)),
            "error",
            f"{Q0}.g_idx",
            "not grouped in order",
        ),
        (
            change_tensor(f"{Q0}.scales", lambda s: put(s, (0, 5), float("nan"))),
            "error",
            f"{Q0}.scales",
            "NaN",
        ),
        (
            change_tensor(f"{Q0}.scales", lambda s: put(s, (0, 5), float("-inf"))),
            "error",
            f"{Q0}.scales",
            "infinity",
        ),
        (change_tensor(f"{Q0}.scales", lambda s: put(s, (1, 5), 0)), "error", "scales", "zero"),
        (float_weight_for(Q0), "error", "model.layers.0.self_attn", "one matrix"),
        (drop("model.norm.weight"), "error", "model.norm.weight", "missing"),
        (drop("lm_head.weight"), "error", "lm_head.weight", "missing"),
        (
            drop("model.layers.1.input_layernorm.weight"),
            "error",
            "input_layernorm",
            "missing in layers [1]",
        ),
        (
            lambda t, c: c.update(tie_word_embeddings=True),
            "warning",
            "tie_word_embeddings",
            "differs from the embedding",
        ),
        (lambda t, c: c.update(num_hidden_layers=3), "error", "config.json", "states 3 layers"),
        (lambda t, c: c.pop(BLOCK), "error", "config.json", "has no quantization_config"),
        (lambda t, c: c.pop("model_type"), "error", "config.json model_type", "found none"),
        (lambda t, c: c.update(vocab_size="40"), "error", "vocab_size", "found '40'"),
        (lambda t, c: c.update(num_attention_heads=2.0), "error", "num_attention_heads", "2.0"),
        (lambda t, c: c.update(head_dim=0), "error", "config.json head_dim", "found 0"),
        (
            lambda t, c: [t.pop(f"model.layers.{i}.input_layernorm.weight") for i in (0, 1)],
            "error",
            "input_layernorm.weight",
            "missing in all layers",
        ),
        (change_block(bits=5), "error", "quantization_config.bits", "expected one of (2, 3, 4, 8)"),
        (
            change_block(desc_act=True),
            "warning",
            "quantization_config.desc_act",
            "every group index is in order",
        ),
        (change_block(sym=False), "warning", "quantization_config.sym", "vLLM"),
    ],
)
def test_damage_gives_one_problem(gptq_model, write_folder, change, severity, subject, text):
    tensors, config = gptq_model
    change(tensors, config)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    problem_of(inspect_checkpoint(write_folder(tensors, config)), severity, subject, text)


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        (
            {"model_type": "qwen3", "head_dim": 16},
            ["self_attn.q_norm.weight", "self_attn.k_norm.weight"],
        ),
        ({"model_type": "qwen2"}, [f"self_attn.{x}_proj.bias" for x in "qkv"]),
        ({"attention_bias": True}, [f"self_attn.{x}_proj.bias" for x in "qkvo"]),
        ({"mlp_bias": True}, [f"mlp.{x}_proj.bias" for x in ("gate", "up", "down")]),
        ({"model_type": "mistral", "attention_bias": True}, []),
    ],
)
def test_linear_missing_in_every_layer_is_one_problem(gptq_model, write_folder, changes, missing):
    tensors, config = gptq_model
    found = inspect_checkpoint(write_folder(tensors, {**config, **changes}))
    assert [p.subject for p in found.problems] == [f"model.layers.{{i}}.{x}" for x in missing]


def test_null_kv_heads_default_to_num_heads(gptq_model, write_folder):
    tensors, config = gptq_model
    config |= {"num_attention_heads": 4, "num_key_value_heads": None}
    problems = inspect_checkpoint(write_folder(tensors, config)).problems
    assert {p.subject.rpartition(".")[2] for p in problems} == {"k_proj", "v_proj"}
    assert "states [64, 64], found [32, 64]" in problems[0].text


def test_config_with_other_bits_or_groups_is_reported_per_linear(gptq_model, write_folder):
    tensors, config = gptq_model
    config[BLOCK]["bits"] = 8
    folder = write_folder(tensors, config)
    found = inspect_checkpoint(folder)
    assert len(found.problems) == 14
    assert "4 bits, config.json states 8" in found.problems[0].text
    config[BLOCK].update(bits=4, group_size=64)
    (folder / "config.json").write_text(json.dumps(config))
    found = inspect_checkpoint(folder)
    assert len(found.problems) == 14
    assert "groups of 32, config.json states 64" in found.problems[0].text


def test_fused_members_with_different_groups_are_reported(gptq_model, write_folder):
    tensors, config = gptq_model
    for field in ("qzeros", "scales"):
        tensors[f"{Q0}.{field}"] = tensors[f"{Q0}.{field}"][:1].contiguous()
    tensors[f"{Q0}.g_idx"] = torch.zeros(64, dtype=torch.int32)
    texts = [str(p) for p in inspect_checkpoint(write_folder(tensors, config)).problems]
    assert any("groups of 64" in text for text in texts)
    assert any("q_proj w4a16-sym-channel" in text and "one matrix" in text for text in texts)


def test_v1_qzeros_labelled_v2_are_reported(gptq_model, write_folder):
    tensors, config = gptq_model
    config[BLOCK].update(checkpoint_format="gptq_v2", format="gptq_v2")
    found = inspect_checkpoint(write_folder(tensors, config))
    texts = [str(p) for p in found.problems]
    assert len(texts) == 14 and not found.ok
    answers = {verdict.program: verdict.answer for verdict in found.loads_in}
    # vLLM's kernel does not look at the zeros of symmetric weights
    assert answers == {"this project": "yes", "vLLM": "yes", "SGLang": "no", "transformers": "no"}
    assert sum("holds v1 zeros (7), config.json says gptq_v2" in text for text in texts) == 14


def test_wrong_version_label_does_not_hide_other_problems(gptq_model, write_folder):
    tensors, config = gptq_model
    config[BLOCK].update(checkpoint_format="gptq_v2", format="gptq_v2")
    tensors[f"{Q0}.scales"] = put(tensors[f"{Q0}.scales"], (0, 5), float("nan"))
    found = inspect_checkpoint(write_folder(tensors, config))
    assert {verdict.answer for verdict in found.loads_in} == {"no"}
    assert all("NaN" in verdict.reason for verdict in found.loads_in)


def test_valid_v2_has_no_problems(gptq_model, write_folder):
    tensors, config = gptq_model
    config[BLOCK].update(checkpoint_format="gptq_v2")
    for name in tensors:
        if name.endswith("qzeros"):
            tensors[name] = torch.full_like(tensors[name], V2_ZERO)
    found = inspect_checkpoint(write_folder(tensors, config))
    assert found.problems == ()


def test_differing_second_config_is_a_warning(gptq_model, write_folder):
    tensors, config = gptq_model
    folder = write_folder(tensors, config)
    (folder / "quantize_config.json").write_text(json.dumps(config[BLOCK]))
    assert inspect_checkpoint(folder).problems == ()
    (folder / "quantize_config.json").write_text(json.dumps({**config[BLOCK], "bits": 8}))
    problem_of(inspect_checkpoint(folder), "warning", "quantize_config.json", "differs")


def test_unsupported_tool_format_is_one_error(gptq_model, write_folder):
    tensors, config = gptq_model
    config[BLOCK] = {"quant_method": "quanto", "bits": 4}
    found = inspect_checkpoint(write_folder(tensors, config))
    problem_of(found, "error", "quant_method", "'quanto'")
    assert found.format == "quanto"


@pytest.mark.parametrize("content", ["", "[]", '{"architectures": 3, "num_hidden_layers": "x"}'])
def test_damaged_config_does_not_stop_the_rest(gptq_model, write_folder, content):
    folder = write_folder(*gptq_model)
    (folder / "config.json").write_text(content)
    found = inspect_checkpoint(folder)
    assert not found.ok
    assert len(found.linears) == 14


def test_hostile_tensor_names_do_not_crash_it(float_model, write_folder):
    tensors, config = float_model
    for name in (
        "model.layers.0.{x}.weight",
        "a.layers.²." + "9" * 5000 + ".weight",
        ".qweight",
        "",
    ):
        tensors[name] = torch.zeros(2, 2)
    json.dumps(inspect_checkpoint(write_folder(tensors, config)).to_dict())


def test_old_tensor_names_are_accepted(gptq_model, write_folder):
    folder = write_folder(*gptq_model)
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-128g.safetensors")
    found = inspect_checkpoint(folder)
    problem_of(found, "error", "model.safetensors", "not found, but gptq_model-4bit-128g")
    assert len(found.linears) == 14


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (64, 128)),
        ("lm_head.weight", (64, 128)),
        ("model.norm.weight", (64, 1)),
        ("model.layers.1.input_layernorm.weight", (32,)),
        ("model.layers.1.input_layernorm.weight", (64, 1)),
        ("model.layers.0.post_attention_layernorm.weight", (64, 64)),
        ("model.layers.0.mlp.up_proj.weight", (96 * 64,)),
        ("model.layers.0.mlp.up_proj.weight", (1, 96, 64)),
    ],
)
def test_float_tensor_shape_mismatch_is_reported(float_model, write_folder, name, shape):
    tensors, config = float_model
    assert tensors[name].shape != shape
    tensors[name] = torch.zeros(shape, dtype=torch.bfloat16)
    problem_of(inspect_checkpoint(write_folder(tensors, config)), "error", name, "config.json")


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"]
    + ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"],
)
def test_integer_tensor_instead_of_float_is_reported(float_model, write_folder, name):
    tensors, config = float_model
    tensors[name] = tensors[name].to(torch.int32)
    problem_of(inspect_checkpoint(write_folder(tensors, config)), "error", name, "torch.int32")


def test_fused_float_members_with_two_dtypes_are_accepted(float_model, write_folder):
    tensors, config = float_model
    name = "model.layers.0.self_attn.v_proj.weight"
    tensors[name] = tensors[name].float()
    assert inspect_checkpoint(write_folder(tensors, config)).problems == ()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8])
@pytest.mark.parametrize("in_order", [True, False])
def test_g_idx_with_other_integer_dtype_is_reported(gptq_model, write_folder, dtype, in_order):
    tensors, config = gptq_model
    g_idx = tensors[f"{Q0}.g_idx"].to(dtype)
    tensors[f"{Q0}.g_idx"] = g_idx if in_order else g_idx.flip(0)
    texts = [p.text for p in inspect_checkpoint(write_folder(tensors, config)).problems]
    assert len(texts) == (not in_order)
    assert all("not grouped in order" in text for text in texts)


@pytest.mark.parametrize("layer", [0, 1])
def test_quantized_linear_shape_mismatch_is_reported(gptq_model, write_folder, layer):
    tensors, config = gptq_model
    wrong, donor = f"model.layers.{layer}.mlp.down_proj", Q0
    for field in ("qweight", "qzeros", "scales", "g_idx"):
        tensors[f"{wrong}.{field}"] = tensors[f"{donor}.{field}"].clone()
    found = inspect_checkpoint(write_folder(tensors, config))
    problem_of(found, "error", wrong, "config.json states [64, 96], found [64, 64]")


def test_bias_shape_mismatch_is_reported(float_model, write_folder):
    tensors, config = float_model
    config["num_attention_heads"] = 4
    for layer in (0, 1):
        tensors[f"model.layers.{layer}.self_attn.q_proj.bias"] = torch.zeros(64 - layer)
    config["num_key_value_heads"] = 2
    found = inspect_checkpoint(write_folder(tensors, config))
    problem_of(found, "error", "model.layers.1.self_attn.q_proj.bias", "[64], found [63]")


@pytest.mark.parametrize(
    ("names", "answer", "words"),
    [
        (["DbrxForCausalLM"], "not judged", "through transformers if a check at the start passes"),
        (["ChatGLMModel"], "no", "runs code from its folder"),
        *((names, "no", "names no architecture") for names in ([], ["A", "B"], "Llama", 7)),
    ],
)
def test_model_of_unknown_family_is_reported(float_model, write_folder, names, answer, words):
    tensors, config = float_model
    config["architectures"] = names
    answers = {v.program: v for v in inspect_checkpoint(write_folder(tensors, config)).loads_in}
    assert answers["this project"].answer == answer
    assert words in answers["this project"].reason
    assert answers["vLLM"].answer == "yes"


@pytest.mark.parametrize(
    ("name", "value", "placed"),
    [
        ("foo.bar", 1, False),
        ("lm_head.bias", 1, False),
        (f"{Q0}.bias", 1, False),
        (f"{Q0}.bias", 0, True),
        (f"{Q0}.weight_scale", 1, False),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", 1, True),
    ],
)
def test_unexpected_tensors_are_reported(gptq_model, write_folder, name, value, placed):
    tensors, config = gptq_model
    for layer in range(2):
        tensors[name.replace("layers.0", f"layers.{layer}")] = torch.full((64,), float(value))
    found = inspect_checkpoint(write_folder(tensors, config))
    about = [p for p in found.problems if "is not part of the model" in p.text]
    assert [p.subject for p in about] == ([] if placed else [name])
    assert found.ok
    answer = found.loads_in[0]
    assert (answer.answer, name in answer.reason) == (("yes", False) if placed else ("no", True))


@pytest.mark.parametrize("layers", [(0,), (0, 1)])
def test_zero_biases_are_not_reported(gptq_model, write_folder, layers):
    """Nor do they for the loader, which leaves them out."""
    tensors, config = gptq_model
    for layer in layers:
        name = Q0.replace(".0.", f".{layer}.")
        tensors[f"{name}.bias"] = torch.zeros(tensors[f"{name}.scales"].shape[1])
    assert not inspect_checkpoint(write_folder(tensors, config)).problems


def test_bias_in_one_layer_is_reported_missing_in_others(gptq_model, write_folder):
    tensors, config = gptq_model
    tensors[f"{Q0}.bias"] = torch.ones(tensors[f"{Q0}.scales"].shape[1])
    found = inspect_checkpoint(write_folder(tensors, config))
    assert not found.ok and "is missing in layers [1" in found.to_text()


def test_negative_g_idx_gives_no_for_every_server(gptq_model, write_folder):
    tensors, config = gptq_model
    tensors[f"{Q0}.g_idx"] = put(tensors[f"{Q0}.g_idx"], 0, -1)
    found = inspect_checkpoint(write_folder(tensors, config))
    assert any("expected groups 0..1, found -1..1" in p.text for p in found.problems)
    assert {verdict.answer for verdict in found.loads_in} == {"no"}
