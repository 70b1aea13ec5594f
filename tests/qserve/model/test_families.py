"""Served families: the table, the builders and `inspect` agree; a new one is a row and a file."""

import dataclasses
import json
import pkgutil
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file

from calibrate.pipeline import quantize_checkpoint
from formats.architecture.family import is_set
from formats.checkpoint import CheckpointReader
from formats.codecs import gptq
from formats.errors import InputError
from formats.families import FAMILIES, served_architectures
from formats.in_memory.packed import PackedWeight
from formats.inspection.inspect import inspect_checkpoint
from formats.quant_config import BLOCK
from formats.scheme import Scheme
from qserve.llm import LLM
from qserve.model import families
from qserve.model.loading.dummy_source import DummySource
from qserve.model.loading.loader import load
from qserve.model.model_config import ModelConfig
from qserve.model.rank_shards import check_ranks
from qserve.params.sampling_params import SamplingParams
from tests.own_code.models import TINY_MODELS
from tests.qserve.model.variants import TOKENS, edited, logits, relative
from tests.tiny_families import TINY, TINY_FAMILIES

SERVED_TYPES = {family.model_type for family in FAMILIES.values() if family.served}
SERVED = [
    name
    for name, (config_class, _) in TINY_FAMILIES.items()
    if getattr(transformers, config_class).model_type in SERVED_TYPES
]


def architecture_of(folder):
    return json.loads((folder / "config.json").read_text())["architectures"][0]


def answer_of(folder):
    """The answer of `inspect` for this project."""
    return next(v for v in inspect_checkpoint(folder).loads_in if v.program == "this project")


def test_every_module_has_a_family_row():
    assert len(SERVED) + len(TINY_MODELS) >= len(served_architectures()) >= 4
    found = pkgutil.walk_packages(families.__path__, f"{families.__name__}.")
    start = f"{families.__name__}."
    modules = {module.name.removeprefix(start) for module in found if not module.ispkg}
    assert {family.builder for family in FAMILIES.values() if family.served} == modules


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_inspect_agrees_with_loader(tiny_model, name):
    folder = tiny_model(name)
    served = architecture_of(folder) in served_architectures()
    assert (answer_of(folder).answer == "yes") == served
    if served:
        assert logits(folder).isfinite().all()
    else:
        with pytest.raises(InputError, match="config.json architectures.*families.py"):
            logits(folder)


@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_every_family_loads_on_two_ranks(tiny_model, name):
    """The loader and `inspect` agree. Other tests compute with several ranks."""
    folder = tiny_model(name)
    if name == "inkling":
        with pytest.raises(InputError, match="does not divide"):
            check_ranks(ModelConfig.from_folder(folder), 2, 1)
        assert "does not divide" in inspect_checkpoint(folder).parallel[2]
        return
    check_ranks(ModelConfig.from_folder(folder), 2, 1)
    assert not inspect_checkpoint(folder).parallel[2]


class Recorder(DummySource):
    """Dummy weights, and the shapes that were requested by name."""

    def __init__(self, *args):
        super().__init__(*args)
        self.asked = {}

    def tensor(self, name, shape, rows=None, **options):
        assert name not in self.asked, f"{name} is read twice"
        self.asked[name] = shape
        return super().tensor(name, shape, rows, **options)


@pytest.mark.parametrize("name", SERVED)
def test_builder_requests_every_tensor_once(tiny_model, name):
    folder = tiny_model(name)
    config, device = ModelConfig.from_folder(folder), torch.device("cpu")
    source = Recorder(config, device, 0)
    indexer = config.family.indexer  # contexts that need it
    length = 8 if indexer is None else config.values[indexer.count_key] + 1
    if config.family.block_indexer is not None:
        length = config.family.block_indexer.most_keys(config.values) + 1
    load(config, source, device=device, dtype=torch.float32, max_model_len=length, progress=False)
    stored = CheckpointReader(folder).entries
    unread = config.family.unread(config.values)
    read = {name: e.shape for name, e in stored.items() if not name.startswith(unread)}
    assert source.asked == read
    assert source.asked.keys() == config.family.tensors(config.values).keys()


@pytest.fixture
def with_row(monkeypatch):
    """with_row(family) -> the table has this row during the test."""
    return lambda family: monkeypatch.setitem(FAMILIES, family.architecture, family)


@pytest.mark.parametrize("quantized", [False, True])
def test_stored_fused_linears_load(tiny_model, transformers_model, tmp_path, quantized):
    """Phi-3's q, k, v and gate, up: one matrix each in the file."""
    folder = tiny_model("phi3")
    if quantized:
        folder = tmp_path / "quantized"
        scheme = Scheme.parse("w8a16-sym-g32")
        quantize_checkpoint(
            tiny_model("phi3"), folder, scheme=scheme, output_format="gptq", progress=False
        )
    with torch.no_grad():
        want = transformers_model(folder)(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5


def test_norm_stored_without_offset_one(tiny_model, with_row, tmp_path):
    """As Gemma stores norms: a factor of 1 is a weight of 0, the heads' norms included."""
    folder = tiny_model("qwen3")
    want = logits(folder)

    def subtract(state):
        for name in [name for name in state if "norm" in name]:
            state[name] -= 1

    shifted = edited(folder, tmp_path / "shifted", subtract)
    assert relative(logits(shifted), want) > 0.1
    with_row(dataclasses.replace(FAMILIES["Qwen3ForCausalLM"], norm_offset=1.0))
    assert relative(logits(shifted), want) < 1e-5


# What a family needed before the project had blocks for it: all that it does in a file of its own.
GRANITE = '''
"""Granite: factors on the embedding, on what layers add, on scores and on logits."""

import torch

from qkernels.operands.split_k import reduced
from qserve.model.blocks.attention import Attention
from qserve.model.blocks.embedding import Embedding
from qserve.model.blocks.mlp import Mlp
from qserve.model.blocks.norm import Norm
from qserve.model.decoder import Decoder


class ScaledEmbedding(Embedding):
    def __init__(self, weight, factor):
        super().__init__(weight)
        self.times = factor

    def forward(self, token_ids, positions):
        return super().forward(token_ids, positions) * self.times


class ScaledHead(torch.nn.Module):
    def __init__(self, linear, divisor):
        super().__init__()
        self.linear, self.divisor = linear, divisor

    def forward(self, x):
        return self.linear(x) / self.divisor


class Layer(torch.nn.Module):
    def __init__(self, attention_norm, attention, mlp_norm, mlp, factor):
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp, self.factor = mlp_norm, mlp, factor

    def forward(self, x, residual, step, cache, aux_states=None):
        if aux_states is not None:
            aux_states.append(x)
        plan = self.attention.plan(x.shape[0])
        h, _ = self.attention_norm(x, None, plan.input)
        x = x + self.factor * reduced(self.attention(h, plan, step, cache))
        plan = self.mlp.plan(x.shape[0])
        h, _ = self.mlp_norm(x, None, plan.input)
        return x + self.factor * reduced(self.mlp(h, plan)), None


def build(config, weights):
    values, family, eps = config.values, config.family, config.norm_eps
    embedding = weights.embedding()
    layers = [
        Layer(
            Norm(layer.norm("input_layernorm"), eps),
            Attention(
                config,
                window=None,
                rotary=layer.rotary,
                qkv_proj=layer.linear(family.qkv),
                o_proj=layer.linear(family.o),
                scale=values["attention_multiplier"],
                **layer.kv_scales(),
            ),
            Norm(layer.norm("post_attention_layernorm"), eps),
            Mlp(
                up_proj=layer.linear(family.gate_up),
                down_proj=layer.linear(family.down),
                activation="silu",
            ),
            values["residual_multiplier"],
        )
        for layer in weights.layers()
    ]
    return Decoder(
        config,
        embedding=ScaledEmbedding(embedding, values["embedding_multiplier"]),
        layers=layers,
        norm=weights.last_norm(),
        head=ScaledHead(weights.head(embedding), values["logits_scaling"]),
    )
'''


@pytest.fixture
def granite(tmp_path, monkeypatch, with_row):
    """A folder of a family that no file of the project knows, after adding its row and its file."""
    path = tmp_path / "modules"
    path.mkdir()
    (path / "hand_made.py").write_text(GRANITE)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(path)])
    with_row(dataclasses.replace(FAMILIES["GraniteForCausalLM"], builder=""))
    factors = {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.1,
        "logits_scaling": 2.5,
    }
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.GraniteConfig(**{**TINY, **factors, "attention_bias": True}),
        dtype=torch.float32,
    )
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, float("norm" in name), 0.2)
    folder = tmp_path / "granite"
    model.save_pretrained(folder)
    assert answer_of(folder).answer == "not judged"
    with_row(
        dataclasses.replace(
            FAMILIES["LlamaForCausalLM"],
            architecture="GraniteForCausalLM",
            model_type="granite",
            builder="hand_made",
            rules=None,
        )
    )
    yield folder
    sys.modules.pop(f"{families.__name__}.hand_made", None)


def test_new_family_is_a_row_and_a_file(granite, transformers_model):
    model = transformers_model(granite)
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(granite), want) < 1e-5
    assert answer_of(granite).answer == "yes"
    expected = model.generate(
        torch.tensor([TOKENS]), max_new_tokens=16, do_sample=False, pad_token_id=0
    )[0, len(TOKENS) :].tolist()
    llm = LLM(granite, device="cpu", max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=16, detokenize=False)
    (output,) = llm.generate([TOKENS], params, use_tqdm=False)
    assert output.outputs[0].token_ids == expected


def test_new_family_is_quantized_and_served(granite, tmp_path):
    folder = tmp_path / "quantized"
    quantize_checkpoint(granite, folder, scheme=Scheme.parse("w8a16-sym-g32"), progress=False)
    assert answer_of(folder).answer == "yes"
    assert 0 < relative(logits(folder), logits(granite)) < 0.1
    dummy = LLM(folder, device="cpu", max_model_len=64, load_format="dummy")
    assert dummy.logits(TOKENS).isfinite().all()


def test_config_flag_controls_biases(tiny_model, tmp_path):
    """Without its key the same biases have no place."""
    folder = tiny_model("llama")
    config = json.loads((folder / "config.json").read_text())
    family = FAMILIES["LlamaForCausalLM"]
    assert is_set(family.qkv.bias, config) and is_set(family.down.bias, config)
    changed = edited(folder, tmp_path / "x", config=lambda c: c.update(mlp_bias=False))
    with pytest.raises(InputError, match="9 tensors that no layer of the model uses"):
        logits(changed)


def test_quantized_head_overrides_tie_flag(tiny_model, tmp_path):
    """The tensors decide: a head that was quantized is no longer the embedding."""
    packed = []

    def quantize_head(state):
        weight = PackedWeight.from_float(
            state["model.embed_tokens.weight"], Scheme.parse("w4a16-sym-g32").weight
        )
        packed.append(weight)
        state.update({f"lm_head.{field}": t for field, t in gptq.encode(weight).items()})

    source = tmp_path / "quantized"
    scheme = Scheme.parse("w4a16-sym-g32")
    quantize_checkpoint(
        tiny_model("qwen3"), source, scheme=scheme, output_format="gptq", progress=False
    )
    folder = edited(source, tmp_path / "x", quantize_head, lambda c: c[BLOCK].update(lm_head=True))
    untied = edited(
        source,
        tmp_path / "y",
        lambda s: s.update({"lm_head.weight": packed[0].dequantize()}),
        lambda c: c.update(tie_word_embeddings=False),
    )
    assert relative(logits(folder), logits(untied)) < 1e-5
    assert relative(logits(folder), logits(source)) > 0.01


def test_stored_head_of_a_tied_model_is_used_if_it_differs(tiny_model, tmp_path):
    """As transformers 5 does: a head that equals the embedding is tied, any other is kept."""
    folder = tiny_model("qwen3")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")

    def with_head(name, factor, edit_config=None):
        def add(state):
            state["lm_head.weight"] = state["model.embed_tokens.weight"] * factor

        return edited(folder, tmp_path / name, add, edit_config)

    def untie(config):
        config["tie_word_embeddings"] = False

    assert torch.equal(logits(with_head("copy", 1)), logits(folder))
    own = logits(with_head("own", -2))
    assert torch.equal(own, logits(with_head("untied", -2, untie)))
    assert torch.allclose(own, -2 * logits(folder))
