"""llama.cpp itself loads the GGUF files that are written, and computes the same model.

Its own quantizer makes K-quants with larger errors.

Runs where the package xllamacpp (prebuilt llama.cpp) is installed. With quantized weights llama.cpp
rounds activations to 8 bits, so its log-probabilities differ more there.
"""

import ctypes
from pathlib import Path

import pytest
import torch

from calibrate.gguf_file import quantize_to_gguf
from formats.gguf.block_types import BY_NAME
from formats.gguf.blocks import decode_rows
from formats.gguf.schemes import BLOCK_SCHEMES
from formats.gguf.writing.export import export_gguf
from formats.in_memory.k_weight import KWeight
from formats.names import GGUF_TYPES
from formats.scheme import Scheme
from qserve.llm import LLM

xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp: xllamacpp is not installed")

IDS = list(range(5, 45))
TOP = 20


def float_file(source, path):
    export_gguf(source, path)


def rounded_file(scheme):
    def make(source, path):
        parsed = scheme if scheme in GGUF_TYPES else Scheme.parse(scheme)
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
        *(
            pytest.param(rounded_file(name), 0.3, id=name)
            for name in ("q5_0", "q5_1", "q6_k", "q4_k_m", "q5_k_m")
        ),
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


def theirs(weight_NK, name, importance_K):
    """Weights after ggml's own quantizer."""
    (library,) = Path(xllamacpp.__file__).parent.glob("*.so")
    quantize = ctypes.CDLL(str(library)).ggml_quantize_chunk
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    quantize.argtypes = [ctypes.c_int, pointer, pointer, size, size, size, pointer]
    kind, (N, K) = BY_NAME[name.upper()], weight_NK.shape
    data = torch.zeros(N * kind.row_bytes(K), dtype=torch.uint8)
    given = None if importance_K is None else importance_K.data_ptr()
    quantize(kind.id, weight_NK.data_ptr(), data.data_ptr(), 0, N, K, given)
    return decode_rows(data, kind, K)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["q4_k", "q5_k", "q6_k"])
def test_k_quants_have_smaller_errors_than_llama_cpps(name, weighted):
    torch.manual_seed(2)
    weight_NK = torch.distributions.StudentT(4.0).sample((64, 512)) * 0.02
    importance_K = torch.rand(512).pow(4) * 10 + 1e-3 if weighted else None
    spec = BLOCK_SCHEMES[name].weight
    found = KWeight.from_float(weight_NK, spec, importance_K=importance_K).dequantize()
    errors = [
        float(((each - weight_NK).square() * (1 if importance_K is None else importance_K)).sum())
        for each in (found, theirs(weight_NK.contiguous(), name, importance_K))
    ]
    assert errors[0] < errors[1]
