"""GGUF files that are written: codes unchanged, read by gguf-py's rules, and as their source."""

import json
import struct

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.convert import convert_checkpoint
from formats.errors import InputError
from formats.gguf.container import read_gguf
from formats.gguf.writing.export import export_gguf
from formats.scheme import Scheme
from qserve.cli import main
from qserve.llm import LLM
from qserve.text.tokenizer import Tokenizer

IDS = list(range(5, 45))
# tiny models whose windows and scales GGUF can state
FAMILIES = (
    *("llama", "mistral", "qwen3", "granite", "seed_oss", "olmo2", "olmo3", "exaone4", "glm4"),
    *("mixtral", "qwen3_moe", "starcoder2", "nemotron", "cohere"),
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Use a new home folder, which holds the cache of GGUF files."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def quantized(docs_5m, tmp_path):
    """quantized(scheme, format) -> the bundled model, rounded to nearest."""

    def make(scheme, form="gptq"):
        folder = tmp_path / f"{scheme}-{form}"
        quantize_checkpoint(
            docs_5m,
            folder,
            scheme=Scheme.parse(scheme),
            output_format=form,
            quality_windows=0,
            progress=False,
        )
        return folder

    return make


def same_tensors(first, second):
    found, want = CheckpointReader(first).entries, CheckpointReader(second).entries
    assert found.keys() == want.keys()
    for name in want:
        assert torch.equal(found[name].read(), want[name].read()), name


@pytest.mark.parametrize("scheme", ["w4a16-sym-g32", "w8a16-sym-g32"])
def test_gptq_to_gguf_and_back_changes_no_bit(quantized, tmp_path, scheme):
    source, file = quantized(scheme), tmp_path / "model.gguf"
    assert main(["convert", str(source), str(file), "--format", "gguf"]) == 0
    convert_checkpoint(file, tmp_path / "back", "gptq")
    same_tensors(tmp_path / "back", source)


def test_groups_longer_than_a_block_repeat_scales(quantized, tmp_path):
    """Groups of 128 with one scale are four blocks with the same one."""
    source, file = quantized("w4a16-sym"), tmp_path / "model.gguf"
    export_gguf(source, file)
    found = LLM(str(file), device="cpu", dtype="float32", max_model_len=64).logits(IDS)
    want = LLM(str(source), device="cpu", dtype="float32", max_model_len=64).logits(IDS)
    assert torch.allclose(found, want, atol=1e-4, rtol=0)


def test_block_bytes_equal_handmade(quantized, tmp_path):
    """Bytes of the first row of v, whose rows are not reordered, by hand."""
    source, file = quantized("w4a16-sym-g32", "compressed-tensors"), tmp_path / "model.gguf"
    export_gguf(source, file)
    stored = read_gguf(file).tensors["blk.0.attn_v.weight"]
    assert stored.type.name == "Q4_0"
    data = file.read_bytes()[stored.offset : stored.offset + 18]
    reader, name = CheckpointReader(source), "model.layers.0.self_attn.v_proj"
    scale = reader.get(f"{name}.weight_scale")[0, 0]
    assert struct.unpack("<e", data[:2])[0] == float(scale)
    words = [word & 0xFFFFFFFF for word in reader.get(f"{name}.weight_packed")[0, :4].tolist()]
    codes = [word >> 4 * i & 15 for word in words for i in range(8)]
    assert [byte & 15 for byte in data[2:]] + [byte >> 4 for byte in data[2:]] == codes


@pytest.mark.parametrize("scheme", ["q4_0", "q4_1", "q8_0"])
def test_quantize_output_file_equals_scheme(docs_5m, tmp_path, capsys, scheme):
    file = tmp_path / f"{scheme}.gguf"
    flags = ["--scheme", scheme, "--recipe", "rtn", "--quality-windows", "0"]
    assert main(["quantize", str(docs_5m), "-o", str(file), *flags]) == 0
    assert "llama.cpp" in capsys.readouterr().out
    assert [each.name for each in tmp_path.iterdir() if each.name != "home"] == [file.name]
    types = {each.type.name for each in read_gguf(file).tensors.values()}
    assert types == {"F32", "Q8_0", scheme.upper()}
    found = LLM(str(file), device="cpu", max_model_len=64).logits(IDS)
    want = LLM(str(docs_5m), device="cpu", max_model_len=64).logits(IDS)
    assert 0 < float((found - want).norm() / want.norm()) < (0.02 if scheme == "q8_0" else 0.3)


def test_minima_beyond_float16_are_refused_by_convert(quantized, tmp_path):
    source, file = quantized("w4a16-asym-g32", "compressed-tensors"), tmp_path / "model.gguf"
    with pytest.raises(InputError, match="minima: are not all float16 numbers"):
        export_gguf(source, file)
    assert not [each for each in tmp_path.iterdir() if "model.gguf" in each.name]


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_family_round_trips(tiny_model, tmp_path, family):
    read_back(tiny_model(family), tmp_path / "tiny.gguf")


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES[2:])
def test_other_family_round_trips(tiny_model, tmp_path, family):
    read_back(tiny_model(family), tmp_path / "tiny.gguf")


def read_back(source, file):
    """Names, order of rows, norms, rotation and windows: the file computes as its source."""
    export_gguf(source, file)
    found, want = CheckpointReader(file), CheckpointReader(source)
    assert found.entries.keys() == want.entries.keys()
    for name in want.entries:
        assert torch.allclose(found.get(name).float(), want.get(name).float(), atol=1e-6, rtol=0)
    logits = [
        LLM(str(each), device="cpu", dtype="float32", max_model_len=64).logits(IDS)
        for each in (file, source)
    ]
    assert torch.allclose(*logits, atol=1e-4, rtol=0)


def test_tokenizer_and_template_are_in_the_file(docs_5m, tmp_path):
    file = tmp_path / "model.gguf"
    export_gguf(docs_5m, file)
    found, want = Tokenizer(file), Tokenizer(docs_5m)
    for text in ("Ownership in Rust's model", "1234 été 🦕\n\n  x", "<s>a</s>"):
        assert found.encode(text) == want.encode(text)
    messages = [{"role": "user", "content": "What is a borrow?"}]
    assert found.render_chat(messages) == want.render_chat(messages)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["OPTForCausalLM"]}, "OPTForCausalLM: cannot be written as GGUF"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' cannot be stored"),
    ],
)
def test_model_unsupported_by_gguf_is_refused(docs_5m, tmp_path, change, words):
    folder = tmp_path / "changed"
    folder.mkdir()
    for path in docs_5m.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((docs_5m / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(InputError, match=words):
        export_gguf(folder, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_codes_without_quantization_config_are_refused(quantized, tmp_path):
    folder = quantized("w4a16-sym-g32")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").unlink()
    words = r"config.json: has no quantization_config, but model\.layers\.0\.mlp\.down_proj is"
    with pytest.raises(InputError, match=words):
        export_gguf(folder, tmp_path / "model.gguf")


def test_scheme_without_blocks_and_taken_name_are_refused_early(docs_5m, tmp_path, capsys):
    taken = tmp_path / "taken.gguf"
    taken.touch()
    for arguments, words in (
        (["-o", str(tmp_path / "a.gguf"), "--scheme", "w8a8"], "w8a8: has no lossless form"),
        (["-o", str(taken), "--scheme", "q4_0"], "taken.gguf: exists already"),
        (["-o", str(tmp_path / "folder"), "--scheme", "q4_0"], "ends in .gguf"),
        (["-o", "x", "--scheme", "q4_0", "--format", "gptq"], "q4_0: is a type of GGUF files"),
    ):
        form = [] if "q4_0" in arguments else ["--format", "gguf"]
        assert main(["quantize", str(docs_5m), *arguments, *form]) == 1
        assert words in capsys.readouterr().err
