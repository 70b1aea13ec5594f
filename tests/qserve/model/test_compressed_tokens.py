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
from formats.architecture.stored_form.deepseek_v4 import published
from formats.checkpoint import CheckpointReader
from formats.layouts import decode_linear
from formats.quant_config import QuantConfig
from formats.scheme import Scheme
from qkernels import QuantLinear
from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams
from tests.qserve.model.test_family_tokens import FEW_PAGES, check_greedy, count_preemptions
from tests.qserve.model.variants import edited, relative

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
    """The weight in float8 with a scale for each block, a power of two, and what it stands for."""
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
    # inputs are rounded to float8, too, and near scores may change places
    assert relative(llm.logits(IDS[0].tolist()), logits_of_transformers(floats)) < 0.5
