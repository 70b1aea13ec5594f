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
from formats.checkpoint import CheckpointReader
from formats.gguf.block_types import BY_NAME
from formats.gguf.blocks import decode_rows
from formats.gguf.schemes import BLOCK_SCHEMES
from formats.gguf.writing.export import export_gguf
from formats.in_memory.k_weight import KWeight
from formats.names import GGUF_TYPES
from formats.scheme import Scheme
from qserve.llm import LLM
from tests.conftest import make_tiny
from tests.formats.gguf.cases import CASES, MORE_CASES
from tests.formats.gguf.first_tokens import IDS, TOP, first_token, write_tokenizer
from tests.tiny_families import TINY_FAMILIES

xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp: xllamacpp is not installed")


def float_file(source, path):
    export_gguf(source, path)


def rounded_file(scheme):
    def make(source, path):
        parsed = scheme if scheme in GGUF_TYPES else Scheme.parse(scheme)
        quantize_to_gguf(
            source, path, scheme=parsed, recipe="rtn", quality_windows=0, progress=False
        )

    return make


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
def test_llama_cpp_log_probabilities_are_equal(docs_5m, tmp_path, monkeypatch, make, most):
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


# families whose feed-forward has a GELU, which llama.cpp reads from a table of float16 numbers, and
# tiny models of Gemma 3n, whose sparse activations take another deviation there
LESS_EXACT = {"gpt_neox": 3e-3, "gemma3n": 0.02, "phi": 3e-3, "starcoder2": 3e-3}
# newer than the llama.cpp of the package
UNKNOWN = ("granite-swa",)


def check_architecture(case, folder):
    family, different, architecture = case
    if architecture in UNKNOWN:
        pytest.skip(f"the package's llama.cpp has no {architecture}")
    config_class, usual = TINY_FAMILIES[family]
    source = make_tiny(folder / "source", config_class, {**usual, **different})
    write_tokenizer(source)
    file = folder / "model.gguf"
    export_gguf(source, file)
    theirs = first_token(file, exact=True)
    # of tiny models with long and short factors of frequencies, both take the long ones
    llm = LLM(str(file), device="cpu", dtype="float32", max_model_len=64)
    ours = torch.log_softmax(llm.logits(IDS)[-1].float(), -1)
    assert len(theirs) == TOP
    assert max(theirs, key=theirs.get) == int(ours.argmax())
    distance = max(abs(value - float(ours[token])) for token, value in theirs.items())
    assert distance < LESS_EXACT.get(family, 1e-3)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_llama_cpp_logits_equal_for_architecture(case, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    check_architecture(case, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE_CASES.values(), ids=MORE_CASES)
def test_llama_cpp_logits_equal_for_other_architecture(case, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    check_architecture(case, tmp_path)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_llama_cpp_logits_equal_for_quantized_model(family, tmp_path, monkeypatch):
    """Matrices that are stored [inputs, outputs]; the three of attention in one; a head's name."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config_class, usual = TINY_FAMILIES[family]
    widths = {"hidden_size": 256, "n_embd": 256, "n_inner": 512, "intermediate_size": 512}
    source = make_tiny(tmp_path / "source", config_class, {**usual, **widths})
    write_tokenizer(source)
    file = tmp_path / "model.gguf"
    rounded_file("q4_k_m")(source, file)
    assert "Q4_K run packed" in CheckpointReader(file).gguf_summary
    theirs = first_token(file, exact=True)
    llm = LLM(str(file), device="cpu", dtype="float32", max_model_len=64)
    ours = torch.log_softmax(llm.logits(IDS)[-1].float(), -1)
    spread = float(ours.std())  # activations of 8 bits
    assert max(abs(value - float(ours[token])) for token, value in theirs.items()) < spread / 4


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
def test_k_quant_error_is_below_llama_cpp(name, weighted):
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
