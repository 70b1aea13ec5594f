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
