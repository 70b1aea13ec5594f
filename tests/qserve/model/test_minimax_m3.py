"""MiniMax-M3: indexers that select blocks of keys, and files as published.

Prompts are longer than what a query sees. test_family_tokens.py has shorter ones, and
tests/qserve/multimodal has images.
"""

import json
import random
from dataclasses import replace

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.architecture.stored_form.mixtures import minimax_m3
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError, InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import Scheme
from qkernels.attention.selected import order
from qkernels.moe.routing import SILU
from qserve.llm import LLM
from qserve.model.blocks.block_attention import BlockAttention
from qserve.params.sampling_params import SamplingParams
from tests.qserve.model.test_family_tokens import FEW_PAGES, check_greedy, count_preemptions
from tests.qserve.model.variants import edited, relative
from tests.qserve.parallel.in_threads import run_ranks
from tests.qserve.parallel.test_context_parallel import TWO, prompt_of_rank
from tests.qserve.parallel.test_sharing import assert_sharded

FAMILY = "minimax_m3"
IDS = torch.randint(3, 500, (1, 100), generator=torch.Generator().manual_seed(2))
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
SCHEME = "w4a16-asym-g32"


def logits(folder, **settings):
    return LLM(folder, device="cpu", max_model_len=128, **settings).logits(IDS[0].tolist())


def prompts():
    """Some begin alike; all but one are longer than the 32 keys that a query sees."""
    rng = random.Random(8)
    start = [rng.randrange(3, 512) for _ in range(41)]
    return [start + [rng.randrange(3, 512) for _ in range(n)] for n in (1, 19, 30, 4)] + [[5, 9]]


def test_logits_equal_transformers(tiny_model, transformers_model):
    folder = tiny_model(FAMILY)
    with torch.no_grad():
        want = transformers_model(folder)(IDS).logits[0]
    assert relative(logits(folder), want) < 1e-5


def test_scores_in_small_parts(tiny_model, transformers_model, monkeypatch):
    """Scores of a few rows at a time."""
    monkeypatch.setattr(order, "MAX_BYTES", 4 * 2 * 7 * 9)
    with torch.no_grad():
        want = transformers_model(tiny_model(FAMILY))(IDS).logits[0]
    assert relative(logits(tiny_model(FAMILY)), want) < 1e-5


def errors_of(folder):
    return [each for each in inspect_checkpoint(folder).problems if each.severity == "error"]


def quantized(source, folder, **settings):
    quantize_checkpoint(
        source,
        folder,
        scheme=Scheme.parse(SCHEME),
        output_format="gptq",
        progress=False,
        **settings,
    )
    return folder


@pytest.mark.parametrize("form", ["float", "quantized"])
def test_greedy_tokens(tiny_model, transformers_model, tmp_path, monkeypatch, form):
    """In chunks, with too few pages, and after beginnings that were there."""
    folder = tiny_model(FAMILY)
    if form == "quantized":
        folder = quantized(folder, tmp_path / "model", recipe="rtn")
        entries = CheckpointReader(folder).entries
        assert "model.layers.1.self_attn.index_q_proj.weight" in entries
        assert "model.layers.1.self_attn.q_proj.qweight" in entries
        assert "model.layers.1.block_sparse_moe.shared_experts.up_proj.qweight" in entries
        assert "model.layers.0.mlp.up_proj.qweight" in entries
        assert not errors_of(folder)
    few = {**FEW_PAGES, "num_gpu_blocks_override": 14}
    llm = LLM(folder, device="cpu", max_model_len=96, max_num_batched_tokens=11, **few)
    preemptions = count_preemptions(llm, monkeypatch)
    outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert preemptions
    again = llm.generate(prompts()[1:2], GREEDY, use_tqdm=False)
    assert again[0].num_cached_tokens >= 16
    assert again[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    check_greedy(transformers_model(folder), prompts(), outputs)


def test_drafts_keep_the_text(tiny_model):
    plain = LLM(tiny_model(FAMILY), device="cpu", max_model_len=96)
    want = [list(o.outputs[0].token_ids) for o in plain.generate(prompts(), GREEDY)]
    ngram = '{"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}'
    drafting = LLM(tiny_model(FAMILY), device="cpu", max_model_len=96, speculative_config=ngram)
    assert [list(o.outputs[0].token_ids) for o in drafting.generate(prompts(), GREEDY)] == want


def test_solved_weights_of_windows_with_selected_keys(tiny_model, transformers_model, tmp_path):
    """A calibrated run selects keys, too."""
    ids_WS = torch.randint(3, 500, (4, 64), generator=torch.Generator().manual_seed(0))
    data = CalibrationData(ids_WS=ids_WS, source="test", seed=0)
    folder = quantized(tiny_model(FAMILY), tmp_path / "model", recipe="gptq", calibration=data)
    with torch.no_grad():
        want = transformers_model(folder)(IDS).logits[0]
    assert relative(logits(folder), want) < 1e-5


@pytest.fixture(scope="module")
def sees_all(tiny_model, tmp_path_factory):
    """Return a copy whose queries see all keys."""
    folder = tmp_path_factory.mktemp("all") / "model"

    def change(config):
        config["index_topk_blocks"] = 8

    return edited(tiny_model(FAMILY), folder, config=change)


def usual_error(found, want):
    """Median over tokens, so that the few tokens with other blocks or experts do not count."""
    return float(((found - want).norm(dim=-1) / want.norm(dim=-1)).median())


@pytest.mark.parametrize("pages", ["int8", "fp8"])
def test_pages_of_8_bits(tiny_model, sees_all, pages):
    """Rounding has about the same effect on selected keys as on all keys."""
    found = [
        usual_error(logits(folder, kv_cache_dtype=pages), logits(folder))
        for folder in (tiny_model(FAMILY), sees_all)
    ]
    assert 0 < found[0] < 2 * found[1]


def test_calibrated_scales_of_pages(tiny_model, sees_all, tmp_path):
    found = []
    for name, source in (("selected", tiny_model(FAMILY)), ("all", sees_all)):
        quantize_checkpoint(
            source,
            tmp_path / name,
            scheme=Scheme.parse("w8a16-sym-g32"),
            recipe="gptq",
            kv_cache="fp8",
            calibration=CalibrationData(ids_WS=IDS[:, :48], source="test", seed=0),
            progress=False,
        )
        llm = LLM(tmp_path / name, device="cpu", max_model_len=128)
        assert llm.engine.runner.decoder.layers[1].attention.has_kv_scales
        found.append(usual_error(llm.logits(IDS[0].tolist()), logits(source)))
    assert 0 < found[0] < 2 * found[1]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_heads(tiny_model, monkeypatch, ranks):
    """Each rank selects for its own KV heads; with four ranks two have the same."""
    monkeypatch.setattr("tests.qserve.parallel.test_sharing.TOKENS", IDS[0, :60].tolist())
    assert_sharded(tiny_model(FAMILY), ranks)


def test_ranks_that_divide_a_prompt(tiny_model):
    """Each has the keys of indexers of all tokens before it selects."""
    folder = tiny_model(FAMILY)
    token, logprob, pages = prompt_of_rank(folder)
    for found in run_ranks(2, lambda context: prompt_of_rank(folder, context, **TWO)):
        assert found[0] == token and abs(found[1] - logprob) < 1e-4
        for ours, whole in zip(found[2], pages, strict=True):
            assert whole.any()
            floats = (each.view(torch.float32) for each in (ours, whole))
            assert torch.allclose(*floats, atol=1e-3, rtol=1e-3)


def of_blocks(change):
    def apply(decoder):
        for layer in decoder.layers:
            if isinstance(layer.attention, BlockAttention):
                change(layer.attention.indexer)

    return apply


def set_to(**values):
    def change(indexer):
        for name, value in values.items():
            setattr(indexer, name, value)

    return of_blocks(change)


def exchanged_heads(indexer):
    indexer.q_proj.weight = indexer.q_proj.weight.view(2, 32, -1).flip(0).flatten(0, 1)


def silu_experts(decoder):
    for layer in decoder.layers[1:]:
        layer.mlp.experts = replace(layer.mlp.experts, glu=SILU)


def feed_forwards(**values):
    def change(decoder):
        for layer in decoder.layers:
            mlp = layer.mlp if not hasattr(layer.mlp, "shared") else layer.mlp.shared.mlp
            mlp.activation = replace(mlp.activation, **values)

    return change


def without_factor(decoder):
    for layer in decoder.layers[1:]:
        router = layer.mlp.router
        router.routing = replace(router.routing, factor=1.0)


def norms_without_1(decoder):
    for layer in decoder.layers[1:]:
        layer.attention.indexer.k_norm.weight.sub_(1)


def all_keys(decoder):
    of_blocks(lambda indexer: setattr(indexer, "most", 7))(decoder)


WRONG = {
    "queries see all keys": all_keys,
    "the own block is not always selected": set_to(local=0),
    "the block before is always selected": set_to(local=2),
    "blocks of half the size": set_to(block_size=8, most=4),
    "KV heads with the selection of another": of_blocks(exchanged_heads),
    "indexers without rotation": of_blocks(lambda i: i.rotary.cos_sin[:, :4].fill_(1)),
    "norms of indexers without their 1": norms_without_1,
    "silu experts": silu_experts,
    "feed-forwards with another alpha": feed_forwards(alpha=1.0),
    "feed-forwards that are not cut": feed_forwards(limit=None),
    "routing weights without their factor": without_factor,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_reading_is_seen(tiny_model, wrong):
    llm = LLM(tiny_model(FAMILY), device="cpu", max_model_len=128, block_size=8)
    right = llm.logits(IDS[0].tolist())
    with torch.inference_mode():
        WRONG[wrong](llm.engine.runner.decoder)
    assert relative(llm.logits(IDS[0].tolist()), right) > 1e-3


def as_published(config):
    """Keys of the published text_config."""
    sparse = [int(kind == "minimax_m3_sparse") for kind in config.pop("layer_types")]
    rope = config.pop("rope_parameters")
    config["sparse_attention_config"] = {
        **{"use_sparse_attention": True, "sparse_score_type": "max", "sparse_init_block": 0},
        **{"sparse_attention_freq": sparse, "sparse_disable_index_value": sparse},
        "sparse_num_index_heads": config.pop("index_n_heads"),
        "sparse_index_dim": config.pop("index_head_dim"),
        "sparse_block_size": config.pop("index_block_size"),
        "sparse_topk_blocks": config.pop("index_topk_blocks"),
        "sparse_local_block": config.pop("index_local_blocks"),
    }
    config |= {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3",
        "hidden_act": "swigluoai",
        "moe_layer_freq": [int(kind == "sparse") for kind in config.pop("mlp_layer_types")],
        **{"use_qk_norm": True, "qk_norm_type": "per_head", "use_gemma_norm": True},
        **{"scoring_func": "sigmoid", "use_routing_bias": True, "n_shared_experts": 1},
        **{"attention_output_gate": False, "swiglu_beta": 1.0, "num_mtp_modules": 7},
        **{"rope_theta": rope["rope_theta"], "rotary_dim": 8, "partial_rotary_factor": 0.5},
    }


def test_published_keys(tiny_model, tmp_path):
    folder = edited(tiny_model(FAMILY), tmp_path / "published", config=as_published)
    assert torch.equal(logits(folder), logits(tiny_model(FAMILY)))
    assert not errors_of(folder)


STATED = json.dumps({"num_hidden_layers": 2, "num_key_value_heads": 4})


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"sparse_topk_blocks": 0}, "sparse_topk_blocks: expected a number above 0, found 0"),
        ({"sparse_num_index_heads": 2}, "index_n_heads: expected 4, one for each KV head"),
        ({"sparse_attention_freq": [1]}, "layer_types: expected a list of 2 layers"),
        ({"sparse_disable_index_value": [1, 0]}, "of layer 1: expected 1, since indexers with"),
    ],
)
def test_sizes_that_no_model_has_are_refused(stated, words):
    sparse = {"sparse_attention_freq": [1, 1], **stated}
    with pytest.raises(CheckpointError, match=words):
        minimax_m3({**json.loads(STATED), "sparse_attention_config": sparse})


def test_other_variants_are_refused(tiny_model, tmp_path):
    def change(config):
        config["sparse_attention_config"] = {"sparse_score_type": "mean"}

    folder = edited(tiny_model(FAMILY), tmp_path / "x", config=change)
    with pytest.raises(InputError, match='sparse_score_type: expected "max", found "mean"'):
        LLM(folder, device="cpu")


def test_pages_that_are_no_parts_of_blocks_are_refused(tiny_model):
    with pytest.raises(InputError, match="--block-size 64: does not divide index_block_size, 16"):
        LLM(tiny_model(FAMILY), device="cpu", max_model_len=128, block_size=64)
    LLM(tiny_model(FAMILY), device="cpu", max_model_len=32, block_size=32)  # all keys are seen


def test_equal_bits_in_any_batch_are_refused_where_keys_are_selected(tiny_model):
    settings = {"device": "cpu", "batch_invariant": True}
    with pytest.raises(InputError, match="MiniMaxM3VLForCausalLM beyond 32 tokens: an indexer"):
        LLM(tiny_model(FAMILY), max_model_len=33, **settings)
    LLM(tiny_model(FAMILY), max_model_len=32, **settings)
