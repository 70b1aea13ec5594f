"""--lm-head-quantization: the head is rounded while it loads. transformers is the judge."""

import pytest
import torch
import transformers

from calibrate.pipeline import quantize_checkpoint
from formats.errors import InputError
from formats.in_memory.weights import round_to_nearest
from formats.scheme import Scheme
from qserve.config import EngineConfig
from qserve.engine.sizes import read_model
from qserve.engine.step.step_input import StepInput
from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams
from tests.qserve.model.variants import TOKENS, relative
from tests.qserve.parallel.in_threads import run_ranks
from tests.qserve.parallel.sharded import rank_runner, relative_error


def expected_logits(folder, scheme: str) -> torch.Tensor:
    """Logits by transformers, with a head that is rounded and dequantized."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    head = model.get_output_embeddings()
    spec = Scheme.parse(scheme).weight
    rounded = round_to_nearest(head.weight.detach(), spec, "lm_head").dequantize(torch.float32)
    head.weight = torch.nn.Parameter(rounded)  # replaces the parameter, so the embedding stays
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]


def logits(folder, **settings) -> torch.Tensor:
    return LLM(str(folder), device="cpu", max_model_len=64, **settings).logits(TOKENS)


@pytest.mark.parametrize("family", ["llama", "qwen3"])  # an own head, a tied one
@pytest.mark.parametrize("name", ["w8a16", "w4a16"])
def test_rounded_head_equals_transformers(family, name, tiny_model):
    folder = tiny_model(family)
    size = transformers.AutoConfig.from_pretrained(folder).hidden_size
    assert size % 64 == 0 and size % 128, "groups of 128 must not fit"
    found = logits(folder, lm_head_quantization=name)
    assert relative(found, expected_logits(folder, f"{name}-sym-g64")) < 1e-4
    assert relative(found, logits(folder)) > 1e-3, "rounding must matter"


def rank_logits(folder, communicator=None) -> torch.Tensor:
    with torch.inference_mode():
        runner = rank_runner(folder, communicator, lm_head_quantization="w8a16")
        runner.allocate_pages(4)
        params = SamplingParams()
        return runner.logits(StepInput.of_sequence(TOKENS, [1, 2], page_size=16, params=params))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_ranks_round_their_tokens_alone(family, tiny_model):
    folder = tiny_model(family)
    found = run_ranks(2, lambda communicator: rank_logits(folder, communicator))
    assert relative_error(found, rank_logits(folder)) < 1e-5


def test_random_weights_are_rounded(tiny_model):
    settings = {"load_format": "dummy", "device": "cpu", "max_model_len": 64}
    folder = str(tiny_model("llama"))
    rounded = LLM(folder, lm_head_quantization="w4a16", **settings).logits(TOKENS)
    difference = relative(rounded, LLM(folder, **settings).logits(TOKENS))
    assert 1e-3 < difference < 0.2


def test_head_that_is_quantized_is_refused(tiny_model, tmp_path):
    target = tmp_path / "quantized"
    scheme = Scheme.parse("w8a16-sym-g64")
    quantize_checkpoint(
        tiny_model("llama"),
        target,
        scheme=scheme,
        quantize_head=scheme,
        recipe="rtn",
        progress=False,
    )
    with pytest.raises(InputError, match=r"--lm-head-quantization: the head is quantized already"):
        logits(target, lm_head_quantization="w4a16")


def test_model_without_head_is_refused(tiny_model, tmp_path):
    config = transformers.AutoConfig.from_pretrained(tiny_model("llama"), num_labels=2)
    folder = tmp_path / "classifier"
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder)
    with pytest.raises(InputError, match=r"w8a16: the model has score.weight in place of a head"):
        read_model(EngineConfig(model=str(folder), lm_head_quantization="w8a16"))


def test_fallback_is_refused(tiny_model):
    with pytest.raises(InputError, match="--lm-head-quantization"):
        logits(tiny_model("llama"), model_impl="transformers", lm_head_quantization="w8a16")
