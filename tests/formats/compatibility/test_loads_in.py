"""Every rule of who loads what: a file that it is about, the verdict, and the evidence."""

import json
from pathlib import Path

import pytest

from formats.compatibility.rules import RULES, loads_in
from formats.inspection import inspect
from formats.quant_config import BLOCK
from tests.formats.compatibility import changes
from tests.formats.gguf.written import F32, Q3_K, llama_metadata, llama_tensors, write_gguf


def made_by(name):
    """A folder that another tool wrote."""
    return (MADE_BY / name,)


MADE_BY = Path(__file__).parents[1] / "made_by"
CT = "compressed-tensors"
FP8 = (CT, "w8a8-fp8-static")
# rule -> format, scheme and the change that make a file which the rule is about
CASES = {
    "ct-embedding-vllm": (CT, "w4a16-sym-g32", changes.packed_embedding),
    "ct-tied-embedding-vllm": (CT, "w4a16-sym-g32", changes.tied_packed_embedding),
    "ct-head-vllm": (CT, "w4a16-sym-g32", changes.quantized_head),
    "ct-head-sglang": (CT, "w4a16-sym-g32", changes.quantized_head),
    "gptq-head-transformers": ("gptq", "w4a16-sym-g32", changes.quantized_head),
    "ct-embedding-sglang": (CT, "w4a16-sym-g32", changes.packed_embedding),
    "ct-embedding-transformers": (CT, "w4a16-sym-g32", changes.packed_embedding),
    "own-error": ("gptq", "w4a16-sym-g32", changes.nan),
    "damaged": ("gptq", "w4a16-sym-g32", changes.nan),
    "unreadable": ("gptq", "w4a16-sym-g32", changes.block(quant_method="of another world")),
    "refused-family": ("gptq", "w4a16-sym-g32", changes.config_of(architectures=["ChatGLMModel"])),
    "no-family": ("gptq", "w4a16-sym-g32", changes.config_of(architectures=["A", "B"])),
    "family": ("gptq", "w4a16-sym-g32", changes.config_of(architectures=["OtherForCausalLM"])),
    "activation": ("gptq", "w4a16-sym-g32", changes.config_of(hidden_act="gelu")),
    "unplaced": ("gptq", "w4a16-sym-g32", changes.unplaced),
    "second-file-transformers": ("gptq", "w4a16-sym-g32", changes.only_second_file),
    "second-file-servers": ("gptq", "w4a16-sym-g32", changes.only_second_file),
    "fused-mixed": ("gptq", "w4a16-sym-g32", changes.member_in_float),
    "variant": (
        "gptq",
        "w4a16-sym-g32",
        changes.config_of(architectures=["CohereForCausalLM"], use_qk_norm=True),
    ),
    "granite-experts-apart": (CT, "w4a16-sym-g32", changes.granite_experts),
    "granite-experts": (CT, "w4a16-sym-g32", changes.granite_experts),
    "vision-experts": (CT, "w4a16-sym-g32", changes.vision_experts),
    "media-experts": (CT, "w4a16-sym-g32", changes.media_experts),
    "merged-gates": (
        CT,
        "w4a16-sym-g32",
        changes.config_of(architectures=["MiniMaxM3VLForCausalLM"]),
    ),
    "always-active-experts": (
        CT,
        "w4a16-sym-g32",
        changes.config_of(
            architectures=["InklingForCausalLM"],
            mlp_layer_types=["dense", "dense"],
            **{"head_dim": 16, "swa_head_dim": 16},
            **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2},
        ),
    ),
    "gemma-experts": (CT, "w4a16-sym-g32", changes.gemma_experts),
    "unlisted-linears": (CT, "w4a16-sym-g32", changes.hybrid_experts),
    "lacks-class": (
        CT,
        "w4a16-sym-g32",
        changes.config_of(architectures=["Step3p5ForCausalLM"], head_dim=16),
    ),
    "mamba-1": ("gptq", "w4a16-sym-g32", changes.with_mamba_1),
    "delta-net": ("gptq", "w4a16-sym-g32", changes.config_of(architectures=["Qwen3_5ForCausalLM"])),
    "own-act-order": ("gptq", "w4a16-sym-g32", changes.act_order),
    "own-groups": (CT, "w4a16-sym-g16", None),
    "gptq-without-desc-act": (
        "gptq",
        "w4a16-sym-g32",
        lambda tensors, config: config[BLOCK].pop("desc_act"),
    ),
    "gptq-bits": ("gptq", "w4a16-asym-g32", None),
    "gptq-groups": ("gptq", "w4a16-sym-g16", None),
    "gptq-desc-act": ("gptq", "w4a16-sym-g32", changes.act_order),
    "gptq-mislabelled": ("gptq", "w4a16-sym-g32", changes.other_label),
    "gptq-plain-kernel": ("gptq", "w4a16-asym-g32", None),
    "gptq-groups-sglang": ("gptq", "w4a16-sym-g16", None),
    "gptq-act-order-sglang": ("gptq", "w4a16-sym-g32", changes.act_order),
    "gptq-shapes": ("gptq", "w4a16-sym-g32", None),
    "gptq-dynamic": ("gptq", "w4a16-sym-g32", changes.o_in_float),
    "gptq-mislabelled-transformers": ("gptq", "w4a16-sym-g32", changes.other_label),
    "gptq-v1-asymmetric": ("gptq", "w4a16-asym-g32", changes.asymmetric_v1),
    "gptq-transformers": ("gptq", "w4a16-sym-g32", None),
    "gptq-activations": ("gptq", "w8a8", None),
    "awq-no-zeros": ("awq", "w4a16-sym-g32", changes.no_zeros),
    "awq-symmetric": ("awq", "w4a16-sym-g32", changes.block(zero_point=False)),
    "awq-groups": ("awq", "w4a16-asym-g16", None),
    "awq-transformers": ("awq", "w4a16-asym-g32", None),
    "ct-actorder": (CT, "w4a16-sym-g32", changes.weight_g_idx),
    "ct-weight-zeros": (CT, "w4a16-sym-g32", changes.weight_zeros),
    "ct-heads-kv-vllm": (CT, "w4a16-sym-g32", changes.heads_kv),
    "ct-heads-kv-sglang": (CT, "w4a16-sym-g32", changes.heads_kv),
    "ct-int8-kv-vllm": (CT, "w8a8", changes.int8_kv),
    "ct-int8-kv-sglang": (CT, "w8a8", changes.int8_kv),
    "ct-humming": (CT, "w4a16-sym-g16", None),
    "ct-groups-sglang": (CT, "w4a16-sym-g16", None),
    "ct-fp8": (CT, "w8a8-fp8", None),
    "ct-packed-asymmetric-mixed": (CT, "w4a16-asym-g32", changes.second_group),
    "ct-packed-asymmetric": (CT, "w4a16-asym-g32", None),
    "ct-transformers": (CT, "w8a8", None),
    "ct-bits-sglang": (CT, "w3a16-sym-g32", None),
    "ct-w4a8-int": (CT, "w4a16-sym-g32", changes.activations("int")),
    "ct-w4a8-fp8": (CT, "w4a16-sym-g32", changes.w4a8_fp8_of_another_module),
    "ct-w4a8-fp8-groups": (CT, "w4a16-sym-g32", changes.activations("float")),
    "own-inputs": (CT, "w8a8", changes.asymmetric_inputs),
    "own-w4a8": (CT, "w4a16-asym-g32", changes.activations("int")),
    "ct-mxfp4-sglang": (CT, "w4a16-mxfp4", None),
    "auto-round-packing": ("gptq", "w4a16-sym-g32", changes.auto_round("auto_round:gptqmodel")),
    "auto-round-bits": ("gptq", "w3a16-sym-g32", changes.auto_round("auto_round:auto_gptq")),
    "auto-round-bits-sglang": ("gptq", "w4a16-sym-g32", changes.five_bits),
    "auto-round-transformers": (
        "gptq",
        "w4a16-sym-g32",
        changes.auto_round("auto_round:auto_gptq"),
    ),
    "fp8-transformers": (CT, "w8a8-fp8-block", changes.native_fp8),
    "modelopt-transformers": (*FP8, changes.modelopt("FP8")),
    "modelopt-vllm": (CT, "w8a8", changes.modelopt("W8A16")),
    "modelopt-sglang": (CT, "w8a8", changes.modelopt("W8A16")),
    "modelopt-int8-kv": (*FP8, changes.modelopt("FP8", kv_cache_quant_algo="INT8")),
    "own-input-factors": (*FP8, changes.input_factors),
    "quark-transformers": (*FP8, changes.quark),
    "quark-int4": ("awq", "w4a16-asym-g32", changes.quark_int4),
    "auto-round-float": (*FP8, changes.auto_round_float8),
    "auto-round-float-sglang": (*FP8, changes.auto_round_float8),
    "own-mxfp8": (CT, "w8a16-fp8", changes.mxfp8),
    "mxfp8-sglang": (CT, "w8a16-fp8", changes.mxfp8),
    "own-narrow-inputs": (CT, "w4a16-sym-g32", changes.four_bit_inputs),
    "w4a4-servers": (CT, "w4a16-sym-g32", changes.four_bit_inputs),
    "stacked-experts": (CT, "w4a16-sym-g32", changes.stacked_experts),
    "renamed-experts": (CT, "w4a16-sym-g32", changes.renamed_experts),
    "ct-w4a8-sglang": (CT, "w4a16-sym-g32", changes.activations("int")),
    "renamed-experts-vllm": made_by("gptqmodel-mixtral-w4"),
    "renamed-experts-sglang": made_by("llmcompressor-mixtral-w4a16"),
    "ct-bfloat16": made_by("llmcompressor-nvfp4a16"),
    "ct-w4a8-bytes": made_by("llmcompressor-w4a8"),
    "ct-block-input-groups": (CT, "w8a8-fp8-block", changes.other_input_groups),
    "mixed-experts": (CT, "w4a16-sym-g32", changes.mixed_experts),
    "ct-experts-mixed": (CT, "w4a16-sym-g32", changes.mixed_layers_of_experts),
    "ct-humming-zeros": (CT, "w3a16-asym-g32", None),
    "ct-humming-experts": (CT, "w3a16-sym-g32", changes.experts),
    "ct-experts-channel": (CT, "w3a16-sym-channel", changes.experts),
    "ct-experts-mxfp8": (CT, "w8a16-fp8", changes.mxfp8_experts),
    "ct-experts-w8a8": (CT, "w8a8", changes.experts),
    "ct-experts-nvfp4": (CT, "w4a16-nvfp4", changes.experts),
    "ct-experts-asymmetric": (CT, "w4a16-asym-g32", changes.experts),
    "staged-gguf": (CT, "w4a16-sym-g32", changes.staged_gguf),
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
    """gguf_file() -> the bundled model; no kernel takes the outputs of its gate and up in Q3_K."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def make():
        tensors = llama_tensors(docs_5m, F32)
        for name, (weight, _) in tensors.items():
            if "ffn_gate" in name or "ffn_up" in name:
                tensors[name] = weight[:764], Q3_K
            elif "ffn_down" in name:
                tensors[name] = weight[:, :764], F32
        metadata = llama_metadata(docs_5m) | {"llama.feed_forward_length": 764}
        return write_gguf(tmp_path / "model.gguf", metadata, tensors)

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


def test_every_rule_has_a_case_and_a_source():
    assert set(CASES) == {rule.name for rule in RULES}
    assert len(CASES) == len(RULES)
    assert all(len(rule.evidence) > 10 for rule in RULES)


@pytest.mark.parametrize("scheme", ["w8a16-sym-channel", "w4a16-mxfp4", "w8a8-fp8"])
def test_experts_that_transformers_loads_are_not_refused(scheme, folder_of):
    found = inspect.inspect_checkpoint(folder_of(CT, scheme, changes.experts))
    assert not [problem for problem in found.problems if problem.severity == "error"]
    assert {v.program: v.answer for v in found.loads_in}["transformers"] == "yes"


@pytest.mark.parametrize("scheme", ["w3a16-sym-g32", "w8a16-sym-channel", "w3a16-asym-g32"])
def test_experts_that_vllm_loads_are_not_refused(scheme, folder_of):
    found = inspect.inspect_checkpoint(folder_of(CT, scheme, changes.experts))
    assert {v.program: v.answer for v in found.loads_in}["vLLM"] == "yes"


@pytest.mark.parametrize("scheme", ["w2a16-sym-g32", "w3a16-asym-g32", "w6a16-sym-channel"])
def test_verdict_is_yes_for_bit_widths_other_than_4_and_8(scheme, folder_of):
    found = inspect.inspect_checkpoint(folder_of(CT, scheme))
    assert {v.program: v.answer for v in found.loads_in}["this project"] == "yes"


def test_verdicts_for_expert_layers_with_different_schemes(folder_of):
    found = inspect.inspect_checkpoint(
        folder_of(CT, "w4a16-sym-g32", changes.mixed_layers_of_experts)
    )
    answers = {verdict.program: verdict.answer for verdict in found.loads_in}
    assert answers["vLLM"] == answers["SGLang"] == "yes"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_gives_expected_verdict(rule, folder_of, monkeypatch):
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
