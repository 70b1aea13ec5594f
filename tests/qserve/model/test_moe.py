"""Mixtures of experts against transformers: routing, logits and tokens, float and quantized."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

from formats.checkpoint import CheckpointReader
from formats.codecs import mxfp4
from formats.dequantize import dequantize_checkpoint
from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from qkernels import ops
from qkernels.moe.routing import Routing
from qserve.llm import LLM
from qserve.model.loading.dummy_source import DummySource
from qserve.model.model_config import ModelConfig
from qserve.params.sampling_params import SamplingParams
from tests.qserve.model.test_transformers import dense
from tests.qserve.model.variants import TOKENS, edited, logits, relative

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "glm4_moe", "granite_moe")
FAMILIES += ("granite_moe_shared", "llama4")
PARAMS = SamplingParams(temperature=0, max_tokens=12, detokenize=False)


def in_transformers(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens_equal_transformers(tiny_model, family):
    folder = tiny_model(family)
    model = in_transformers(folder)
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    llm = LLM(folder, device="cpu", dtype="float32", max_model_len=64)
    assert relative(llm.logits(TOKENS), want) < 1e-5
    prompts = [TOKENS, TOKENS[3:5], [11]]
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.parametrize(
    ("family", "scheme", "output_format"),
    [
        ("mixtral", "w4a16-sym-g32", "gptq"),
        ("qwen2_moe", "w4a16-asym-g32", "awq"),
        ("qwen3_moe", "w4a16-sym-g32", "compressed-tensors"),
        ("glm4_moe", "w4a16-asym-g32", "gptq"),
        ("qwen3_moe", "w8a16-fp8", "compressed-tensors"),
    ],
)
def test_quantized_experts_equal_dequantized_weights(
    written, tmp_path, family, scheme, output_format
):
    """transformers, with the weights that the file means."""
    folder = written(scheme, output_format, family)
    model = in_transformers(dense(folder, tmp_path / "dense", torch.float32))
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-4


@pytest.mark.parametrize("family", ["hunyuan_moe", "llama4", "qwen2_moe", "qwen3_5_moe"])
def test_transformers_reads_quantized_experts_and_the_float_routing(written, family):
    """Routers and gates that are linears there are listed as float."""
    folder = written("w4a16-sym-g32", "compressed-tensors", family)
    verdicts = {v.program: v.answer for v in inspect_checkpoint(folder).loads_in}
    assert verdicts["transformers"] == "yes"
    model = in_transformers(folder)
    with torch.no_grad():
        found = model(torch.tensor([TOKENS])).logits[0]
    assert relative(found, logits(folder)) < 2e-3


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("mixtral", "w8a8"),
        ("qwen2_moe", "w8a8-fp8"),
        ("glm4_moe", "w8a8-static"),
        ("qwen3_moe", "w4a8-g32"),
        ("mixtral", "w4a8-fp8-g32"),
    ],
)
def test_inputs_of_experts_are_rounded(written, tiny_model, family, scheme):
    folder = written(scheme, "compressed-tensors", family)
    found, want = logits(folder), logits(tiny_model(family))
    assert 1e-4 < relative(found, want) < 0.7


def test_expert_may_be_missing_and_is_named(tiny_model, tmp_path):
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    folder = edited(tiny_model("qwen3_moe"), tmp_path / "x", lambda state: state.pop(name))
    with pytest.raises(Exception, match=name.replace(".", r"\.") + ".* is missing"):
        logits(folder)


def test_layers_without_experts_follow_the_config(tiny_model, tmp_path):
    """A dense layer where the file has experts has nothing to load."""
    source = tiny_model("qwen2_moe")
    config = json.loads((source / "config.json").read_text())
    assert config["mlp_only_layers"] == [1]
    changed = edited(source, tmp_path / "x", config=lambda c: c.update(mlp_only_layers=[0, 1]))
    with pytest.raises(Exception, match=r"model\.layers\.0\.mlp\.gate_proj\.weight"):
        logits(changed)


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_deepseek_v2_routing_equals_transformers(method):
    config = DeepseekV2Config(
        hidden_size=32,
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        topk_method=method,
        routed_scaling_factor=2.5,
    )
    torch.manual_seed(0)
    router = DeepseekV2TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    x_TC = torch.randn(9, 32)
    with torch.no_grad():
        _, want, ids = router(x_TC)
        logits_TE = x_TC @ router.weight.t()
    groups = {} if method == "greedy" else {"num_groups": 4, "top_groups": 2}
    routes = ops.route(logits_TE, Routing(num_experts=12, top_k=3, factor=2.5, **groups))
    order = ids.argsort(-1)
    own = routes.ids_Mk.long().argsort(-1)
    assert torch.equal(routes.ids_Mk.gather(1, own).long(), ids.gather(1, order))
    torch.testing.assert_close(routes.weights_Mk.gather(1, own), want.gather(1, order))


def with_mxfp4_experts(source, folder, packed=None, numbers=None):
    """A gpt-oss with random experts in MXFP4, as it is published.

    `packed`, `numbers`: get its tensors of experts, and what these are in float.
    """
    generator = torch.Generator().manual_seed(0)
    packed, numbers = {} if packed is None else packed, {} if numbers is None else numbers

    def quantize(state):
        for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
            E, K, N = state.pop(name).shape
            blocks = torch.randint(256, (E, N, K // 32, 16), generator=generator).to(torch.uint8)
            scales = torch.randint(121, 125, (E, N, K // 32), generator=generator).to(torch.uint8)
            packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, scales
            experts = [mxfp4.decode(*each) for each in zip(blocks, scales, strict=True)]
            whole = torch.stack([each.dequantize().t() for each in experts])
            numbers[name] = whole.contiguous()
        state.update(packed)

    def config(value):
        value["quantization_config"] = {"quant_method": "mxfp4"}

    return edited(source, folder, quantize, config)


def test_mxfp4_experts_equal_dequantized(tiny_model, tmp_path):
    """MXFP4 experts give the logits of equal experts in float."""
    source, packed, numbers = tiny_model("gpt_oss"), {}, {}
    folder = with_mxfp4_experts(source, tmp_path / "mxfp4", packed, numbers)
    plain = edited(source, tmp_path / "float", lambda state: state.update(numbers))
    assert len(numbers) == 6
    assert relative(logits(folder), logits(plain)) < 1e-5
    assert relative(logits(folder), logits(source)) > 0.1
    found = inspect_checkpoint(folder)
    num_bytes = sum(tensor.numel() for tensor in packed.values())
    assert found.mxfp4_experts == (num_bytes, sum(each.numel() for each in numbers.values()))
    assert "experts in MXFP4" in found.to_text() and "4.25 bits per weight" in found.to_text()
    assert inspect_checkpoint(plain).mxfp4_experts == (0, 0)
    dequantize_checkpoint(folder, tmp_path / "decoded", dtype="float32")
    decoded = CheckpointReader(tmp_path / "decoded")
    assert decoded.entries.keys() == CheckpointReader(plain).entries.keys()
    assert all(torch.equal(decoded.get(name), each) for name, each in numbers.items())
    # random experts have the form of the file's
    config = ModelConfig.from_folder(folder)
    stored, dummy = CheckpointReader(folder), DummySource(config, torch.device("cpu"), 0)
    for name in packed:
        found, like = dummy.tensor(name, tuple(packed[name].shape)), stored.get(name)
        assert name in dummy and (found.dtype, found.shape) == (like.dtype, like.shape)
    assert next(iter(numbers)) not in dummy
    llm = LLM(folder, device="cpu", max_model_len=32, load_format="dummy")
    assert bool(torch.isfinite(llm.logits(TOKENS)).all())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda stack: stack.to(torch.float8_e4m3fn), "expected float weights of all experts"),
        (lambda stack: stack[:, 1:].contiguous(), "191 outputs cannot be divided by 2 linears"),
    ],
)
def test_unsupported_expert_stack_is_named(tiny_model, tmp_path, change, reason):
    name = "model.layers.1.block_sparse_moe.input_linear"

    def edit(state):
        state[f"{name}.weight"] = change(state[f"{name}.weight"])

    folder = edited(tiny_model("granite_moe"), tmp_path / "x", edit)
    with pytest.raises(InputError, match=rf"{re.escape(name)}.*: {reason}"):
        logits(folder)


def test_mtp_layers_are_not_loaded(tiny_model, tmp_path):
    """GLM-4.5 is published with one more layer, which predicts the token after the next."""
    source = tiny_model("glm4_moe")
    extra = {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}
    config = {"num_nextn_predict_layers": 1}
    folder = edited(source, tmp_path / "x", lambda s: s.update(extra), lambda c: c.update(config))
    assert torch.equal(logits(folder), logits(source))
    changed = edited(folder, tmp_path / "y", config=lambda c: c.update(num_nextn_predict_layers=0))
    with pytest.raises(Exception, match=r"1 tensor that no layer .* uses.*layers\.3\.eh_proj"):
        logits(changed)
