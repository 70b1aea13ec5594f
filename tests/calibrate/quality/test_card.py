"""Quality card of a quantized folder: values equal transformers', and every command shows them."""

import hashlib
import json
import math

import pytest
import torch
from transformers import AutoTokenizer

from calibrate.pipeline import quantize_checkpoint
from calibrate.quality.card import command_line
from calibrate.quality.evaluation import HELD_OUT, HELD_OUT_LENGTH
from calibrate.texts.default_texts import DEFAULT_TEXTS
from calibrate.texts.documents import read_documents, read_texts
from examples.default_texts import ngrams
from formats.inspection.inspect import inspect_checkpoint
from formats.quality.record import QUALITY, read_quality
from formats.scheme import Scheme
from qserve.cli import build_parser


@pytest.fixture(scope="module")
def folder(docs_5m, tmp_path_factory):
    folder = tmp_path_factory.mktemp("card") / "w4"
    quantize_checkpoint(
        docs_5m, folder, scheme=Scheme.parse("w4a16-sym"), quality_windows=2, progress=False
    )
    return folder


def test_quality_values_equal_transformers(folder, docs_5m, transformers_model):
    measured = json.loads((folder / QUALITY).read_text())["measured"]
    tokenizer = AutoTokenizer.from_pretrained(docs_5m)
    ids = []
    for text in read_texts(HELD_OUT):
        ids += [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)]
    ids_WS = torch.tensor(ids[: 2 * HELD_OUT_LENGTH]).view(2, HELD_OUT_LENGTH)
    with torch.no_grad():
        p, q = (
            transformers_model(each)(ids_WS).logits[:, :-1].double().log_softmax(-1)
            for each in (docs_5m, folder)
        )
    divergence_WS = (p.exp() * (p - q)).sum(-1)
    assert measured["divergence"] == pytest.approx(float(divergence_WS.mean()), rel=1e-3)
    assert measured["same_top_token"] == pytest.approx(
        float((p.argmax(-1) == q.argmax(-1)).double().mean()), abs=2e-3
    )
    for name, logs in (("float_perplexity", p), ("perplexity", q)):
        nll = -float(logs.gather(-1, ids_WS[:, 1:, None]).mean())
        assert measured[name] == pytest.approx(math.exp(nll), rel=1e-4)
    digest = hashlib.sha256(ids_WS.numpy().astype("<i8").tobytes()).hexdigest()
    assert measured["sha256"] == digest


def test_quality_is_shown_in_readme_report_and_inspect(folder):
    text = read_quality(folder).to_text()
    assert "KL divergence" in text
    assert text in (folder / "README.md").read_text()
    assert text in (folder / "quantization_report.html").read_text().replace("&gt;", ">")
    inspection = inspect_checkpoint(folder)
    assert f"quality: {text}" in inspection.to_text()
    assert inspection.to_dict()["quality"]["windows"] == 2


def test_damaged_quality_file_is_an_inspect_warning(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / QUALITY).unlink()
    (tmp_path / QUALITY).write_text("{")
    problems = inspect_checkpoint(tmp_path).problems
    assert [p.severity for p in problems if QUALITY in p.subject] == ["warning"]


def test_model_without_tokenizer_is_quantized_without_quality(tiny_model, tmp_path, caplog):
    report = quantize_checkpoint(
        tiny_model("llama"),
        tmp_path / "w4",
        scheme=Scheme.parse("w4a16-sym-g32"),
        quality_windows=2,
        progress=False,
    )
    assert report.quality is None and "quality is not measured" in caplog.text
    quality = read_quality(tmp_path / "w4")
    assert quality.probe is None and quality.checksums and "not measured" in quality.to_text()


def test_held_out_texts_do_not_overlap_calibration_texts():
    """No 13 consecutive words are in both, the usual test for contamination."""
    held = set().union(*map(ngrams, read_texts(HELD_OUT)))
    assert len(held) > 2000
    shared = [text for text in read_documents(str(DEFAULT_TEXTS)) if ngrams(text) & held]
    assert not shared
    assert ngrams(read_texts(HELD_OUT)[0].upper()) & held


def test_command_repeats_the_settings():
    settings = {
        "scheme": "w4a16-sym",
        "bos": False,
        "ignore": ["a", "b"],
        "pad": True,
        "bits": None,
    }
    found = command_line("my/model", "/tmp/out", settings)
    assert found == (
        "qserve quantize my/model -o out --scheme w4a16-sym --no-bos --ignore a --ignore b --pad"
    )
    parsed = build_parser().parse_args(found.split()[1:])
    assert (parsed.bos, parsed.ignore, parsed.pad) == (False, ["a", "b"], True)
