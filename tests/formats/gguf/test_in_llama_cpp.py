"""llama.cpp itself loads the GGUF files that are written, and computes the same model.

Runs where the package xllamacpp (prebuilt llama.cpp) is installed. With quantized weights llama.cpp
rounds activations to 8 bits, so its log-probabilities differ more there.
"""

import pytest
import torch

from calibrate.gguf_file import quantize_to_gguf
from formats.gguf.writing.export import export_gguf
from formats.scheme import Scheme
from qserve.llm import LLM

xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp: xllamacpp is not installed")

IDS = list(range(5, 45))
TOP = 20


def float_file(source, path):
    export_gguf(source, path)


def rounded_file(scheme):
    def make(source, path):
        parsed = Scheme.parse(scheme)
        quantize_to_gguf(
            source, path, scheme=parsed, recipe="rtn", quality_windows=0, progress=False
        )

    return make


def first_token(path):
    """llama.cpp's log-probabilities of the most likely first tokens, by id."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    request = {"prompt": IDS, "n_predict": 1, "temperature": 0, "n_probs": TOP}
    reply = server.handle_completions(request)
    (token,) = reply["choices"][0]["logprobs"]["content"]
    return {each["id"]: each["logprob"] for each in token["top_logprobs"]}


@pytest.mark.parametrize(
    ("make", "most"),
    [
        pytest.param(float_file, 0.02, id="float"),
        pytest.param(rounded_file("w8a16-sym-g32"), 0.3, id="q8_0"),
        pytest.param(rounded_file("w4a16-sym-g32"), 0.3, id="q4_0"),
    ],
)
def test_llama_cpp_computes_our_log_probabilities(docs_5m, tmp_path, monkeypatch, make, most):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = tmp_path / "model.gguf"
    make(docs_5m, path)
    theirs = first_token(path)
    logits = LLM(str(path), device="cpu", dtype="float32", max_model_len=64).logits(IDS)
    ours = torch.log_softmax(logits[-1].float(), -1)
    assert len(theirs) == TOP
    assert max(theirs, key=theirs.get) == int(ours.argmax())
    distance = max(abs(value - float(ours[token])) for token, value in theirs.items())
    assert distance < most
