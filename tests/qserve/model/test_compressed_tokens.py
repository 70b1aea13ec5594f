"""DeepSeek-V4: logits and greedy tokens are transformers', also after quantization.

transformers is the judge: it loads the same folder, or a copy with dequantized weights, by the
names of published files. Windows of the tiny model end within pages and go over their ends.
"""

import json
import random

import pytest
import torch
import transformers
from safetensors.torch import save_file

from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.architecture.stored_form.deepseek_v4 import published
from formats.checkpoint import CheckpointReader
from formats.dequantize import dequantize_checkpoint
from formats.errors import CheckpointError, InputError
from formats.layouts import decode_linear
from formats.quant_config import QuantConfig
from formats.scheme import Scheme
from qkernels import QuantLinear
from qserve.config import EngineConfig
from qserve.llm import LLM
from qserve.model.model_config import ModelConfig
from qserve.model.tp_plan import place_experts
from qserve.params.sampling_params import SamplingParams
from qserve.speculation.ngram import NgramDrafter
from tests.qserve.model.test_family_tokens import FEW_PAGES, check_greedy, count_preemptions
from tests.qserve.model.variants import edited, relative
from tests.qserve.parallel.test_sharing import assert_sharded

IDS = torch.randint(3, 500, (1, 100), generator=torch.Generator().manual_seed(2))
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def folder(tiny_model):
    return tiny_model("deepseek_v4")


def judge(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits_of_transformers(folder):
    with torch.no_grad():
        return judge(folder)(IDS).logits[0]


def logits(folder, **settings):
    return LLM(folder, device="cpu", max_model_len=128, **settings).logits(IDS[0].tolist())


@pytest.mark.parametrize("page_size", [4, 8, 16, 20, 32])
def test_logits_equal_transformers(folder, page_size):
    want = logits_of_transformers(folder)
    assert relative(logits(folder, block_size=page_size), want) < 1e-5


def test_published_names_are_those_that_transformers_reads(folder, tmp_path):
    renamed = []

    def rename(state):
        for name in list(state):
            renamed.append(published(name))
            state[published(name)] = state.pop(name)

    copy = edited(folder, tmp_path / "model", rename)
    assert {"embed.weight", "layers.2.attn.compressor.ape", "hc_head_fn"} <= set(renamed)
    want = logits_of_transformers(folder)
    assert torch.equal(logits_of_transformers(copy), want)
    assert relative(logits(copy), want) < 1e-5


def test_config_of_published_files(folder, tmp_path):
    """Ratios instead of types, a list longer than the layers, and other keys of rotations."""
    published_keys = {
        **{"compress_ratios": [0, 4, 128, 0], "num_hash_layers": 1, "qk_rope_head_dim": 16},
        "rope_scaling": {
            **{"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
            **{"beta_fast": 32, "beta_slow": 1},
        },
    }

    def change(config):
        for key in (
            *("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters"),
            "partial_rotary_factor",
        ):
            del config[key]
        config.update(published_keys)

    def longer(state):
        generator = torch.Generator().manual_seed(1)
        for name in [n for n in state if "layers.2." in n and n.endswith(".ape")]:
            state[name] = torch.randn(128, state[name].shape[1], generator=generator)

    copy = edited(folder, tmp_path / "model", longer, change)
    ids = torch.randint(3, 500, (1, 300), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        want = judge(copy)(ids).logits[0]
    got = LLM(copy, device="cpu", max_model_len=512).logits(ids[0].tolist())
    assert relative(got, want) < 1e-5


def prompts():
    """Some begin alike; all but one are longer than a page and a sliding window."""
    rng = random.Random(8)
    start = [rng.randrange(3, 512) for _ in range(17)]
    return [start + [rng.randrange(3, 512) for _ in range(n)] for n in (1, 19, 13, 4)] + [[5, 9]]


def dequantized(folder, target):
    """A float copy of a quantized folder, for transformers."""
    reader, state = CheckpointReader(folder), {}
    config = dict(reader.config)
    quant = QuantConfig.from_dict(config.pop("quantization_config"))
    modules = {name.rpartition(".")[0] for name in reader.entries if name.endswith(".qweight")}
    for name in reader.entries:
        module, _, leaf = name.rpartition(".")
        if module not in modules:
            state[name] = reader.get(name)
        elif leaf == "qweight":
            names = [n for n in reader.entries if n.rpartition(".")[0] == module]
            tensors = {n.rpartition(".")[2]: reader.get(n) for n in names}
            state[f"{module}.weight"] = decode_linear(module, tensors, quant).dequantize()
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    return target


def quantized(source, folder, scheme="w4a16-asym-g32", **settings):
    quantize_checkpoint(
        source,
        folder,
        scheme=Scheme.parse(scheme),
        output_format="gptq",
        progress=False,
        **settings,
    )
    return folder


def check_all_modes(llm, monkeypatch):
    """Generate in chunks, with too few pages, and on prefixes that are cached."""
    preemptions = count_preemptions(llm, monkeypatch)
    outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert preemptions
    again = llm.generate(prompts()[1:2], GREEDY, use_tqdm=False)
    assert again[0].num_cached_tokens >= 16
    assert again[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    return outputs


CHUNKS = {"max_model_len": 64, "max_num_batched_tokens": 11, **FEW_PAGES}


@pytest.mark.parametrize("scheme", [None, "w4a16-asym-g32"])
def test_greedy_tokens(folder, tmp_path, monkeypatch, scheme):
    model = folder
    if scheme is not None:
        folder = quantized(folder, tmp_path / "model", scheme)
        entries = CheckpointReader(folder).entries
        assert "layers.1.attn.wo_b.qweight" in entries
        assert "layers.1.attn.wo_a.weight" in entries
        assert "layers.1.attn.indexer.wq_b.weight" in entries
        assert not entries["layers.0.ffn.gate.tid2eid"].dtype.is_floating_point
        model = dequantized(folder, tmp_path / "float")
    outputs = check_all_modes(LLM(folder, device="cpu", **CHUNKS), monkeypatch)
    check_greedy(judge(model), prompts(), outputs)


def in_blocks(weight, exponents):
    """The weight in float8 with a scale for each block, a power of two, and its values."""
    codes, scales = torch.empty_like(weight), []
    for start in range(0, len(weight), 128):
        scales.append([])
        for first in range(0, weight.shape[1], 128):
            place = (slice(start, start + 128), slice(first, first + 128))
            scale = 2.0 ** torch.log2(weight[place].abs().max() / 448).ceil()
            codes[place] = (weight[place] / scale).to(torch.float8_e4m3fn).float() * scale
            scales[-1].append(scale)
    scales = torch.tensor(scales)
    whole = scales.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)
    stored = (codes / whole[:, : weight.shape[1]]).to(torch.float8_e4m3fn)
    return stored, scales.to(torch.float8_e8m0fnu) if exponents else scales, codes


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def in_mxfp4(weight):
    """The weight in codes of 4 bits, two in a byte, the first in the low bits; exponents."""
    groups = weight.unflatten(1, (-1, 32))
    scales = 2.0 ** torch.log2(groups.abs().amax(-1) / 6).ceil()
    codes = (groups / scales[..., None])[..., None].sub(FP4).abs().argmin(-1).to(torch.uint8)
    codes = codes.flatten(1)
    stored = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
    value = FP4[codes.long()] * scales.repeat_interleave(32, 1)
    return stored, scales.to(torch.float8_e8m0fnu), value


FLOAT = ("embed.", "head.", "norm.", ".compressor.", ".ffn.gate.", ".weights_proj.")
BLOCK = {
    **{"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic"},
    "weight_block_size": [128, 128],
}


@pytest.mark.parametrize(
    ("experts", "exponents", "in_block"),
    [("fp4", True, False), ("fp4", False, True), ("fp8", True, True)],
)
def test_published_weights_in_float8_and_mxfp4(folder, tmp_path, experts, exponents, in_block):
    """Judged on weights alone: as floats they give transformers' logits."""
    values = {}

    def store(state):
        for name in list(state):
            weight, own = state.pop(name), published(name)
            module, _, leaf = own.rpartition(".")
            is_float = any(part in own for part in FLOAT) or weight.ndim != 2 or leaf != "weight"
            values[own] = state[own] = weight
            if is_float:
                continue
            if ".experts." in own and experts == "fp4":
                stored, scales, value = in_mxfp4(weight)
            else:
                stored, scales, value = in_blocks(weight, exponents)
            values[own], state[own], state[f"{module}.scale"] = value, stored, scales
        state["mtp.0.e_proj.weight"] = torch.zeros(4, 4)  # not read

    def state_block(config):
        config["quantization_config"] = dict(BLOCK)
        (config["quantization_config"] if in_block else config)["expert_dtype"] = experts

    copy = edited(folder, tmp_path / "model", store, state_block)
    floats = edited(folder, tmp_path / "float", lambda state: (state.clear(), state.update(values)))
    reader = CheckpointReader(copy)
    quant = QuantConfig.from_dict(reader.config["quantization_config"])
    modules = [name.removesuffix(".weight_scale") for name in reader.entries if "_scale" in name]
    modules = [module for module in modules if not module.endswith(("attn_scale", "head_scale"))]
    modules = [module for module in modules if not module.endswith("ffn_scale")]
    for module in modules:
        names = [n for n in reader.entries if n.rpartition(".")[0] == module]
        tensors = {n.rpartition(".")[2]: reader.get(n) for n in names}
        weight = decode_linear(module, tensors, quant)
        assert weight.dequantize().float().equal(values[f"{module}.weight"]), module
        assert (weight.spec.bits == 4) == (experts == "fp4" and ".experts." in module)
    assert len(modules) == 3 * (4 + 1 + 3 * 8 + 3) + 1
    llm = LLM(copy, device="cpu", max_model_len=128)
    attention = llm.engine.runner.decoder.layers[1].attention
    assert isinstance(attention.q_b_proj, QuantLinear)
    assert attention.o_a.flatten(0, 1).equal(values["layers.1.attn.wo_a.weight"])
    assert attention.indexer.wq_b.weight.equal(values["layers.1.attn.indexer.wq_b.weight"])
    decoded = tmp_path / "decoded"
    dequantize_checkpoint(copy, decoded, dtype="float32")
    assert relative(logits_of_transformers(decoded), logits_of_transformers(floats)) == 0
    results = [tmp_path / "of_codes", tmp_path / "of_floats"]
    for source, target in zip((copy, decoded), results, strict=True):
        quantize_checkpoint(
            source, target, scheme=Scheme.parse("w4a16-sym-g32"), recipe="rtn", progress=False
        )
    of_codes, of_floats = (CheckpointReader(target) for target in results)
    coded = [name for name in of_floats.entries if name.endswith("weight_packed")]
    assert len(coded) > 50 and of_codes.entries.keys() == of_floats.entries.keys()
    assert all(of_codes.get(name).equal(of_floats.get(name)) for name in coded)
    # inputs are rounded to float8, too, and near scores may change places
    assert relative(llm.logits(IDS[0].tolist()), logits_of_transformers(floats)) < 0.3


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["gptq", "awq"])
def test_solved_weights(folder, tmp_path, recipe):
    """Windows are longer than what a query sees of tokens, and have entries of both kinds."""
    ids_WS = torch.randint(3, 500, (4, 40), generator=torch.Generator().manual_seed(0))
    data = CalibrationData(ids_WS=ids_WS, source="test", seed=0)
    solved = quantized(folder, tmp_path / "model", recipe=recipe, calibration=data)
    model = dequantized(solved, tmp_path / "float")
    assert relative(logits(solved), logits_of_transformers(model)) < 1e-5


def test_drafts_do_not_change_tokens(folder, monkeypatch):
    """Rejected drafts leave inputs of compressors, and entries, that later tokens replace."""
    prompt = IDS[0, :30].tolist()
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
    settings = {"device": "cpu", "max_model_len": 128, "block_size": 8}
    (output,) = LLM(folder, **settings).generate([prompt], params, use_tqdm=False)
    want, rng, rejected = output.outputs[0].token_ids, random.Random(3), []

    def drafts(self, request_id, tokens, most):
        right = (prompt + want)[len(tokens) : len(tokens) + most]
        wrong = rng.randrange(len(right) + 1)
        rejected.append(len(right) - wrong)
        return [*right[:wrong], *((token + 1) % 512 for token in right[wrong:])]

    monkeypatch.setattr(NgramDrafter, "propose", drafts)
    llm = LLM(
        folder,
        **settings,
        speculative_config={"method": "ngram", "num_speculative_tokens": 5},
    )
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].token_ids == want
    assert sum(rejected) > 20


def of_attention(change):
    def apply(decoder):
        for layer in decoder.layers:
            change(layer.attention)

    return apply


def of_compressors(change):
    def each(attention):
        if attention.compressor is not None:
            change(attention.compressor)

    return of_attention(each)


def of_indexers(change):
    def each(attention):
        if attention.indexer is not None:
            change(attention.indexer)

    return of_attention(each)


def sees_no_entries(attention):
    attention._older = lambda *arguments: []


WRONG = {
    "a window of one token less": of_attention(lambda each: setattr(each, "window", 6)),
    "no sinks": of_attention(lambda each: each.sinks.fill_(-torch.inf)),
    "groups of heads exchanged": of_attention(lambda each: each.o_a.copy_(each.o_a.flip(0))),
    "no entries": of_attention(sees_no_entries),
    "entries without positions in windows": of_compressors(lambda each: each.ape.zero_()),
    "entries without the norm's weight": of_compressors(lambda each: each.norm.fill_(1)),
    "one entry less": of_indexers(lambda each: setattr(each, "most", 2)),
    "all entries": of_indexers(lambda each: setattr(each, "most", 1000)),
    "scores without positions in windows": of_indexers(lambda each: each.compressor.ape.zero_()),
    "weights of another head": of_indexers(
        lambda each: each.weights_proj.weight.copy_(each.weights_proj.weight.roll(1, 0))
    ),
    "experts of the next token": lambda decoder: decoder.layers[0].mlp.router.table.copy_(
        decoder.layers[0].mlp.router.table.roll(1, 0)
    ),
    "choice without the correction": lambda decoder: decoder.layers[
        1
    ].mlp.router.correction.zero_(),
    "no limit of the shared expert": lambda decoder: setattr(
        decoder.layers[1].mlp.shared.mlp, "gate_limit", None
    ),
    "one iteration": lambda decoder: setattr(decoder.layers[1].mlp_hyper, "iterations", 1),
    "streams mixed the other way": lambda decoder: decoder.layers[1].attention_hyper.base.copy_(
        decoder.layers[1].attention_hyper.base.flip(0)
    ),
    "streams merged without their offset": lambda decoder: decoder.streams.base.zero_(),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_reading_is_seen(folder, wrong):
    llm = LLM(folder, device="cpu", max_model_len=128)
    right = llm.logits(IDS[0].tolist())
    with torch.inference_mode():
        WRONG[wrong](llm.engine.runner.decoder)
    assert relative(llm.logits(IDS[0].tolist()), right) > 1e-3


@pytest.mark.parametrize(("size", "settings"), [(2, {}), (4, {"enable_expert_parallel": True})])
def test_ranks_share_the_experts(folder, size, settings):
    """Every rank computes attention; experts of scores and of the table are divided."""
    decoders = assert_sharded(folder, size, tensor_parallel_size=size, **settings)
    whole = LLM(folder, device="cpu", max_model_len=64).engine.runner.decoder
    for name in ("q_b_proj", "o_b_proj"):
        shapes = {tuple(getattr(d.layers[1].attention, name).weight.shape) for d in decoders}
        assert shapes == {tuple(getattr(whole.layers[1].attention, name).weight.shape)}


REFUSED = {
    "--pipeline-parallel-size": {"pipeline_parallel_size": 2},
    "--prefill-context-parallel-size": {"prefill_context_parallel_size": 2},
    "--enable-lora": {"enable_lora": True},
    "--speculative-config": {"speculative_config": {"method": "mtp"}},
    "--batch-invariant": {"batch_invariant": True},
    "--kv-cache-dtype": {"kv_cache_dtype": "int8"},
    "--block-size": {"block_size": 10},
    "--dtype": {"dtype": "float16"},
}


@pytest.mark.parametrize("flag", REFUSED)
def test_a_setting_that_is_not_supported_is_refused(folder, flag):
    settings = REFUSED[flag]
    with pytest.raises(InputError, match=f"^{flag}"):
        LLM(folder, device="cpu", max_model_len=64, **settings)


def test_engines_that_share_experts_are_refused(folder):
    """They route tokens of other engines, whose ids they do not have."""
    settings = {"data_parallel_size": 2, "enable_expert_parallel": True}
    config = EngineConfig(model=str(folder), device="cpu", **settings)
    with pytest.raises(InputError, match="^--enable-expert-parallel: .*DeepseekV4ForCausalLM"):
        place_experts(ModelConfig.from_folder(folder), config)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("layer_types", ["full_attention"] * 3, "layer_types.*sliding_attention"),
        ("mlp_layer_types", ["dense"] * 3, "mlp_layer_types.*hash_moe"),
        ("scoring_func", "softmax", "scoring_func.*sqrtsoftplus"),
        ("n_shared_experts", 2, "n_shared_experts"),
        ("swiglu_limit", 0.0, "swiglu_limit.*above 0"),
        ("compress_rates", {"compressed_sparse_attention": 0}, "compress_rate_csa"),
    ],
)
def test_a_config_that_is_not_supported_is_refused(folder, tmp_path, key, value, message):
    copy = edited(folder, tmp_path / "model", None, lambda config: config.update({key: value}))
    with pytest.raises(InputError, match=message):
        LLM(copy, device="cpu", max_model_len=64)


def test_a_table_of_experts_that_do_not_exist_is_refused(folder, tmp_path):
    def change(state):
        (name,) = [name for name in state if name.endswith("tid2eid")]
        state[name][5, 1] = 8

    with pytest.raises(CheckpointError, match=r"layers.0.ffn.gate.tid2eid: .* 0 to 7"):
        LLM(edited(folder, tmp_path / "model", change), device="cpu", max_model_len=64)
