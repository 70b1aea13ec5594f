"""Tiny float models for the calibrate tests."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from calibrate.calibration.capture import HiddenStates
from calibrate.calibration.layer_runner import LayerRunner
from calibrate.float_model import FloatModel
from calibrate.layer import load_transforms
from calibrate.recipe import Recipe
from calibrate.run.prepare import rewrite_model
from calibrate.solvers.solving import LayerContext
from calibrate.texts.default_texts import DEFAULT_TEXTS
from formats.codecs.config_fields import EMBEDDING
from formats.files.channel_factors import ChannelFactors
from formats.scheme import QuantSpec
from tests.calibrate.statistics_of import collect_statistics
from tests.qserve.model.variants import edited

torch.set_num_threads(1)

SHAPES = {  # local name -> [N, K]
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}


class TinyCheckpoint:
    """Float model in memory: change `tensors` and `config`, then write it."""

    def __init__(self, architecture: str, folder: Path) -> None:
        generator = torch.Generator().manual_seed(0)
        self.folder = folder
        self.config: dict[str, Any] = {
            "architectures": [architecture],
            "model_type": architecture.removesuffix("ForCausalLM").lower(),
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 40,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }
        shapes = {"model.embed_tokens.weight": (40, 64), "model.norm.weight": (64,)}
        for layer in range(2):
            prefix = f"model.layers.{layer}"
            shapes |= {f"{prefix}.{name}.weight": shape for name, shape in SHAPES.items()}
            norms = ["input_layernorm", "post_attention_layernorm"]
            shapes |= {f"{prefix}.{name}.weight": (64,) for name in norms}
            if architecture == "Qwen3ForCausalLM":
                for name in ("q_norm", "k_norm"):
                    shapes[f"{prefix}.self_attn.{name}.weight"] = (16,)
            if architecture == "Qwen2ForCausalLM":
                for name in ("q_proj", "k_proj", "v_proj"):
                    size = SHAPES[f"self_attn.{name}"][0]
                    shapes[f"{prefix}.self_attn.{name}.bias"] = (size,)
        shapes["lm_head.weight"] = (40, 64)
        self.tensors = {
            name: torch.randn(*shape, generator=generator).to(torch.bfloat16)
            for name, shape in shapes.items()
        }

    def write(self) -> Path:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(self.config))
        (self.folder / "tokenizer.json").write_text('{"version": "1.0"}')
        save_file(self.tensors, self.folder / "model.safetensors", metadata={"format": "pt"})
        return self.folder


@pytest.fixture(scope="session")
def documents(tmp_path_factory) -> Path:
    """Technical documents of the default texts, the kind that the bundled models know."""
    rows = map(json.loads, DEFAULT_TEXTS.read_text(encoding="utf-8").splitlines())
    path = tmp_path_factory.mktemp("documents") / "documents.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows if row["kind"] == "documents"))
    return path


@pytest.fixture
def tiny_checkpoint(tmp_path: Path) -> Callable[..., TinyCheckpoint]:
    """tiny_checkpoint(architecture) -> a model whose `write()` gives its folder, under tmp_path."""

    def make(architecture: str = "LlamaForCausalLM") -> TinyCheckpoint:
        return TinyCheckpoint(architecture, tmp_path / "source")

    return make


SPEC = QuantSpec(bits=4, symmetric=True, group_size=32)


def stream_logits(
    folder: Path,
    ids_WS: torch.Tensor,
    *transforms,
    change=None,
    spec=SPEC,
    bits=None,
    activation=None,
):
    """Logits [W, S, V] of the model after transforms; `change(layer, state)` may round weights."""
    reader = FloatModel(folder)
    layer_map = reader.layer_map
    runner = LayerRunner(reader, layer_map, "cpu")
    context = LayerContext(
        layer_map=layer_map, config=reader.config, spec=spec, activation_bits=bits
    )
    recipe = Recipe(name="test", solver=None, transforms=transforms)
    model = rewrite_model(reader, recipe, context)
    hidden = HiddenStates(
        ids_WS, model.get(layer_map.embedding, reader.get(layer_map.embedding)), runner
    )
    for layer in range(layer_map.num_layers(reader.config)):
        state = reader.layer(layer, "cpu")
        context = dataclasses.replace(context, layer=layer, factors=ChannelFactors())
        state = load_transforms(state, recipe, context)
        statistics = collect_statistics(runner, runner.build(layer, state), layer, hidden)
        for transform in transforms:
            if transform.on_statistics is not None:
                state = {**state, **transform.on_statistics(state, statistics, context)}
        if change is not None:
            state = change(layer, state)
        hidden.advance(runner, runner.build(layer, state, activation), layer)
    norm = model.get(layer_map.last_norm, reader.get(layer_map.last_norm))
    tied = layer_map.tied_head(reader.config)
    head = model.get(layer_map.head)
    if head is None:
        head = reader.get(layer_map.embedding if tied else layer_map.head)
    return torch.stack([runner.final_logits(h, norm, head) for h in hidden.states_WSD])


@pytest.fixture(scope="session", name="stream_logits")
def _stream_logits():
    return stream_logits


@pytest.fixture(scope="session")
def small_5m(docs_5m, tmp_path_factory):
    """Return a function: tied -> first layer of the bundled model, with a tied or separate head."""
    made = {}

    def make(tied: bool = True):
        def change(tensors):
            for name in [n for n in tensors if "layers." in n and "layers.0." not in n]:
                del tensors[name]
            if not tied:
                tensors["lm_head.weight"] = tensors[f"{EMBEDDING}.weight"].flip(1)

        def say(config):
            config |= {"num_hidden_layers": 1, "tie_word_embeddings": tied}

        if tied not in made:
            folder = tmp_path_factory.mktemp("small") / "model"
            made[tied] = edited(docs_5m, folder, change, say)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                (folder / name).write_bytes((docs_5m / name).read_bytes())
        return made[tied]

    return make
