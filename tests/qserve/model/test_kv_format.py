"""8-bit KV pages on the CPU path: how far logits move, who chooses them, what memory they take."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import calibrate
from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.evaluate import perplexity
from formats.errors import CheckpointError, InputError
from formats.quant_config import BLOCK
from formats.scheme import Scheme
from qkernels.attention.cache import INT4_PAGES
from qserve.llm import LLM
from qserve.model import kv_format
from qserve.model.blocks.shared_attention import SharedAttention
from qserve.model.cache_spec import KvFormat
from qserve.model.fallback.attention import PagedAttention
from qserve.params.sampling_params import SamplingParams

TEXT = "# Installing the compiler\n\nThe build needs a C compiler and Python. " * 6
# Relative change of the logits of the bundled model: measured 0.006 (int8), 0.017 (float8) and
# 0.052 (int4).
LIMITS = {"int8": 0.01, "fp8": 0.04, "int4": 0.1}
HELD_OUT = Path(calibrate.__file__).parent / "quality" / "held_out.jsonl"
EIGHT_BITS = ("int8", "fp8")


def make(folder, **settings):
    return LLM(str(folder), device="cpu", max_model_len=256, **settings)


def tokens(llm):
    return llm.get_tokenizer().encode(TEXT)[:200]


@pytest.fixture(scope="module")
def float_logits(docs_5m):
    llm = make(docs_5m)
    return llm.logits(tokens(llm))


def change(llm, want):
    got = llm.logits(tokens(llm))
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("name", LIMITS)
def test_quantized_kv_changes_logits_slightly(docs_5m, float_logits, name):
    moved = change(make(docs_5m, kv_cache_dtype=name), float_logits)
    print(f"{name}: logits moved by {moved:.4f}")
    assert 0 < moved < LIMITS[name], moved


def largest_keys_and_values(docs_5m):
    """Return the largest magnitudes of keys and values of each layer in a float cache."""
    llm = make(docs_5m)
    llm.logits(tokens(llm))
    caches = llm.engine.runner.caches
    return [(float(c.k_pages.abs().max()), float(c.v_pages.abs().max())) for c in caches]


@pytest.fixture(scope="module")
def calibrated(docs_5m, tmp_path_factory):
    """(type, factor on k_scale) -> a folder whose layers have static scales."""
    plain = tmp_path_factory.mktemp("plain") / "model"
    quantize_checkpoint(
        docs_5m,
        plain,
        scheme=Scheme.parse("w8a8"),
        output_format="compressed-tensors",
        recipe="rtn",
        progress=False,
    )
    largest = largest_keys_and_values(docs_5m)

    def write(kind, factor=1.0, leave_out=(), heads=()):
        """`heads`: factors of each KV head's own k_scale."""
        folder = tmp_path_factory.mktemp("calibrated") / "model"
        folder.mkdir()
        for path in plain.iterdir():
            if path.suffix != ".safetensors":
                (folder / path.name).write_bytes(path.read_bytes())
        config = json.loads((plain / "config.json").read_text())
        config[BLOCK]["kv_cache_scheme"] = {
            "num_bits": 8,
            "type": kind,
            "symmetric": True,
            "strategy": "attn_head" if heads else "tensor",
            "dynamic": False,
        }
        (folder / "config.json").write_text(json.dumps(config))
        state = load_file(plain / "model.safetensors")
        code = {"int": 127.0, "float": 448.0}[kind]
        for layer, (keys, values) in enumerate(largest):
            prefix = f"model.layers.{layer}.self_attn"
            of_heads = torch.tensor(heads).view(-1, 1, 1) if heads else torch.ones(1)
            state[f"{prefix}.k_scale"] = factor * keys / code * of_heads
            state[f"{prefix}.v_scale"] = values / code * torch.ones_like(of_heads)
        for name in leave_out:
            del state[name]
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return write


@pytest.mark.parametrize("kind, name", [("int", "int8"), ("float", "fp8")])
def test_auto_uses_checkpoint_scales(calibrated, kind, name):
    folder = calibrated(kind)
    llm = make(folder)
    found = llm.engine.runner.kv_format
    assert found == kv_format.KvFormat(dtype=kv_format.CODE_DTYPES[name], static_scales=True)
    scale = llm.engine.runner.decoder.layers[1].attention.k_scale
    assert (llm.engine.runner.caches[1].k_scales == scale).all()
    # the same weights, keys and values rounded on write
    own = make(folder, kv_cache_dtype="fp8" if name == "int8" else "int8")
    assert not own.engine.runner.kv_format.static_scales, "those scales are for the other codes"
    want = own.logits(tokens(own))
    moved = change(llm, want)
    assert moved < LIMITS["int8"] + LIMITS["fp8"], moved
    assert (llm.engine.runner.caches[1].k_scales == scale).all(), "never written"
    wrong = change(make(calibrated(kind, factor=1 / 16)), want)
    print(f"{name}: static scales move logits by {moved:.4f}, wrong ones by {wrong:.3f}")
    assert wrong > 3 * (LIMITS["int8"] + LIMITS["fp8"])


def test_each_head_is_rounded_with_its_own_scale(calibrated):
    """A head whose scale is far too small is clipped, and nothing else changes."""
    heads = make(calibrated("int")).engine.runner.caches[1].k_pages.shape[2]
    assert heads > 1
    factors = [1.0] * (heads - 1) + [1 / 16]
    fine, clipped = (
        make(calibrated("int", heads=[1.0] * heads)),
        make(calibrated("int", heads=factors)),
    )
    whole = make(calibrated("int"))
    assert torch.equal(fine.logits(tokens(fine)), whole.logits(tokens(whole)))
    clipped.logits(tokens(clipped))
    keys, ours = (llm.engine.runner.caches[0].k_pages.int() for llm in (fine, clipped))
    assert torch.equal(keys[:, :, :-1], ours[:, :, :-1])
    assert int(ours[:, :, -1].abs().max()) >= 127
    assert not torch.equal(keys[:, :, -1], ours[:, :, -1])
    with pytest.raises(CheckpointError, match=f"one for each of {heads} KV heads, found 7"):
        make(calibrated("int", heads=[1.0] * 7))


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_written_kv_scales_are_used(docs_5m, tmp_path, name):
    """Perplexity apart, the cache of the written folder is what its config says."""
    quantize_checkpoint(
        docs_5m,
        tmp_path / "model",
        scheme=Scheme.parse("w8a8"),
        output_format="compressed-tensors",
        recipe="rtn",
        kv_cache=name,
        samples=2,
        sequence_length=256,
        progress=False,
    )
    llm = make(tmp_path / "model")
    assert llm.engine.runner.kv_format == kv_format.KvFormat(
        dtype=kv_format.CODE_DTYPES[name], static_scales=True
    )
    other = make(tmp_path / "model", kv_cache_dtype="fp8" if name == "int8" else "int8")
    want = other.logits(tokens(other))
    assert change(llm, want) < LIMITS["int8"] + LIMITS["fp8"]


@pytest.mark.parametrize(("left_out", "found"), [(("v",), "k_scale alone"), (("k", "v"), "none")])
def test_layer_without_scales_is_reported(calibrated, left_out, found):
    names = [f"model.layers.2.self_attn.{kind}_scale" for kind in left_out]
    folder = calibrated("int", leave_out=names)
    with pytest.raises(CheckpointError, match=rf"layers.2.*k_scale and a v_scale.*found {found}"):
        make(folder)


def test_no_checkpoint_scales_leave_the_cache_in_float(docs_5m):
    assert make(docs_5m).engine.runner.kv_format == kv_format.KvFormat(dtype=torch.float32)


def test_unsupported_kv_cache_types_are_refused(docs_5m, monkeypatch):
    with pytest.raises(InputError, match="--kv-cache-dtype.*auto, int8, fp8, int4.*'int2'"):
        make(docs_5m, kv_cache_dtype="int2")
    decoder = make(docs_5m).engine.runner.decoder
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(InputError, match=r"8\.9 or later, found 8\.0.*use --kv-cache-dtype int8"):
        kv_format.pick_kv_format("fp8", decoder, torch.device("cuda"))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *((name, family) for name in EIGHT_BITS for family in ("docs-5m", "qwen3", "mistral")),
        *(("int4", family) for family in ("docs-5m", "qwen3", "llama")),
    ],
)
def test_decode_steps_equal_one_chunk(docs_5m, tiny_model, name, family):
    """Pages that steps of one token filled, preempted and refilled, hold the same codes."""
    folder = docs_5m if family == "docs-5m" else tiny_model(family)
    llm = make(
        folder, kv_cache_dtype=name, num_gpu_blocks_override=9, admission="fits", max_num_seqs=3
    )
    prompts = [[5 + (7 * i + j) % 400 for j in range(20 + i)] for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        generated = output.outputs[0].token_ids
        want = llm.logits(prompt + generated[:-1]).argmax(-1)[len(prompt) - 1 :].tolist()
        assert generated == want


@pytest.mark.parametrize("name, scale_bytes", [("int8", 4), ("fp8", 4)])
def test_8_bit_kv_fits_nearly_twice_as_many_tokens(docs_5m, name, scale_bytes):
    settings = {"dtype": "bfloat16", "cpu_kv_cache_memory": 0.001}
    half, coded = make(docs_5m, **settings), make(docs_5m, kv_cache_dtype=name, **settings)
    model = coded.engine.model_config
    ratio = 2 * model.head_dim / (model.head_dim + scale_bytes)
    sizes = [llm.engine.runner.bytes_per_page for llm in (half, coded)]
    assert sizes[0] / sizes[1] == ratio
    pages = [llm.engine.scheduler.pool.num_pages for llm in (half, coded)]
    assert pages[1] == pytest.approx(ratio * pages[0], abs=1)
    for llm in (half, coded):  # the tensors take what the arithmetic says
        caches = llm.engine.runner.caches
        parts = [t for c in caches for t in (c.k_pages, c.v_pages, c.k_scales, c.v_scales)]
        taken = sum(t.numel() * t.itemsize for t in parts if t is not None)
        assert taken == llm.engine.runner.bytes_per_page * llm.engine.scheduler.pool.num_pages


def test_4_bit_kv_fits_twice_as_many_tokens_as_8_bit(docs_5m):
    """Less six float16 of scales and zeros a token and head, instead of two float32."""
    settings = {"dtype": "bfloat16", "cpu_kv_cache_memory": 0.001}
    eight, four = (make(docs_5m, kv_cache_dtype=name, **settings) for name in ("int8", "int4"))
    head_dim = eight.engine.model_config.head_dim
    ratio = 2 * (head_dim + 4) / (head_dim + 12)
    sizes = [llm.engine.runner.bytes_per_page for llm in (eight, four)]
    assert sizes[0] / sizes[1] == ratio > 1.75
    pages = [llm.engine.scheduler.pool.num_pages for llm in (eight, four)]
    assert pages[1] == pytest.approx(ratio * pages[0], abs=2)
    taken = sum(t.numel() * t.itemsize for c in four.engine.runner.caches for t in c.page_tensors)
    assert taken == sizes[1] * pages[1], "the tensors take what the arithmetic says"


def test_4_bit_kv_perplexity_is_bounded(docs_5m):
    text = "\n".join(json.loads(line)["text"] for line in HELD_OUT.read_text().splitlines()[:8])
    ids = make(docs_5m).get_tokenizer().encode(text)[: 8 * 128]
    windows = torch.tensor(ids).view(8, 128)
    values = {}
    for name in ("auto", "int8", "int4"):
        llm = make(docs_5m, kv_cache_dtype=name)
        values[name] = perplexity(windows, lambda w, llm=llm: llm.logits(w.tolist())).value
    print(values)
    assert values["int8"] == pytest.approx(values["auto"], rel=0.003)
    assert values["int8"] * 1.01 < values["int4"] < values["auto"] * 1.06


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mistral", "heads of 32, 64, 128, 256, .*not 16"),
        ("deepseek_v3", "latent attention"),
    ],
)
def test_models_whose_pages_cannot_have_4_bits_are_refused(tiny_model, family, reason):
    with pytest.raises(InputError, match=f"--kv-cache-dtype int4.*{reason}") as raised:
        LLM(str(tiny_model(family)), device="cpu", max_model_len=64, kv_cache_dtype="int4")
    assert raised.value.remedy == "use --kv-cache-dtype int8"


def test_layers_without_rope_refuse_4_bit_kv():
    """Layers that read another layer's keys, and layers that transformers computes."""
    int4 = KvFormat(dtype=INT4_PAGES)
    with pytest.raises(InputError, match="int4.*reads the keys of another one"):
        SharedAttention.cache_spec(SimpleNamespace(source=0), int4, 16)
    with pytest.raises(InputError, match="int4.*transformers computes its layers"):
        PagedAttention(form=None, kernel=None).cache_spec(int4, 16)


def test_batch_invariant_refuses_4_bits(docs_5m):
    with pytest.raises(InputError, match="int4.*--batch-invariant.*fixed order"):
        make(docs_5m, kv_cache_dtype="int4", batch_invariant=True)


def test_twice_as_many_requests_run_with_static_scales(calibrated, docs_5m):
    """In as many bytes; the checkpoint's scales take none of a page."""
    running = []
    for folder in (docs_5m, calibrated("int")):
        llm = make(folder, dtype="bfloat16", cpu_kv_cache_memory=0.002)
        for i in range(64):
            params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
            llm.engine.add_request(str(i), list(range(3 + i, 51 + i)), params)
        llm.engine.step()
        running.append(len(llm.engine.scheduler.running))
    assert 2 < running[0] < 32
    assert running[1] in (2 * running[0], 2 * running[0] + 1)


@pytest.mark.parametrize("name", ["auto", "int4"])
@pytest.mark.parametrize("page_size", [8, 16])
def test_attention_without_kernel_is_refused_with_graphs(docs_5m, page_size, name):
    """Before a capture fails on it. Asked as for a GPU."""
    llm = make(docs_5m, block_size=page_size, kv_cache_dtype=name)
    spec = llm.engine.runner.cache_specs[0]
    asked = torch.float32, "cuda"
    if page_size == 16:
        spec.check_graphs(*asked)
        return
    with pytest.raises(
        InputError, match="takes pages of 16, 32, 64 or 128 tokens, not 8"
    ) as raised:
        spec.check_graphs(*asked)
    assert "--enforce-eager" in raised.value.remedy
