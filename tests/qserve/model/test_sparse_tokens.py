"""Latent attention whose indexer selects keys (DeepSeek-V3.2, GLM-5): tokens are transformers'.

Prompts are longer than what a query selects. Indexers have so many heads that no two keys have the
score 0.
"""

import json
import random
import shutil

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader, read_json
from formats.errors import InputError
from formats.scheme import Scheme
from qkernels import QuantLinear, ops
from qkernels.attention.selected import order
from qserve.llm import LLM
from qserve.model.families.latent import deepseek
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
from tests.qserve.speculation.mtp_model import make_mtp
from tests.tiny_families import TINY_FAMILIES

SELECTED = 12
FEW_KEYS = {"index_topk": SELECTED, "index_n_heads": 16}
SHARED = ["full", "shared", "full"]
VARIANTS = {
    "v3.2": ("DeepseekV32Config", {**TINY_FAMILIES["deepseek_v32"][1], **FEW_KEYS}),
    "glm-5": ("GlmMoeDsaConfig", {**TINY_FAMILIES["glm_moe_dsa"][1], **FEW_KEYS}),
    "glm-5.2": (
        "GlmMoeDsaConfig",
        {**TINY_FAMILIES["glm_moe_dsa"][1], **FEW_KEYS, "indexer_types": SHARED},
    ),
}
IDS = torch.randint(3, 500, (1, 100), generator=torch.Generator().manual_seed(2))
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="session")
def model_of(tiny_model, tmp_path_factory):
    """Name of a variant -> its folder."""
    return model_maker(tiny_model, tmp_path_factory, VARIANTS)


def logits(folder, **settings):
    return LLM(folder, device="cpu", max_model_len=128, **settings).logits(IDS[0].tolist())


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(model_of, transformers_model, name):
    with torch.no_grad():
        want = transformers_model(model_of(name))(IDS).logits[0]
    assert relative(logits(model_of(name)), want) < 1e-5


def prompts():
    """Some begin alike; all but one are longer than what is selected."""
    rng = random.Random(8)
    start = [rng.randrange(3, 512) for _ in range(17)]
    return [start + [rng.randrange(3, 512) for _ in range(n)] for n in (1, 19, 13, 4)] + [[5, 9]]


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("v3.2", None),
        ("glm-5.2", None),
        ("glm-5.2", "w4a16-asym-g32"),
        pytest.param("v3.2", "w4a16-asym-g32", marks=pytest.mark.exhaustive),
    ],
)
def test_greedy_tokens(model_of, transformers_model, tmp_path, monkeypatch, name, scheme):
    """In chunks, with too few pages, on beginnings that were there."""
    folder = model_of(name)
    if scheme is not None:
        folder = tmp_path / "model"
        quantize_checkpoint(
            model_of(name),
            folder,
            scheme=Scheme.parse(scheme),
            output_format="gptq",
            progress=False,
        )
        entries = CheckpointReader(folder).entries
        assert "model.layers.0.self_attn.indexer.wq_b.weight" in entries
        assert "model.layers.0.self_attn.q_b_proj.qweight" in entries
    llm = LLM(folder, device="cpu", max_model_len=64, max_num_batched_tokens=11, **FEW_PAGES)
    preemptions = count_preemptions(llm, monkeypatch)
    outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert preemptions
    again = llm.generate(prompts()[1:2], GREEDY, use_tqdm=False)
    assert again[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    check_greedy(transformers_model(folder), prompts(), outputs)


def solve(source, folder):
    """Quantize with windows of 24 tokens, more than a query selects."""
    ids_WS = torch.randint(3, 500, (4, 24), generator=torch.Generator().manual_seed(0))
    quantize_checkpoint(
        source,
        folder,
        scheme=Scheme.parse("w4a16-asym-g32"),
        output_format="gptq",
        recipe="gptq",
        calibration=CalibrationData(ids_WS=ids_WS, source="test", seed=0),
        progress=False,
    )


@pytest.mark.exhaustive
def test_solved_weights_of_windows_with_selected_keys(model_of, transformers_model, tmp_path):
    """A calibrated run selects keys, too. Layers without an indexer would need those of another."""
    folder = tmp_path / "model"
    solve(model_of("v3.2"), folder)
    with torch.no_grad():
        want = transformers_model(folder)(IDS).logits[0]
    assert relative(logits(folder), want) < 1e-5
    with pytest.raises(InputError, match=f"windows of 24 tokens: expected at most .*{SELECTED}"):
        solve(model_of("glm-5.2"), tmp_path / "other")


def of_indexers(change):
    def apply(decoder):
        for layer in decoder.layers:
            if layer.attention.indexer is not None:
                change(layer.attention.indexer)

    return apply


def set_to(**values):
    def change(indexer):
        for name, value in values.items():
            setattr(indexer, name, value)

    return of_indexers(change)


def halves_for_neighbours(indexer):
    indexer.is_interleaved = not indexer.is_interleaved


def reads_next(decoder):
    """The shared layer reads what a later layer selected, in the step before."""
    decoder.layers[1].attention.selection = decoder.layers[0].attention.selection.__class__()


WRONG = {
    "one key too few": set_to(most=SELECTED - 1),
    "all keys": set_to(most=1000),
    "pairs of the other kind": of_indexers(halves_for_neighbours),
    "keys without the norm's bias": of_indexers(lambda each: each.k_norm_bias.zero_()),
    "keys without the norm's weight": of_indexers(lambda each: each.k_norm_weight.fill_(1)),
    "weights of another head": of_indexers(
        lambda each: each.weights_proj.weight.copy_(each.weights_proj.weight.roll(1, 0))
    ),
    "a shared layer that sees all keys": reads_next,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_interpretation_fails_comparison(model_of, wrong):
    folder = model_of("glm-5.2")
    if "norm" in wrong:  # as trained ones: not 1 and 0
        folder = edited(folder, folder.parent / wrong, tensors=other_norms)
    llm = LLM(folder, device="cpu", max_model_len=128)
    right = llm.logits(IDS[0].tolist())
    with torch.inference_mode():
        WRONG[wrong](llm.engine.runner.decoder)
    assert relative(llm.logits(IDS[0].tolist()), right) > 1e-3


def other_norms(state):
    generator = torch.Generator().manual_seed(4)
    for name, value in state.items():
        if "indexer.k_norm" in name:
            state[name] = value + torch.randn(value.shape, generator=generator)


def test_norm_of_keys_equals_transformers(model_of, transformers_model, tmp_path):
    """With a weight and a bias that are not 1 and 0."""
    folder = edited(model_of("v3.2"), tmp_path / "model", tensors=other_norms)
    with torch.no_grad():
        want = transformers_model(folder)(IDS).logits[0]
    assert relative(logits(folder), want) < 1e-5


def test_scores_do_not_depend_on_the_block_of_rows(model_of, monkeypatch):
    """Few rows are scored together where contexts are long."""
    want = logits(model_of("v3.2"))
    monkeypatch.setattr(order, "MAX_BYTES", 4 * 128 * 7)
    assert relative(logits(model_of("v3.2")), want) < 1e-6


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_8_bit_latent_cache(model_of, monkeypatch, kind):
    """Keys of the indexer keep their dtype: the same keys are selected from float entries."""
    coded = LLM(model_of("v3.2"), device="cpu", max_model_len=128, kv_cache_dtype=kind)
    spec = coded.engine.runner.cache_specs[0]
    assert spec.bytes_per_page == 16 * (80 + 2 * 4 + 32 * 4)
    got = coded.logits(IDS[0].tolist())
    write = ops.rope_write_latents_

    def written(q, made, norm, cos_sin, positions, cache, *rest, **options):
        out = write(q, made, norm, cos_sin, positions, cache, *rest, **options)
        for part in cache.pages.split([64, 16], -1):
            largest = 127 if kind == "int8" else 448
            scale = (part.abs().amax(-1, keepdim=True) / largest).clamp(min=1e-30)
            codes = part / scale
            codes = codes.round() if kind == "int8" else codes.to(torch.float8_e4m3fn).float()
            part.copy_(codes * scale)
        return out

    monkeypatch.setattr(ops, "rope_write_latents_", written)
    assert relative(got, logits(model_of("v3.2"))) < 1e-5


def test_linears_of_an_indexer_in_float8(model_of, tmp_path):
    """As in published files of DeepSeek-V3.2: blocks of 128 x 128 with a scale each."""
    converted, others = [], set()

    def to_float8(state):
        for name in [n for n in state if state[n].ndim == 2]:
            if not name.endswith(("indexer.wq_b.weight", "indexer.wk.weight")):
                others.add(name.removesuffix(".weight"))
                continue
            blocks = [block.split(128, 1) for block in state[name].split(128)]
            scales = [[block.abs().max() / 448 for block in row] for row in blocks]
            rows = [
                torch.cat([block / scale for block, scale in zip(*pair, strict=True)], 1)
                for pair in zip(blocks, scales, strict=True)
            ]
            state[name] = torch.cat(rows).to(torch.float8_e4m3fn)
            state[f"{name}_scale_inv"] = torch.tensor(scales)
            converted.append(name)

    def with_block(config):
        config["quantization_config"] = {
            **{"quant_method": "fp8", "activation_scheme": "dynamic"},
            **{"weight_block_size": [128, 128], "modules_to_not_convert": sorted(others)},
        }

    folder = edited(model_of("v3.2"), tmp_path / "model", to_float8, with_block)
    llm = LLM(folder, device="cpu", max_model_len=128)
    layers = llm.engine.runner.decoder.layers
    assert len(converted) == 6
    assert all(isinstance(layer.attention.indexer.wk, QuantLinear) for layer in layers)
    exact = LLM(model_of("v3.2"), device="cpu", max_model_len=128)
    got, want = (each.logits(IDS[0].tolist()) for each in (llm, exact))
    assert relative(got[:SELECTED], want[:SELECTED]) < 1e-5, "all keys are selected"
    assert relative(got[SELECTED:], want[SELECTED:]) > 1e-3, "near scores change places"
    for layer, other in zip(layers, exact.engine.runner.decoder.layers, strict=True):
        for name, width in (("wk", 64), ("wq_b", 96)):
            x = torch.randn(5, width, generator=torch.Generator().manual_seed(1))
            found, right = (getattr(each.attention.indexer, name)(x) for each in (layer, other))
            assert relative(found, right) < 0.1


def test_short_contexts_need_no_indexer(model_of, transformers_model):
    """All keys are selected: its keys take no memory, and its tensors are not read."""
    llm = LLM(model_of("v3.2"), device="cpu", max_model_len=SELECTED)
    assert all(layer.attention.indexer is None for layer in llm.engine.runner.decoder.layers)
    ids = IDS[:, :SELECTED]
    with torch.no_grad():
        want = transformers_model(model_of("v3.2"))(ids).logits[0]
    assert relative(llm.logits(ids[0].tolist()), want) < 1e-5


def test_context_is_as_long_as_the_model_allows(model_of):
    llm = LLM(model_of("v3.2"), device="cpu")
    assert llm.engine.max_model_len == 128  # YaRN's 16 times 8


@pytest.mark.parametrize("name", ["v3.2", "glm-5.2"])
def test_two_ranks_select_the_same_keys(model_of, monkeypatch, name):
    monkeypatch.setattr("tests.qserve.parallel.test_sharing.TOKENS", IDS[0, :30].tolist())
    assert_sharded(model_of(name), 2)


def test_ranks_that_divide_a_prompt(model_of):
    """Each has the entries and the keys of all tokens before it selects."""
    folder = model_of("glm-5.2")
    token, logprob, pages = prompt_of_rank(folder)
    for found in run_ranks(2, lambda context: prompt_of_rank(folder, context, **TWO)):
        assert found[0] == token and abs(found[1] - logprob) < 1e-4
        for ours, whole in zip(found[2], pages, strict=True):
            assert whole.any()
            floats = (each.view(torch.float32) for each in (ours, whole))
            assert torch.allclose(*floats, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("num_stages", "is_refused"), [(2, True), (3, True), (1, False)])
def test_first_layer_of_a_stage_needs_an_indexer(model_of, num_stages, is_refused):
    """The second of three layers has none."""
    config = ModelConfig.from_folder(model_of("glm-5.2"))
    stages = {"num_stages": num_stages, "ranks": (0, 1, 2), "ahead": None, "back": None}
    pipeline = Pipeline(stage=min(1, num_stages - 1), **stages)
    for length, fits in ((128, not is_refused), (SELECTED, True)):
        weights = Weights(
            config,
            DummySource(config, torch.device("cpu"), 0),
            device=torch.device("cpu"),
            dtype=torch.float32,
            max_model_len=length,
            pipeline=pipeline,
        )
        if fits:
            deepseek.check_stage(config, weights)
        else:
            with pytest.raises(InputError, match="--pipeline-parallel-size: layer 1, .*no indexer"):
                deepseek.check_stage(config, weights)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def test_drafts_change_no_token(model_of, transformers_model):
    """Each row of a verification selects its own keys."""
    llm = LLM(model_of("glm-5.2"), device="cpu", max_model_len=64, speculative_config=NGRAM)
    texts = [[5, 9, 77, 5, 9, 77, 5, 9] * 3, [8] * 22, [3, 4, 5, 6, 3, 4, 5, 6, 3] * 2]
    outputs = llm.generate(texts, GREEDY, use_tqdm=False)
    check_greedy(transformers_model(model_of("glm-5.2")), texts, outputs)


@pytest.mark.parametrize("has_indexer", [True, False])
def test_mtp_layer_drafts(tmp_path, has_indexer):
    """With an indexer of its own. GLM's list of layers does not name it."""
    folder = make_mtp(tmp_path / "model", agreement=0.7, family="glm_moe_dsa", **FEW_KEYS)
    config = read_json(folder / "config.json")
    for key in ("mlp_layer_types", "indexer_types", "layer_types"):
        config[key] = config[key][:3]
    if not has_indexer:
        config["index_topk"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    found = []
    for drafter in (None, {"method": "mtp", "num_speculative_tokens": 2}):
        llm = LLM(folder, device="cpu", max_model_len=48, speculative_config=drafter)
        (output,) = llm.generate([[5, 9, 77, 3, 8] * 4], GREEDY, use_tqdm=False)
        found.append(output.outputs[0].token_ids)
    assert found[0] == found[1]


def test_pattern_of_published_files(model_of, tmp_path):
    """GLM's files may state how often a layer has an indexer, instead of a list."""
    source = model_of("glm-5.2")

    def as_pattern(config):
        del config["indexer_types"]
        config["index_topk_pattern"] = "FSF"

    def as_frequency(config):
        del config["indexer_types"]
        config.update(index_topk_freq=2, index_skip_topk_offset=1)

    for number, change in enumerate((as_pattern, as_frequency)):
        folder = edited(source, tmp_path / str(number), config=change)
        assert torch.equal(logits(folder), logits(source))


def test_missing_indexer_is_named(model_of, tmp_path):
    folder = edited(
        model_of("glm-5.2"),
        tmp_path / "model",
        tensors=lambda state: state.pop("model.layers.2.self_attn.indexer.wk.weight"),
    )
    with pytest.raises(InputError, match=r"layers\.2\.self_attn\.indexer\.wk"):
        logits(folder)


def test_settings_unsupported_with_sparse_attention_are_refused(model_of):
    words = f"--batch-invariant: does not work with .* beyond {SELECTED} tokens"
    with pytest.raises(InputError, match=words):
        logits(model_of("v3.2"), batch_invariant=True)
    LLM(model_of("v3.2"), device="cpu", max_model_len=SELECTED, batch_invariant=True)


def test_other_rotation_of_glm_is_refused(model_of, tmp_path):
    folder = shutil.copytree(model_of("glm-5"), tmp_path / "model")
    config = read_json(folder / "config.json") | {"indexer_rope_interleave": False}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"config\.json indexer_rope_interleave: expected"):
        logits(folder)
