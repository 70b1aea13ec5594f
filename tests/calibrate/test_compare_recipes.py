"""examples/compare_recipes.py: the table of recipes and tools, and the sets that it compares."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from examples import compare_recipes, other_quantizers
from examples.calibration_sets import as_chat, paragraphs, split
from formats.scheme import Scheme

ROOT = Path(__file__).parents[2]
RUNNING = "A sentence of running text, which is long enough to be a paragraph of its own. " * 3
DOCUMENT = f"""---
title: A document
---

# First heading

{RUNNING}

```python
{RUNNING}
```

Second heading
--------------

- {RUNNING}

{RUNNING.replace("A sentence", "Another one")}
"""


def test_documents_split_into_three_kinds_of_sets():
    found = split([DOCUMENT, "short"])
    prose = found["prose"][0]["text"]
    assert len(found["prose"]) == len(found["chat"]) == 1 and len(found["docs"]) == 2
    assert prose.count("A sentence") == 3 and prose.count("Another one") == 3
    assert not any(mark in prose for mark in ("```", "#", "title:", "- A"))
    messages = found["chat"][0]["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    assert [m["content"] for m in messages[::2]] == [
        "Explain: First heading",
        "Explain: Second heading",
    ]
    assert "```python" in messages[1]["content"] and "Another one" in messages[3]["content"]
    assert as_chat("no heading") is None and not paragraphs("# only a heading")


def row(recipe, text, perplexity, divergence, calibration="a"):
    measured = {"perplexity": perplexity, "divergence": divergence}
    return compare_recipes.Row(recipe=recipe, calibration=calibration, text=text, measured=measured)


def test_recipes_worse_than_rounding_are_marked():
    rows = [
        row("rtn", "wiki", 30.0, 0.3, "-"),
        row("rtn", "docs", 20.0, 0.2, "-"),
        row("gptq", "wiki", 29.0, 0.31),
        row("gptq", "docs", 19.0, 0.1),
        row("gptq", "docs", 21.0, 0.1, "b"),
        row("auto-round", "docs", 99.0, 9.0),
    ]
    assert compare_recipes.above_nearest(rows) == [
        "gptq on wiki, calibrated on a: divergence 0.3100, rtn 0.3000",
        "gptq on docs, calibrated on b: perplexity 21.0000, rtn 20.0000",
    ]
    assert "gptq" in compare_recipes.spread([*rows, row("gptq", "docs", 19.0, 0.2, "c")])


def test_listed_tools_equal_runnable_tools():
    assert list(compare_recipes.TOOLS) == list(other_quantizers.TOOLS)


@pytest.mark.parametrize("source", ["a file", compare_recipes.DEFAULT_TEXTS])
def test_tools_use_the_windows_of_quantize(docs_5m, tmp_path, source):
    if source == "a file":
        file = tmp_path / "texts.jsonl"
        lines = [json.dumps({"text": f"{number} {RUNNING}"}) for number in range(8)]
        source = str(file)
        file.write_text("\n".join(lines))
    written = compare_recipes.write_windows(tmp_path / "windows.json", docs_5m, source, 3, 32)
    ids_WS = torch.tensor(json.loads(written.read_text()))
    assert ids_WS.shape == (3, 32)
    flags = compare_recipes.calibration_flag(source)
    quantize_checkpoint(
        docs_5m,
        tmp_path / "out",
        scheme=Scheme.parse("w4a16-sym", 64),
        recipe="imatrix",
        calibration=flags[1] if flags else None,
        samples=3,
        sequence_length=32,
        quality_windows=0,
    )
    report = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    windows = CalibrationData(ids_WS=ids_WS, source=source, seed=0, warnings=())
    assert windows.sha256 == report["calibration"]["sha256"]


class Recorder:
    """A fake AutoRound that keeps its arguments and writes into a folder of its own."""

    def __init__(self, model, **options):
        self.model, self.options = model, options
        Recorder.last = self

    def quantize_and_save(self, output_dir, format):
        inner = Path(output_dir) / "model-w4g64"
        inner.mkdir(parents=True)
        (inner / "config.json").write_text(format)


def run_auto_round(monkeypatch, tmp_path, *flags):
    """Return the arguments that AutoRound gets from a command with these flags."""
    monkeypatch.setitem(sys.modules, "auto_round", SimpleNamespace(AutoRound=Recorder))
    windows, out = tmp_path / "windows.json", tmp_path / "-".join(["out", *flags])
    windows.write_text(json.dumps([[5, 0, 7, 0], [0, 1, 2, 3]]))
    command = ["auto-round", "MODEL", str(out), "--windows", str(windows), *flags]
    monkeypatch.setattr(sys, "argv", ["other_quantizers.py", *command])
    other_quantizers.main()
    assert (out / "config.json").read_text() == "auto_gptq"
    return Recorder.last.options


def test_auto_round_keeps_its_defaults(monkeypatch, tmp_path):
    options = run_auto_round(monkeypatch, tmp_path, "--device", "cuda", "--group-size", "64")
    assert not options.keys() & {
        *("iters", "enable_torch_compile", "batch_size", "lr"),
        "device_map",  # its default is the first GPU
    }
    assert (options["bits"], options["group_size"], options["sym"]) == (4, 64, True)
    assert (options["nsamples"], options["seqlen"]) == (2, 4)
    options = run_auto_round(monkeypatch, tmp_path, "--iterations", "7", "--bits", "2")
    assert (options["iters"], options["bits"]) == (7, 2)
    assert options["enable_torch_compile"] is False  # on a CPU
    assert options["device_map"] == "cpu"
    options = run_auto_round(monkeypatch, tmp_path, "--device", "cuda", "--no-compile")
    assert options["enable_torch_compile"] is False


def test_auto_round_attends_to_padding_tokens(monkeypatch, tmp_path):
    # Without a mask, AutoRound hides all tokens that equal the padding token, which ends turns.
    for batch in run_auto_round(monkeypatch, tmp_path)["dataset"]:
        assert batch["input_ids"].shape == batch["attention_mask"].shape == (1, 4)
        assert bool(batch["attention_mask"].all())


@pytest.mark.exhaustive
def test_command_prints_the_table(docs_5m, tmp_path):
    sets = []
    for name in ("first", "second"):
        sets.append(str(tmp_path / f"{name}.jsonl"))
        texts = [json.dumps({"text": f"{name} {number} {RUNNING}"}) for number in range(8)]
        Path(sets[-1]).write_text("\n".join(texts))
    text, result = tmp_path / "test.txt", tmp_path / "rows.json"
    text.write_text(RUNNING * 20)
    command = [sys.executable, "examples/compare_recipes.py", str(docs_5m), "--texts", str(text)]
    command += ["--calibration", *sets, "--recipes", "rtn", "gptq"]
    command += ["--schemes", "w8a8", "--distill", "rotate+gptq", "--steps", "3"]
    command += ["--tool", "auto-round=false", "--work", str(tmp_path / "work")]
    command += ["--samples", "4", "--sequence-length", "64", "--windows", "1", "--length", "128"]
    command += ["--json", str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(result.read_text())
    assert [(r["recipe"], r["calibration"]) for r in rows] == [
        ("rtn", "-"),
        ("gptq", "first.jsonl"),
        ("gptq", "second.jsonl"),
        ("w8a8", "first.jsonl"),
        ("w8a8", "second.jsonl"),
        ("rotate+gptq, distilled", "first.jsonl"),
        ("rotate+gptq, distilled", "second.jsonl"),
    ]
    assert rows[3]["divergence"] < rows[1]["divergence"]  # 8 bits are closer than 4
    assert all(row["divergence"] > 0 and row["text"] == "test.txt" for row in rows)
    assert "$ qserve quantize" in done.stdout and "least KL" in done.stdout
    assert "failed: auto-round, calibrated on" in done.stdout  # and the table continues
    command = [sys.executable, "-m", "qserve.cli", "eval", str(tmp_path / "work/gptq-1")]
    command += ["--against", str(docs_5m), "--text", str(text), "--windows", "1", "--json"]
    command += ["--sequence-length", "128", "--device", "cpu", "--dtype", "float32"]
    report = json.loads(
        subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    )
    for name in ("perplexity", "reference_perplexity", "divergence", "same_top_token", "tokens"):
        assert rows[2][name] == pytest.approx(report[name], rel=1e-5)
