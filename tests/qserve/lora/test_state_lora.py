"""Adapters of models whose layers have states: results are those of the merged weights.

Requests with different adapters share steps, and never a page or a copy of a state.
"""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.peft.lora import adapted_shapes
from formats.scheme import Scheme
from qserve.engine.kv_cache import state_snapshots
from qserve.engine.kv_cache.prefix_cache import PrefixCache, root_key
from qserve.engine.runner import worker
from qserve.lora import layout
from qserve.lora.layout import AdapterLayout
from qserve.lora.merge import merge_adapter
from qserve.lora.request import LoRARequest
from qserve.model.model_config import ModelConfig, family_of
from tests.adapters import write_adapter
from tests.qserve.lora.test_lora_tokens import (
    GREEDY,
    PROMPT,
    assert_is,
    engine,
    float_model,
    run,
)
from tests.qserve.model.test_hybrid_prefixes import MODES, chats, make_engine
from tests.qserve.model.test_inkling import with_stacks
from tests.qserve.model.test_transformers import dense, with_granite_stacks
from tests.qserve.speculation.hybrid_mtp_model import make_hybrid_mtp
from tests.tiny_families import STATES

slow = pytest.mark.exhaustive
ADAPTERS = {"enable_lora": True, "max_loras": 2}
FEW = ("qwen3_next", "qwen3_5", "nemotron_h_latent")
# PEFT refuses out_proj, since kernels for training read its weight
WITHOUT_OUT_PROJ = ("nemotron_h", "nemotron_h_moe", "nemotron_h_latent", "falcon_h1")
WITHOUT_OUT_PROJ += ("mamba", "falcon_mamba", "mamba2")
FAMILIES = [n if n in FEW else pytest.param(n, marks=pytest.mark.exhaustive) for n in STATES]
# queries, keys, values and gates of attention in one matrix
FOUR_LINEARS = [pytest.param(n, marks=slow) for n in ("afmoe", "muse_glimmer", "laguna")]


def shapes_of(model):
    config = CheckpointReader(model).config
    return adapted_shapes(family_of(config), config)


def make_adapters(model, where, count=2):
    """Adapters of all linears, with different ranks and weights."""
    return [
        LoRARequest(f"a{n}", n + 1, str(write_adapter(model, where / f"a{n}", rank=2 + n, seed=n)))
        for n in range(count)
    ]


def merged(model, lora, where):
    """transformers' model of a folder that `qserve merge` has written; without adapter, its own."""
    if lora is None:
        return float_model(model)
    found = merge_adapter(model, lora.lora_path, where / f"merged {lora.lora_name}")
    assert found.num_linears == len(shapes_of(model))
    if ModelConfig.from_folder(model).family.architecture == "InklingForCausalLM":
        return float_model(with_stacks(Path(found.target)))
    path = where / f"merged {lora.lora_name}" / "model.safetensors"
    save_file(with_granite_stacks(load_file(path)), path, metadata={"format": "pt"})
    return float_model(found.target)


@pytest.mark.parametrize("family", [*FAMILIES, *FOUR_LINEARS])
def test_logits_equal_merged_model(tiny_model, tmp_path, family):
    model = tiny_model(family)
    loras = [*make_adapters(model, tmp_path), None]
    for lora, found in zip(loras, run(engine(model), loras), strict=True):
        assert_is(merged(model, lora, tmp_path), found)


def targets_of(model, family):
    """Names of the linears for PEFT, except those of experts and those that modules bypass."""
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    left_out = {"lm_head", "dt_proj"}  # transformers' Mamba-1 reads the weight of dt_proj
    if family == "qwen3_next":  # names that PEFT takes for those of fused experts
        left_out |= {"gate_proj", "up_proj", "down_proj"}
    if family in WITHOUT_OUT_PROJ:
        left_out.add("out_proj")
    return sorted(names - left_out)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_saved_by_peft(tiny_model, tmp_path, family):
    """The file names the linears as transformers' modules are named."""
    peft = pytest.importorskip("peft")
    model, folder = tiny_model(family), tmp_path / "a"
    base, generator = float_model(model), torch.Generator().manual_seed(1)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets_of(base, family))
    theirs = peft.get_peft_model(base, config).eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.3 / weight.shape[1] ** 0.5, generator=generator)
    theirs.save_pretrained(folder)
    (found,) = run(engine(model), [LoRARequest("a", 1, str(folder))])
    assert_is(theirs, found)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "granite_hybrid", "nemotron_h"])
def test_quantized_base(tiny_model, tmp_path, family):
    model, folder = tiny_model(family), tmp_path / "quantized"
    scheme = Scheme.parse("w4a16-sym-g32")
    quantize_checkpoint(model, folder, scheme=scheme, recipe="rtn", progress=False)
    loras = [*make_adapters(model, tmp_path), None]
    plain = dense(folder, tmp_path / "plain", torch.float32)
    for lora, found in zip(loras, run(engine(folder), loras), strict=True):
        assert_is(merged(plain, lora, tmp_path), found)


@pytest.fixture
def small(monkeypatch):
    """Copies of states after a few tokens are worth while."""
    monkeypatch.setattr(state_snapshots, "SPACING", 8)
    monkeypatch.setattr(state_snapshots, "MIN_GAIN", 4)


def adapted_chats(model, loras, steps_in_flight=0, **settings):
    """Tokens and counts of chats whose prompts are equal for different adapters."""
    return chats(make_engine(model, steps_in_flight, **ADAPTERS, **settings), loras=loras)


CASES = [
    pytest.param(
        *case, marks=() if case in (("qwen3_next", "chunked"), ("qwen3_5", "pushed out")) else slow
    )
    for case in product(
        ("qwen3_next", "qwen3_5", "nemotron_h_latent", "falcon_h1", "kimi_linear", "lfm2", "mamba"),
        MODES,
    )
]


@pytest.mark.parametrize(("family", "mode"), CASES)
def test_prefix_hits_within_adapter(tiny_model, tmp_path, small, family, mode):
    """In chunks, after preemption, from copies of states: the tokens without any of these."""
    model = tiny_model(family)
    loras = [*make_adapters(model, tmp_path, 3), None]
    want, *_ = adapted_chats(model, loras, num_state_snapshots=0)
    found, num_preempted, num_cached = adapted_chats(model, loras, 1, **MODES[mode])
    assert found == want
    assert bool(num_preempted) == (mode == "pushed out")
    assert num_cached > (20 if mode == "few copies" else 100)


def test_copy_of_another_adapter_is_detected(tiny_model, tmp_path, small, monkeypatch):
    """The tokens are others if a copy of a state does not belong to one adapter."""
    model = tiny_model("qwen3_next")
    loras = [*make_adapters(model, tmp_path, 3), None]
    want, _, num_within = adapted_chats(model, loras)
    monkeypatch.setattr(PrefixCache, "_root_key", lambda cache, request: root_key())
    found, _, num_cached = adapted_chats(model, loras)
    assert num_cached > num_within and found != want


def test_equal_prompts_of_other_adapters_find_no_copy(tiny_model, tmp_path, small):
    model = tiny_model("qwen3_5")
    loras = [None, *make_adapters(model, tmp_path)]
    llm = engine(model, block_size=4)

    def cached(lora):
        (output,) = llm.generate([PROMPT], GREEDY, False, lora_request=lora)
        return output.num_cached_tokens

    assert [cached(lora) for lora in loras] == [0, 0, 0]
    assert [cached(lora) for lora in loras] == [16, 16, 16]
    table = llm.engine.adapters
    table.put("a0", loras[1].lora_path, table.read(loras[2].lora_path))  # other weights there
    assert [cached(loras[1]), cached(loras[2])] == [16, 16], "found by the digest of the weights"
    table.put(
        "a0", loras[1].lora_path, table.read(str(write_adapter(model, tmp_path / "x", seed=9)))
    )
    assert [cached(loras[1]), cached(None)] == [0, 16]


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("qwen3_next", "mtp"),
        pytest.param("qwen3_5_moe", "mtp", marks=pytest.mark.exhaustive),
        ("nemotron_h", "suffix"),
    ],
)
def test_drafts_are_verified_with_adapter(tiny_model, tmp_path, small, family, method):
    """Rejected drafts are rolled back out of the states. The MTP layer itself has no adapter."""
    model = tiny_model(family)
    if method == "mtp":
        model = make_hybrid_mtp(tmp_path / "mtp", family, agreement=0.8)
    loras = [*make_adapters(model, tmp_path), None]
    want, *_ = adapted_chats(model, loras, num_state_snapshots=0)
    drafting = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    settings = {**ADAPTERS, "speculative_config": json.dumps(drafting)}
    drafter = make_engine(model, 1, **settings)
    verified, observe = [], drafter.scheduler.speculation.observe

    def observed(num_drafts, num_accepted):
        verified.append((num_drafts, num_accepted))
        observe(num_drafts, num_accepted)

    drafter.scheduler.speculation.observe = observed
    for _ in range(2):  # a suffix drafter has seen the texts then
        found, _, num_cached = chats(drafter, loras=loras)
        assert found == want and num_cached > 100
    assert any(accepted for _, accepted in verified)
    assert any(accepted < drafts for drafts, accepted in verified)


def test_layers_have_places_for_their_own_linears(tiny_model):
    """A slot has memory for the linears of a layer's kind, and none for those of other kinds."""
    config = ModelConfig.from_folder(tiny_model("nemotron_h"))
    places = [(place.layer, *place.modules) for place in AdapterLayout(config).places]
    assert places == [
        (layer, *(f"backbone.layers.{layer}.mixer.{name}" for name in names.split()))
        for layer, names in (
            (0, "in_proj"),
            (0, "out_proj"),
            (1, "q_proj k_proj v_proj"),
            (1, "o_proj"),
            (2, "up_proj"),
            (2, "down_proj"),
            (3, "in_proj"),
            (3, "out_proj"),
        )
    ]


def test_linear_that_cannot_be_adapted_is_named(tiny_model, monkeypatch):
    model = tiny_model("olmo_hybrid")
    with monkeypatch.context() as patch:
        patch.setattr(layout, "MAX_SLICES", 3)
        with pytest.raises(InputError, match=r"OlmoHybridForCausalLM: .*\.q_proj, .*support 3 lin"):
            engine(model)
    load = worker.load

    def load_without(*args, **settings):
        decoder = load(*args, **settings)
        del decoder.linears["model.layers.0.linear_attn.o_proj"]
        return decoder

    monkeypatch.setattr(worker, "load", load_without)
    with pytest.raises(InputError, match="cannot be added to model.layers.0.linear_attn.o_proj"):
        engine(model)
