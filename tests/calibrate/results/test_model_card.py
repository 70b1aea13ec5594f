"""Model card and reports name the sources of a model, but no paths of the machine."""

import json

import pytest

from calibrate.pipeline import quantize_checkpoint
from calibrate.results.report import public_name
from formats.scheme import Scheme


def test_written_files_contain_no_local_paths(docs_5m, tmp_path):
    home = tmp_path / "home of somebody"
    home.mkdir()
    (home / "docs-5m").symlink_to(docs_5m)
    text = home / "texts.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 90)
    target = tmp_path / "out"
    report = quantize_checkpoint(
        home / "docs-5m",
        target,
        scheme=Scheme.parse("w4a16-sym"),
        recipe="imatrix",
        calibration=str(text),
        eval_text=str(text),
        samples=2,
        sequence_length=64,
        progress=False,
    )
    names = ("README.md", "quantization_report.json", "quantization_report.html", "quality.json")
    for name in names:
        written = (target / name).read_text()
        assert "docs-5m" in written and "texts.txt" in written, name
        assert "home of somebody" not in written and str(tmp_path) not in written, name
    assert "| made from | docs-5m |" in (target / "README.md").read_text()
    assert "home of somebody" not in report.to_text()
    assert json.loads((target / names[1]).read_text())["calibration"]["source"] == "texts.txt"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Llama-3-8B", "Llama-3-8B"),
        ("a/b/Llama-3-8B/", "Llama-3-8B"),
        ("hub/models--meta-llama--Llama-3-8B/snapshots/0123abc", "meta-llama/Llama-3-8B"),
        ("hub/models--gpt2/snapshots/0123abc", "gpt2"),
        ("hub/datasets--org--set/snapshots/0123abc/data/a.parquet", "org/set/data/a.parquet"),
        ("models--org--name", "models--org--name"),
    ],
)
def test_local_paths_become_public_names(path, name, tmp_path, monkeypatch):
    (tmp_path / path).mkdir(parents=True)
    assert public_name(tmp_path / path) == public_name(str(tmp_path / path)) == name
    monkeypatch.chdir(tmp_path / path)
    assert public_name(".") == name


def test_names_that_are_not_paths_are_unchanged():
    assert public_name("HuggingFaceH4/ultrachat_200k") == "HuggingFaceH4/ultrachat_200k"
    assert public_name("default texts") == "default texts"
