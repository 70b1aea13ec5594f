"""Models for the tests: the bundled one, its quantized form, tiny random ones of each family."""

from pathlib import Path

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from formats import gptq
from formats.checkpoint import CheckpointReader
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme

ROOT = Path(__file__).resolve().parent.parent

TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
    # Larger than usual: the outputs of a random model then differ from token to token.
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
# family -> config class and what it adds; windows shorter than the prompts, so that they matter
TINY_FAMILIES = {
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": 9}),
    "qwen2": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
}


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def docs_5m() -> Path:
    """The bundled float model."""
    return ROOT / "examples" / "models" / "docs-5m"


@pytest.fixture(scope="session")
def quantized_5m(docs_5m, tmp_path_factory) -> Path:
    """The bundled model as `qserve quantize --scheme w4a16-sym` writes it."""
    folder = tmp_path_factory.mktemp("models") / "docs-5m-w4a16"
    quantize_checkpoint(docs_5m, folder, scheme=Scheme.parse("w4a16-sym"), progress=False)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """family -> folder of a tiny random float model, made once."""
    import transformers

    made = {}

    def make(family: str) -> Path:
        if family not in made:
            cls, extra = TINY_FAMILIES[family]
            config = getattr(transformers, cls)(**{**TINY, **extra})
            torch.manual_seed(5)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for name, parameter in model.named_parameters():
                if "norm" in name or "bias" in name:
                    torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
            made[family] = tmp_path_factory.mktemp("tiny") / family
            model.save_pretrained(made[family])
        return made[family]

    return make


@pytest.fixture(scope="session")
def transformers_model():
    """folder -> transformers' model in float32, with quantized linears dequantized."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def load(folder: Path):
        reader = CheckpointReader(folder)
        raw = dict(reader.config)
        block = raw.pop(BLOCK, None)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(raw.pop("model_type"), **raw), dtype=torch.float32
        )
        state = {}
        for name in reader.entries:
            module, _, leaf = name.rpartition(".")
            if leaf == "qweight":
                tensors = {n: reader.get(f"{module}.{n}") for n in gptq.TENSOR_NAMES}
                spec = QuantConfig.from_dict(block).scheme.weight
                state[f"{module}.weight"] = gptq.decode(tensors, spec).dequantize()
            elif leaf not in gptq.TENSOR_NAMES:
                state[name] = reader.get(name)
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
        model.tie_weights()
        return model.eval()

    return load
