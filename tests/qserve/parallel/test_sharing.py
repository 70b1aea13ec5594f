"""Ranks that share a model out compute what one computes alone. Ranks are threads here."""

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.quant_config import BLOCK
from formats.scheme import Scheme
from qserve.config import EngineConfig
from qserve.engine import build
from qserve.engine.engine import Engine
from qserve.engine.step.step_input import StepInput
from qserve.model.model_config import ModelConfig
from qserve.model.rank_shards import check_ranks
from qserve.params.sampling_params import SamplingParams
from tests.conftest import make_tiny
from tests.qserve.model.test_variants import reorder
from tests.qserve.model.variants import TOKENS, edited
from tests.qserve.parallel.in_threads import run_ranks
from tests.qserve.parallel.sharded import (
    ODD,
    families_and_sizes,
    rank_runner,
    relative_error,
)

FEW = ("olmo2", "phi3", "gpt_oss", "deepseek_v3", "qwen3_next", "granite_hybrid", "lfm2")


def rank_logits(folder, communicator=None, **settings):
    """Logits [T, V] of TOKENS, and the decoder that made them."""
    with torch.inference_mode():
        runner = rank_runner(folder, communicator, **settings)
        runner.allocate_pages(4)
        step = StepInput.of_sequence(TOKENS, [1, 2], page_size=16, params=SamplingParams())
        return runner.logits(step), runner.decoder


def assert_sharded(folder, size, limit=1e-5, **settings):
    """Every rank has the logits of the whole, bitwise the same as the others'."""
    want, _ = rank_logits(folder, **settings)
    found = run_ranks(size, lambda communicator: rank_logits(folder, communicator, **settings))
    error = relative_error([logits for logits, _ in found], want)
    assert error < limit, error
    return [decoder for _, decoder in found]


@pytest.mark.parametrize(("family", "size"), families_and_sizes(FEW))
def test_every_family(family, size, tiny_model):
    assert_sharded(tiny_model(family), size)


@pytest.mark.exhaustive
def test_latents_are_replicated_on_every_rank(written):
    """Heads are divided, with the rows of q_b_proj and of kv_b_proj, which holds codes."""
    folder = written("w8a16-sym-channel", "gptq", "deepseek_v3")
    decoders = assert_sharded(folder, 2)
    shapes = [decoder.layers[1].attention.shape for decoder in decoders]
    assert [shape.heads for shape in shapes] == [2, 2] and {s.entry for s in shapes} == {80}


# A rank rounds its own share of a row by a scale of its own. Tiny random models amplify that: wrong
# codes give more than 1.
INT8, FLOAT8 = 0.05, 0.3
SCHEMES = {
    "w4a16-sym-g32": ("gptq", 1e-5),
    "w4a16-asym-g32": ("awq", 1e-5),
    "w8a16-sym-channel": ("gptq", 1e-5),
    "w8a16-sym-g32": ("gptq", 1e-5),
    "w4a16-mxfp4": ("compressed-tensors", 1e-5),
    "w4a16-nvfp4": ("compressed-tensors", 1e-5),
    "w8a16-fp8": ("compressed-tensors", 1e-5),
    "w8a8-static": ("compressed-tensors", 1e-5),
    "w8a8-fp8-static": ("compressed-tensors", 1e-5),
    "w8a8": ("compressed-tensors", INT8),
    "w8a8-fp8": ("compressed-tensors", FLOAT8),
    "w8a8-fp8-block": ("compressed-tensors", FLOAT8),
    "w4a8-g32": ("compressed-tensors", INT8),
}
QUICK = ("w4a16-asym-g32", "w8a8", "w8a8-fp8-block")
WHOLE_GROUPS = ("w4a16-mxfp4", "w4a16-nvfp4")  # divided at multiples of 32 inputs


@pytest.mark.parametrize(
    ("scheme", "family", "size"),
    [(scheme, "llama", 2) for scheme in QUICK]
    + [
        pytest.param(scheme, family, size, marks=pytest.mark.exhaustive)
        for scheme in SCHEMES
        for family in ("llama", "phi3", "qwen3_moe")
        for size in (2, 4)
        if (scheme, family, size) not in [(quick, "llama", 2) for quick in QUICK]
    ],
)
def test_every_scheme(scheme, family, size, written):
    layout, limit = SCHEMES[scheme]
    folder = written(scheme, layout, family)
    if scheme in WHOLE_GROUPS and (family == "qwen3_moe" or size == 4):  # 16 to 24 inputs a rank
        with pytest.raises(InputError, match=f"--tensor-parallel-size {size}: .*cannot be divided"):
            assert_sharded(folder, size, limit)
        return
    assert_sharded(folder, size, limit)


@pytest.mark.parametrize("name", ["self_attn.o_proj", "mlp.down_proj", "mlp.up_proj"])
def test_act_order(name, written, tmp_path):
    """Rows of gate and up follow the order of down; o gathers what heads of other ranks make."""
    folder = edited(
        written("w4a16-sym-g32", "gptq"),
        tmp_path / "x",
        lambda state: reorder(state, f"model.layers.1.{name}"),
        config=lambda c: c[BLOCK].update(desc_act=True),
    )
    decoders = assert_sharded(folder, 2)
    gathers = decoders[0].layers[1].attention.o_proj.order is not None
    assert gathers == (name == "self_attn.o_proj")


def test_per_head_scales_are_sharded_with_heads(tiny_model, tmp_path):
    quantize_checkpoint(
        tiny_model("llama"),
        tmp_path / "heads",
        scheme=Scheme.parse("w4a16-sym-g32"),
        output_format="compressed-tensors",
        recipe="rtn",
        kv_cache="int8",
        kv_per_head=True,
        calibration=CalibrationData(ids_WS=torch.tensor([TOKENS] * 2), source="tokens", seed=0),
        progress=False,
    )
    whole = CheckpointReader(tmp_path / "heads").get("model.layers.1.self_attn.k_scale")
    decoders = assert_sharded(tmp_path / "heads", 2, kv_cache_dtype="auto")
    found = torch.cat([decoder.layers[1].attention.k_scale for decoder in decoders])
    assert len(whole) == 2 and whole[0] != whole[1] and torch.equal(found, whole.flatten())


@pytest.mark.exhaustive
@pytest.mark.parametrize("kv_cache", ["int8", "fp8", "int4"])
def test_quantized_kv_pages(kv_cache, tiny_model):
    assert_sharded(tiny_model("llama"), 2, kv_cache_dtype=kv_cache)


def test_uneven_shards(tmp_path):
    folder = make_tiny(tmp_path / "odd", "LlamaConfig", ODD)
    decoders = assert_sharded(folder, 2)
    assert [decoder.config.num_kv_heads for decoder in decoders] == [2, 1]
    assert [decoder.head.inner.weight.shape[0] for decoder in decoders] == [384, 131]


def test_shard_not_filling_words_is_refused(written):
    """32 codes of 3 bits fill whole words, and a group has 32."""
    folder = written("w3a16-sym-g32", "gptq", "qwen3_moe")
    with pytest.raises(
        InputError, match="inputs cannot be divided over the GPUs in groups of w3a16-sym-g32"
    ):
        run_ranks(2, lambda communicator: rank_logits(folder, communicator))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("scheme", "family"),
    [("w4a16-sym-g32", "llama"), ("w3a16-sym-g32", "qwen3_moe"), ("w3a16-sym-g32", "llama")],
)
def test_inspect_agrees_with_loader(scheme, family, written):
    folder = written(scheme, "gptq", family)
    for size, reason in inspect_checkpoint(folder).parallel.items():
        problem = ""
        try:
            if size > 1:
                run_ranks(size, lambda communicator: rank_logits(folder, communicator))
        except InputError as error:
            problem = error.problem
        assert bool(problem) == bool(reason), (size, problem, reason)


@pytest.mark.parametrize(
    ("scheme", "family", "size"),
    [
        (None, "llama", 2),
        (None, "llama", 3),
        (None, "gpt_oss", 6),
        ("w3a16-sym-g32", "qwen3_moe", 2),
        ("w3a16-sym-g32", "llama", 4),
    ],
)
def test_size_check_agrees_with_loader(scheme, family, size, tiny_model, written):
    folder = tiny_model(family) if scheme is None else written(scheme, "gptq", family)
    found = []
    for attempt in (
        lambda: check_ranks(ModelConfig.from_folder(folder), size, 1),
        lambda: run_ranks(size, lambda communicator: rank_logits(folder, communicator)),
    ):
        try:
            attempt()
            found.append("")
        except InputError as error:
            found.append(str(error))
    assert found[0] == found[1]
    assert bool(found[0]) == ((family, size) != ("llama", 2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size 3: 4 attention heads of 2 KV heads"),
        ({"pipeline_parallel_size": 8}, "--pipeline-parallel-size 8: the model has 3 layers"),
    ],
)
def test_indivisible_sizes_are_refused_before_start(tiny_model, monkeypatch, settings, message):
    """No process, no device, no weights."""
    monkeypatch.setattr(build, "WorkerGroup", lambda *_: pytest.fail("it was started"))
    config = EngineConfig(model=str(tiny_model("llama")), device="cpu", **settings)
    with pytest.raises(InputError, match=message):
        Engine(config)


def test_indivisible_heads_are_refused(tiny_model):
    with pytest.raises(InputError, match="4 attention heads of 2 KV heads"):
        run_ranks(3, lambda communicator: rank_logits(tiny_model("llama"), communicator))
