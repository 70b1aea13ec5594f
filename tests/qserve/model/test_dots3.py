"""dots3-note: two geometries of latent attention, windows, indexers, and files as published.

Prompts are longer than a window and than what an indexer selects. test_family_tokens.py has shorter
ones.
"""

import json
import random

import pytest
import torch
from safetensors.torch import load_file

from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.architecture.stored_form.dots import dots3
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError, InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import Scheme
from qserve.llm import LLM
from qserve.model.families.latent import dots3 as builder
from qserve.model.loading.dummy_source import DummySource
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig
from qserve.parallel.pipeline import Pipeline
from qserve.params.sampling_params import SamplingParams
from tests.qserve.model.test_family_tokens import FEW_PAGES, check_greedy, count_preemptions
from tests.qserve.model.variants import edited, model_maker, relative
from tests.qserve.parallel.in_threads import run_ranks
from tests.qserve.parallel.test_context_parallel import TWO, prompt_of_rank
from tests.qserve.parallel.test_sharing import assert_sharded
from tests.tiny_families import TINY_FAMILIES

SELECTED, WINDOW = 12, 9
NAME = "dots3 with few keys"
VARIANTS = {NAME: ("Dots3NoteTextConfig", {**TINY_FAMILIES["dots3"][1], "index_topk": SELECTED})}
IDS = torch.randint(3, 500, (1, 100), generator=torch.Generator().manual_seed(2))
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="session")
def folder(tiny_model, tmp_path_factory):
    return model_maker(tiny_model, tmp_path_factory, VARIANTS)(NAME)


def logits(folder, **settings):
    return LLM(folder, device="cpu", max_model_len=128, **settings).logits(IDS[0].tolist())


def prompts():
    """Some begin alike; all but one are longer than what is selected."""
    rng = random.Random(8)
    start = [rng.randrange(3, 512) for _ in range(17)]
    return [start + [rng.randrange(3, 512) for _ in range(n)] for n in (1, 19, 13, 4)] + [[5, 9]]


def test_logits_equal_transformers(folder, transformers_model):
    with torch.no_grad():
        want = transformers_model(folder)(IDS).logits[0]
    assert relative(logits(folder), want) < 1e-5


def errors_of(folder):
    return [each for each in inspect_checkpoint(folder).problems if each.severity == "error"]


def quantized(source, folder, recipe):
    ids_WS = torch.randint(3, 500, (4, 24), generator=torch.Generator().manual_seed(0))
    quantize_checkpoint(
        source,
        folder,
        scheme=Scheme.parse("w4a16-asym-g32"),
        output_format="gptq",
        recipe=recipe,
        calibration=CalibrationData(ids_WS=ids_WS, source="test", seed=0),
        progress=False,
    )
    return folder


@pytest.mark.parametrize("form", ["float", "quantized"])
def test_greedy_tokens(folder, transformers_model, tmp_path, monkeypatch, form):
    """In chunks, with too few pages, and after beginnings that were there."""
    if form == "quantized":
        folder = quantized(folder, tmp_path / "model", "rtn")
        entries = CheckpointReader(folder).entries
        prefix = "model.layers.0.self_attn"
        assert f"{prefix}.indexer.wq_b.weight" in entries
        assert f"{prefix}.q_b_proj.qweight" in entries
        assert f"{prefix}.g_proj.weight" in entries
        assert "model.layers.1.mlp.shared_experts.up_proj.qweight" in entries
        assert not errors_of(folder)
    llm = LLM(folder, device="cpu", max_model_len=64, max_num_batched_tokens=11, **FEW_PAGES)
    preemptions = count_preemptions(llm, monkeypatch)
    outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert preemptions
    again = llm.generate(prompts()[1:2], GREEDY, use_tqdm=False)
    assert again[0].num_cached_tokens >= 16
    assert again[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    check_greedy(transformers_model(folder), prompts(), outputs)


@pytest.mark.parametrize("recipe", ["gptq", "awq"])
def test_solved_weights(folder, transformers_model, tmp_path, recipe):
    """A calibrated run has windows and selects keys, too."""
    written = quantized(folder, tmp_path / "model", recipe)
    with torch.no_grad():
        want = transformers_model(written)(IDS).logits[0]
    assert relative(logits(written), want) < 1e-5


def test_drafts_keep_the_text(folder, transformers_model):
    """Each row of a verification has its own window."""
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    llm = LLM(folder, device="cpu", max_model_len=64, speculative_config=ngram)
    texts = [[5, 9, 77, 5, 9, 77, 5, 9] * 3, [8] * 22, [3, 4, 5, 6, 3, 4, 5, 6, 3] * 2]
    check_greedy(transformers_model(folder), texts, llm.generate(texts, GREEDY, use_tqdm=False))


def test_ranks_share_heads(folder, monkeypatch):
    """Layers with a window have other numbers of heads."""
    monkeypatch.setattr("tests.qserve.parallel.test_sharing.TOKENS", IDS[0, :30].tolist())
    assert_sharded(folder, 2)


def test_ranks_that_divide_a_prompt(folder):
    token, logprob, pages = prompt_of_rank(folder)
    for found in run_ranks(2, lambda context: prompt_of_rank(folder, context, **TWO)):
        assert found[0] == token and abs(found[1] - logprob) < 1e-4
        for ours, whole in zip(found[2], pages, strict=True):
            assert whole.any()
            floats = (each.view(torch.float32) for each in (ours, whole))
            assert torch.allclose(*floats, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("stage", "first"), [(0, 1), (1, 2)])
def test_first_layer_of_a_stage_makes_its_windows(tmp_path, tiny_model, stage, first):
    """Two pipeline stages have two layers each; three of the four have a window."""
    kinds = ["indexed_attention", *["sliding_attention"] * 3]

    def change(config):
        config["num_hidden_layers"], config["layer_types"] = 4, kinds
        config["mlp_layer_types"] = ["dense", *["sparse"] * 3]
        own = config["per_layer_config"]["1"]
        config["per_layer_config"] = {str(number): own for number in (1, 2, 3)}

    config = ModelConfig.from_folder(edited(tiny_model("dots3"), tmp_path / "x", config=change))
    weights = Weights(
        config,
        DummySource(config, torch.device("cpu"), 0),
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_model_len=64,
        pipeline=Pipeline(stage=stage, num_stages=2, ranks=(0, 1), ahead=None, back=None),
    )
    layers = builder.build(config, weights).layers
    windows = [layer.attention.window for layer in layers]
    numbers = weights.pipeline.layers(4)
    found = [n for n, each in zip(numbers, windows, strict=True) if each and each.is_first]
    assert found == [first]


def test_8_bit_pages(folder):
    """Entries of both widths in int8, with two scales each; keys of indexers stay in float32."""
    coded = LLM(folder, device="cpu", max_model_len=128, kv_cache_dtype="int8")
    sizes = [spec.bytes_per_page for spec in coded.engine.runner.cache_specs]
    indexed = 16 * (64 + 16 + 2 * 4 + 32 * 4)
    assert sizes == [indexed, 16 * (96 + 16 + 2 * 4), indexed]
    # rows before any window ends, where no other key is selected
    got, want = (each[:WINDOW] for each in (coded.logits(IDS[0].tolist()), logits(folder)))
    assert 0 < relative(got, want) < 0.1


def of_windows(change):
    def apply(decoder):
        for layer in decoder.layers:
            if layer.attention.window is not None:
                change(layer.attention)

    return apply


def of_all(change):
    def apply(decoder):
        for layer in decoder.layers:
            change(layer.attention)

    return apply


def moved_window(by):
    return of_windows(lambda it: setattr(it.window.shared, "size", it.window.size + by))


def all_keys(decoder):
    for layer in decoder.layers:
        if layer.attention.indexer is not None:
            layer.attention.indexer.most = 128


def rotation_of_others(decoder):
    decoder.layers[1].attention.rotary = decoder.layers[0].attention.rotary


WRONG = {
    "window one longer": moved_window(1),
    "window one shorter": moved_window(-1),
    "indexed layers see all keys": all_keys,
    "gates are open": of_all(lambda it: it.gates.weight.fill_(0)),
    "query latents without their factor": of_all(lambda it: it.q_norm.mul_(0.8)),
    "latents without their factor": of_all(lambda it: it.kv_norm.mul_(0.8)),
    "rotated keys are not normalized": of_all(lambda it: setattr(it, "key_norm", None)),
    "another epsilon": of_all(lambda it: setattr(it, "norm_eps", 1e-2)),
    "windows rotate as other layers": rotation_of_others,
    "halves rotate": of_all(lambda it: setattr(it.rotary, "interleaved", False)),
    "halves rotate in indexers": lambda d: setattr(
        d.layers[0].attention.indexer, "is_interleaved", False
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_reading_is_seen(folder, wrong):
    llm = LLM(folder, device="cpu", max_model_len=128)
    right = llm.logits(IDS[0].tolist())
    with torch.inference_mode():
        WRONG[wrong](llm.engine.runner.decoder)
    assert relative(llm.logits(IDS[0].tolist()), right) > 1e-3


def as_published(config):
    """Keys of the published config.json, which states text and towers next to each other."""
    local = config.pop("per_layer_config")["1"]
    names = ("num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank")
    names += ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "head_dim")
    ropes = config.pop("rope_parameters")
    config |= {f"swa_{name}": local.get(name, config[name]) for name in names}
    config |= {
        "model_type": "dots3_note",
        "layer_types": [kind.replace("indexed", "full") for kind in config["layer_types"]],
        "first_k_dense_replace": config.pop("mlp_layer_types").count("dense"),
        "sliding_window_size": config.pop("sliding_window"),
        "moe_shared_expert_intermediate_size": config.pop("shared_experts_intermediate_size"),
        "rope_theta": ropes["indexed_attention"]["rope_theta"],
        "swa_rope_theta": ropes["sliding_attention"]["rope_theta"],
        **{"rope_scaling": None, "use_dsa": True, "scoring_func": "noaux_tc"},
        **{"topk_method": "noaux_tc", "apply_mla_qkv_lora_rescale": True},
        **{"attention_gate_type": "headwise", "swa_attention_gate_type": "headwise"},
        **{"vision_config": {"embed_dim": 16}, "audio_config": {"adapter_output_size": 64}},
    }


def with_other_parts(state):
    """Towers, and an MTP layer with an embedding of its own."""
    for name in ("eh_proj", "self_attn.kv_a_proj_with_mqa"):
        state[f"model.layers.3.{name}.weight"] = torch.ones(4, 4)
    state["model.mtp.embed_tokens.weight"] = torch.ones(4, 4)
    state["vision_encoder.blocks.0.norm_1.weight"] = torch.ones(4)
    state["audio_encoder.audio_adapter.proj.0.weight"] = torch.ones(4)


def test_published_files(folder, tmp_path):
    published = edited(folder, tmp_path / "published", with_other_parts, as_published)
    assert torch.equal(logits(published), logits(folder))
    assert not errors_of(published)
    written = quantized(published, tmp_path / "quantized", "gptq")
    assert not errors_of(written)
    alone = quantized(folder, tmp_path / "alone", "gptq")
    assert torch.equal(logits(written), logits(alone))
    assert "vision_encoder.blocks.0.norm_1.weight" in load_file(written / "model.safetensors")


def test_text_of_the_whole_model_in_transformers(folder, tmp_path):
    def rename(state):
        for name in list(state):
            if name.startswith("model."):
                state[name.replace("model.", "model.language_model.", 1)] = state.pop(name)

    def wrap(config):
        text = dict(config)
        config.clear()
        config |= {
            "architectures": ["Dots3NoteForConditionalGeneration"],
            "model_type": "dots3_note",
            "text_config": text,
            "tie_word_embeddings": False,
        }

    whole = edited(folder, tmp_path / "whole", rename, wrap)
    assert torch.equal(logits(whole), logits(folder))


STATED = {"num_hidden_layers": 2, "num_attention_heads": 8}


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"swa_v_head_dim": 64}, "swa_v_head_dim: expected v_head_dim, 128, found 64"),
        ({"qk_rope_head_dim": 32}, "swa_qk_rope_head_dim: expected qk_rope_head_dim, 32"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected a list of 2 layers"),
        (
            {"layer_types": ["full_attention"] * 2, "per_layer_config": {}},
            "layer_types: expected only indexed_attention and sliding_attention",
        ),
        (
            {
                "layer_types": ["sliding_attention"] * 2,
                "per_layer_config": {"0": {"kv_lora_rank": 64}, "1": {"kv_lora_rank": 96}},
            },
            "per_layer_config: expected the same widths in all layers of the type sliding",
        ),
        (
            {
                "layer_types": ["indexed_attention"] * 2,
                "per_layer_config": {"1": {"kv_lora_rank": 96}},
            },
            "per_layer_config of layer 1: expected no widths, found .*96",
        ),
    ],
)
def test_sizes_that_no_model_has_are_refused(stated, words):
    with pytest.raises(CheckpointError, match=words):
        dots3({**STATED, **stated})


def test_defaults_are_those_of_transformers():
    import transformers

    found = dots3({"num_hidden_layers": 6})
    config = transformers.Dots3NoteTextConfig(num_hidden_layers=6)
    assert found["layer_types"] == config.layer_types
    assert found["mlp_layer_types"] == config.mlp_layer_types
    assert found["sliding_window"] == config.sliding_window
    assert found["shared_expert_intermediate_size"] == config.shared_experts_intermediate_size
    for prefix, kind in (("", "indexed_attention"), ("local_", "sliding_attention")):
        own = config.per_layer_config[kind]
        for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"):
            assert found[f"{prefix}{name}"] == getattr(own, name)
        heads = f"num_{'local' if prefix else 'global'}_attention_heads"
        assert found[heads] == own.num_attention_heads


def test_unsupported_settings_are_refused(folder, tmp_path):
    with pytest.raises(InputError, match=f"--batch-invariant: .*beyond {WINDOW} tokens: no kern"):
        LLM(folder, device="cpu", max_model_len=WINDOW + 1, batch_invariant=True)
    LLM(folder, device="cpu", max_model_len=WINDOW, batch_invariant=True)

    def change(config):
        config["attention_gate_type"] = "elementwise"

    other = edited(folder, tmp_path / "x", config=change)
    with pytest.raises(InputError, match='attention_gate_type: expected "headwise"'):
        LLM(other, device="cpu")
    assert json.loads((other / "config.json").read_text())["attention_gate_type"] == "elementwise"
