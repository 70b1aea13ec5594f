"""Models in Mistral's own files: logits and tokens are those of transformers' class."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.scheme import Scheme
from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams
from tests.mistral_files import own_cache, write_mistral, write_tekken
from tests.qserve.model.variants import TOKENS, logits, model_maker, relative
from tests.tiny_families import GROUPS, LATENT

__all__ = ["own_cache"]

PLAIN_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
VARIANTS = {
    "mistral small": ("MistralConfig", {"head_dim": 32, "sliding_window": None}),
    "ministral 3": (
        "Ministral3Config",
        {
            "head_dim": 32,
            "rope_parameters": {
                **PLAIN_YARN,
                "attention_factor": 1.0,
                "llama_4_scaling_beta": 0.6,
            },
        },
    ),
    "scaled attention": (
        "Ministral3Config",
        {
            **{"head_dim": 32, "tie_word_embeddings": True},
            "rope_parameters": {**PLAIN_YARN, "llama_4_scaling_beta": 0.0},
        },
    ),
    # Mistral Large 3: dense layers first, and no factor of attention
    "mistral large 3": (
        "Mistral4Config",
        {
            **LATENT,
            **{"q_lora_rank": 96, **GROUPS, "first_k_dense_replace": 1},
            "rope_parameters": {
                **PLAIN_YARN,
                "attention_factor": 1.0,
                "llama_4_scaling_beta": 0.6,
            },
        },
    ),
    "latent, scaled": (
        "Mistral4Config",
        {
            **LATENT,
            **{"q_lora_rank": 96, **GROUPS},
            "rope_parameters": {
                **PLAIN_YARN,
                **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.6},
            },
        },
    ),
}
NAMES = ("mistral", "ministral", "mixtral", *VARIANTS)


@pytest.fixture(scope="module")
def model_of(tiny_model, tmp_path_factory):
    return model_maker(tiny_model, tmp_path_factory, VARIANTS)


@pytest.fixture(scope="module")
def written(model_of, tmp_path_factory):
    """Name -> the same model in Mistral's files."""
    made = {}

    def write(name):
        if name not in made:
            target = tmp_path_factory.mktemp("mistral") / name.replace(" ", "-")
            made[name] = write_mistral(model_of(name), target)
        return made[name]

    return write


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(model_of, written, transformers_model, name):
    with torch.no_grad():
        want = transformers_model(model_of(name))(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(written(name)), want) < 1e-5


@pytest.mark.parametrize("name", ["mistral small", "ministral", "mistral large 3"])
def test_greedy_tokens_equal_those_of_transformers_files(model_of, written, name):
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 512) for _ in range(n)] for n in (9, 17, 26)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)

    def tokens(folder):
        llm = LLM(folder, device="cpu", max_model_len=64)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    assert tokens(written(name)) == tokens(model_of(name))


@pytest.mark.parametrize("name", ["mistral small", "mistral large 3", "mixtral"])
def test_quantized_files_are_those_of_transformers_files(model_of, written, tmp_path, name):
    """The output is the same, so it has transformers' names and order of rows."""
    states = []
    for number, source in enumerate((model_of(name), written(name))):
        target = tmp_path / f"out-{number}"
        scheme = Scheme.parse("w4a16-sym-g32")
        quantize_checkpoint(source, target, scheme=scheme, recipe="rtn", progress=False)
        states.append(load_file(target / "model.safetensors"))
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())
    assert not (target / "params.json").exists() and (target / "config.json").exists()


@pytest.mark.parametrize("name", ["mistral small", "mistral large 3"])
def test_nvfp4_of_llm_compressor(model_of, tmp_path, name):
    source = tmp_path / "nvfp4"
    quantize_checkpoint(
        model_of(name), source, scheme=Scheme.parse("w4a16-nvfp4"), recipe="rtn", progress=False
    )
    block = json.loads((source / "config.json").read_text())["quantization_config"]
    block["ignore"] = ["output", "re:.*gate$"]  # Mistral's names
    written = write_mistral(source, tmp_path / "mistral", quantization=block)
    packed = [n for n in load_file(written / "consolidated.safetensors") if "packed" in n]
    assert any(".wq" in each or "wkv" in each for each in packed)
    assert torch.equal(logits(written), logits(source))


@pytest.mark.parametrize("scheme, stated", [("TENSOR", "static"), ("NO_SCALES", "dynamic")])
def test_float8_with_a_scale_per_tensor(model_of, tmp_path, scheme, stated):
    source = tmp_path / "fp8"
    _write_float8(model_of("mistral small"), source, stated)
    block = {"qformat_weight": "fp8_e4m3", "qscheme_act": scheme}
    written = write_mistral(source, tmp_path / "mistral", quantization=block)
    assert "layers.0.attention.wq.qscale_weight" in load_file(written / "consolidated.safetensors")
    assert torch.equal(logits(written), logits(source))


def _write_float8(folder, target, activations):
    """Write a model in transformers' native float8 format."""
    from safetensors.torch import save_file

    target.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": activations,
        "modules_to_not_convert": ["lm_head"],
    }
    state = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            state[name] = tensor
            continue
        scale = tensor.abs().max() / 448
        module = name.removesuffix(".weight")
        state[name] = (tensor / scale).to(torch.float8_e4m3fn)
        state[f"{module}.weight_scale_inv"] = scale
        if activations == "static":
            state[f"{module}.activation_scale"] = torch.tensor(0.02)
    (target / "config.json").write_text(json.dumps(config))
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})


def test_text_and_chat_with_a_tekken_tokenizer(model_of, tmp_path):
    folder = write_mistral(model_of("mistral small"), tmp_path / "model")
    write_tekken(folder, 512)
    llm = LLM(folder, device="cpu", max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    output = llm.generate("what is", params, use_tqdm=False)[0]
    assert output.prompt_token_ids[0] == 1  # <s>
    chat = llm.chat([{"role": "user", "content": "what is"}], params, use_tqdm=False)[0]
    # <s>[INST]what is[/INST]
    assert chat.prompt_token_ids[:2] == [1, 3] and chat.prompt_token_ids[-1] == 4
    assert chat.prompt_token_ids[2:-1] == output.prompt_token_ids[1:]


def test_files_of_transformers_are_preferred(model_of, tmp_path):
    folder = write_mistral(model_of("mistral small"), tmp_path / "model")
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((model_of("mistral") / name).read_bytes())
    assert CheckpointReader(folder).folder == folder
    assert torch.equal(logits(folder), logits(model_of("mistral")))
