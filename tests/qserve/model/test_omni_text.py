"""Qwen2.5-Omni and Qwen3-Omni: the text model inside of the thinker."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import Scheme
from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams
from tests.formats.inspection.findings import of_weights
from tests.qserve.model.variants import TOKENS, edited, logits, relative
from tests.tiny_families import TINY, TINY_FAMILIES

AUDIO = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 1}
AUDIO |= {"encoder_ffn_dim": 16, "output_dim": 64, "num_mel_bins": 8}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1}
VISION |= {"out_hidden_size": 64}
ROPES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
TEXT = {**TINY, "rope_parameters": ROPES, "tie_word_embeddings": False}
OTHERS = {
    "talker.model.layers.0.self_attn.q_proj.weight": torch.ones(4, 4),
    "token2wav.x.weight": torch.ones(4, 4),
    "code2wav.x.weight": torch.ones(4, 4),
}
MODELS = {
    "2.5": (
        "Qwen2_5OmniThinker",
        "Qwen2_5OmniModel",
        {"model_type": "qwen2_5_omni_text"},
        {},
    ),
    "3": (
        "Qwen3OmniMoeThinker",
        "Qwen3OmniMoeForConditionalGeneration",
        {**TINY_FAMILIES["qwen3_moe"][1], "model_type": "qwen3_omni_moe_text"},
        {"deepstack_visual_indexes": [], "num_position_embeddings": 16},
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def made(request, tmp_path_factory):
    """(folder as published, transformers' thinker)"""
    thinker, architecture, text, vision = MODELS[request.param]
    config = getattr(transformers, f"{thinker}Config")(
        text_config={**TEXT, **text}, audio_config=AUDIO, vision_config={**VISION, **vision}
    )
    torch.manual_seed(5)
    model = getattr(transformers, f"{thinker}ForConditionalGeneration")(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, float("norm" in name), 0.2)
    alone, folder = (tmp_path_factory.mktemp("omni") / name for name in ("thinker", "whole"))
    model.save_pretrained(alone)
    folder.mkdir()
    state = load_file(alone / "model.safetensors")
    state = {f"thinker.{name}": tensor for name, tensor in state.items()} | OTHERS
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((alone / "config.json").read_text())
    whole = {"architectures": [architecture], "thinker_config": stated}
    whole["model_type"] = stated["model_type"].removesuffix("_thinker")
    (folder / "config.json").write_text(json.dumps(whole))
    return folder, alone, model


def test_logits_equal_transformers(made):
    folder, alone, model = made
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5
    assert torch.equal(logits(alone), logits(folder))


def test_tokens_in_chunks(made):
    folder, _, model = made
    llm = LLM(folder, device="cpu", max_model_len=64, max_num_batched_tokens=11)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    prompts = [TOKENS, TOKENS[::-1], [5, 9, 77] * 6]
    for _ in range(2):  # the second time with hits of the prefix cache
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens = list(prompt)
            for _ in range(8):
                with torch.no_grad():
                    tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            assert list(output.outputs[0].token_ids) == tokens[len(prompt) :]


@pytest.mark.parametrize("output_format", ["compressed-tensors", "awq", "gptq"])
def test_quantized_files_keep_the_other_parts(made, tmp_path, output_format):
    folder, _, model = made
    target = tmp_path / "quantized"
    scheme = Scheme.parse("w4a16-asym-g32" if output_format == "awq" else "w4a16-sym-g32")
    quantize_checkpoint(
        folder, target, scheme=scheme, output_format=output_format, recipe="rtn", progress=False
    )
    before, after = (load_file(path / "model.safetensors") for path in (folder, target))
    kept = {n for n in before if "model.layers" not in n or n.startswith("talker.")}
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert any(
        n.startswith("thinker.model.layers.0.self_attn.q_proj.") for n in after.keys() - kept
    )
    config = json.loads((target / "config.json").read_text())
    assert "thinker_config" in config
    assert "tie_word_embeddings" not in config
    assert 0 < relative(logits(target), logits(folder)) < 0.5
    for checkpoint in (folder, target):
        assert of_weights(inspect_checkpoint(checkpoint)) == ()


def test_thinker_head_is_used(made, tmp_path):
    folder, _, _ = made
    changed = edited(folder, tmp_path / "x", lambda s: s["thinker.lm_head.weight"].mul_(2))
    assert relative(logits(changed), 2 * logits(folder)) < 1e-5
    assert set(CheckpointReader(folder).other_parts) > OTHERS.keys()


def test_norm_of_routing_weights_is_on_by_default(made, tmp_path):
    folder, _, model = made
    if "Moe" not in type(model).__name__:
        pytest.skip("no experts")

    def without(config):
        assert config["thinker_config"]["text_config"].pop("norm_topk_prob")

    def off(config):
        config["thinker_config"]["text_config"]["norm_topk_prob"] = False

    assert torch.equal(logits(edited(folder, tmp_path / "x", config=without)), logits(folder))
    wrong = logits(edited(folder, tmp_path / "y", config=off))
    assert relative(wrong, logits(folder)) > 1e-3
