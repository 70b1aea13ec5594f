"""Numbers of GPUs over which a checkpoint can be divided, as `inspect` prints them."""

import json

import pytest

from formats.inspection.inspect import inspect_checkpoint
from formats.inspection.linear_summary import LinearSummary
from formats.inspection.parallel import parallel_sizes
from formats.quant_config import QuantConfig
from formats.scheme import Scheme

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 3584,
}
DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("scheme", "inputs", "reasons"),
    [
        ("w4a16-sym", 18944, {1: "", 2: "", 4: "", 8: ""}),  # 148 groups: unequal over 8
        ("w4a16-sym", 128, {2: "", 4: "", 8: ""}),  # one group, cut
        # 3 bits fill words by 32 codes
        (
            "w3a16-sym",
            64,
            {2: "", 4: f"{DOWN}: its 64 inputs cannot be divided over the GPUs in groups of "},
        ),
        ("w8a8-fp8-block", 256, {2: "", 4: "", 8: ""}),
    ],
)
def test_input_sizes_limit_tensor_parallel(scheme, inputs, reasons):
    method = "compressed-tensors" if "fp8" in scheme else "gptq"
    quant = QuantConfig(scheme=Scheme.parse(scheme), method=method)
    linear = LinearSummary(
        name=DOWN, out_features=3584, in_features=inputs, scheme=scheme, num_bytes=0
    )
    found = parallel_sizes(CONFIG, quant, [linear])
    for size, reason in reasons.items():
        assert found[size].startswith(reason) and bool(found[size]) == bool(reason), found[size]


def test_head_counts_limit_tensor_parallel():
    assert parallel_sizes(CONFIG, None, [])[8] == ""  # two GPUs hold the same KV head
    found = parallel_sizes({**CONFIG, "num_key_value_heads": 28}, None, [])
    assert found == {1: "", 2: "", 4: "", 8: ""}, "28 heads over 8: four, and three"
    found = parallel_sizes({**CONFIG, "num_attention_heads": 3, "num_key_value_heads": 3}, None, [])
    assert found[2] == "" and "3 attention heads of 3 KV heads cannot be divided" in found[4]


@pytest.mark.parametrize(
    ("config", "text"),
    [({}, "unknown without a config.json"), ({"architectures": ["X"]}, "no architecture that")],
)
def test_unknown_family_has_no_tensor_parallel_sizes(config, text):
    found = parallel_sizes(config, None, [])
    assert all(text in found[size] for size in (2, 4, 8))
    assert bool(found[1]) == (not config)


def test_narrow_experts_need_expert_parallel():
    """3-bit experts of 64 inputs, over 4 GPUs; only if a dense linear is not in the way."""
    config = {**CONFIG, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}
    quant = QuantConfig(scheme=Scheme.parse("w3a16-sym"), method="gptq")

    def linear(name):
        shape = {"out_features": 3584, "in_features": 64, "num_bytes": 0}
        return LinearSummary(name=name, scheme="w3a16-sym", **shape)

    expert = linear("model.layers.1.mlp.experts.0.down_proj")
    found = parallel_sizes(config, quant, [expert])
    assert found[2] == "" and found[4].endswith("w3a16-sym; --enable-expert-parallel works")
    assert found[8] and "expert-parallel" not in found[8], "4 experts for 8 GPUs"
    found = parallel_sizes(config, quant, [expert, linear(DOWN)])
    assert found[4] and "expert-parallel" not in found[4]


def test_printed_report_names_an_equal_reason_once(docs_5m, tmp_path):
    config = json.loads((docs_5m / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(docs_5m / "model.safetensors")
    printed = {}
    for name in ("LlamaForCausalLM", "FooForCausalLM"):
        text = json.dumps({**config, "architectures": [name]})
        (tmp_path / "config.json").write_text(text)
        lines = inspect_checkpoint(tmp_path).to_text().splitlines()
        (printed[name],) = (line for line in lines if line.startswith("tensor parallel: "))
    assert printed["LlamaForCausalLM"].startswith("tensor parallel: 1, 2, 4 yes; 8 no: 4 attention")
    assert printed["FooForCausalLM"].startswith("tensor parallel: 1 yes; 2, 4, 8 no: unknown: ")
    assert printed["FooForCausalLM"].count("unknown") == 1
