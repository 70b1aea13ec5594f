"""Traces: what overlaps counts once, all adds up to the span, steps and their gaps."""

import gzip
import json
import re
from pathlib import Path

import pytest

from formats.errors import InputError
from qserve.cli import main
from qserve.profile.chrome_trace import summarize
from qserve.profile.operator_classes import OTHER, class_of
from qserve.profile.report import difference, to_text, write_report

ROOT = Path(__file__).resolve().parents[3]


def kernel(name, start, duration, launch):
    args = {"correlation": launch}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": duration, "args": args}


def launch(number, at):
    args = {"correlation": number}
    return {"ph": "X", "cat": "cuda_runtime", "name": "x", "ts": at, "dur": 1, "args": args}


def step(name, start, duration):
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": duration}


EVENTS = [
    step("step 0 decode=1 chunk=0", 0, 10),
    step("step 1 decode=1 chunk=0", 10, 10),
    launch(1, 2),
    launch(2, 12),
    {"ph": "M", "name": "process_name"},
    kernel("_wna16_gemv_imma", 100, 50, 1),
    kernel("_paged_attention", 140, 30, 1),  # begins 10 us before the product has ended
    kernel("_wna16_gemv_imma", 190, 50, 2),
    kernel("_norm_rows", 240, 10, 2),
]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "case.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()))
    return path


def test_classes_and_gap_add_up_to_the_span(trace):
    found = summarize(trace)
    assert found.classes == {"products": (100, 2), "attention": (20, 1), "norms": (10, 1)}
    assert (found.span_us, found.busy_us, found.gap_us) == (150, 130, 20)
    assert found.step_gaps_us == [20] and len(found.step_names) == 2


def test_text_and_json(trace):
    text = write_report(trace, {"products": 25.0})
    assert "span 0.150 ms" in text and "between two steps: median 20.0 us" in text
    products = next(line for line in text.splitlines() if line.startswith("products"))
    assert products.split() == ["products", "100.0", "66.7", "50.0", "2", "50", "%"]
    content = json.loads((trace.parent / "case.trace.summary.json").read_text())
    shares = sum(each["pct"] for each in content["classes"].values())
    assert shares + 100 * content["gap_us"] / content["span_us"] == pytest.approx(100)


def test_difference_of_two_profiles(trace, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(json.dumps([*EVENTS, kernel("_norm_rows", 250, 30, 2)]))
    first = difference(summarize(trace), summarize(other)).splitlines()[1].split()
    assert first == ["+30.0", "10.0", "40.0", "1", "2", "_norm_rows"]


def test_nested_cpu_operators_count_once(tmp_path):
    def op(name, start, duration):
        return {"ph": "X", "cat": "cpu_op", "tid": 1, "name": name, "ts": start, "dur": duration}

    path = tmp_path / "cpu.json"
    path.write_text(json.dumps([op("aten::linear", 0, 10), op("aten::mm", 2, 6)]))
    found = summarize(path)
    assert found.classes == {"products": (10, 1)} and not found.on_device
    assert "CPU busy" in to_text(found)


def test_command_needs_no_gpu(trace, capsys):
    assert main(["profile", "--trace", str(trace), "--with-trace", str(trace)]) == 0
    shown = capsys.readouterr().out
    assert "products" in shown and "+0.0" in shown


def test_file_that_is_not_a_trace_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(InputError, match="chrome trace"):
        summarize(path)
    path.write_text('{"traceEvents": []}')
    with pytest.raises(InputError, match="neither kernels"):
        summarize(path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_wna16_small_m", "products"),
        ("_w8a8_sm90", "products"),
        ("nvjet_tst_128x64_64x9_1x2_h_bz_TNT", "products"),
        ("_decode_attention_8bit", "attention"),
        ("_prefill_attention", "attention"),
        ("_merge_splits", "attention"),
        ("_block_scores", "attention"),
        ("_rope_write_kv", "rope, KV"),
        ("_norm_steps", "norms"),
        ("_activate_steps", "activation"),
        ("_quantize_rows", "quantize"),
        ("_draw", "sampling"),
        ("_fill_drafts", "drafts"),
        ("_embed_norms_limbs", "norms"),
        ("_copy_words", "copies"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("something_new", OTHER),
    ],
)
def test_class_of_a_kernel(name, expected):
    assert class_of(name) == expected


CLASSES_OF_FOLDER = {
    "attention": {"attention", "rope, KV", "quantize"},
    "causal_conv": {"states"},
    "collective": {"communication"},
    "delta_net": {"states"},
    "drafts": {"drafts"},
    "latent": {"attention", "rope, KV"},
    "lora": {"adapters"},
    "mamba1": {"states"},
    "mamba2": {"states"},
    "moe": {"experts"},
    "rowwise": {"norms", "activation", "quantize"},
    "sampling": {"sampling"},
    "w8a8": {"products"},
    "wna16": {"products"},
}


@pytest.mark.parametrize("folder", CLASSES_OF_FOLDER)
def test_every_kernel_has_the_class_of_its_operation(folder):
    """Kernels by the calls that launch them."""
    texts = [file.read_text() for file in (ROOT / "qkernels" / folder).glob("*.py")]
    launched = {name for text in texts for name in re.findall(r"\blaunch\w*\(\s*(_\w+)", text)}
    found = {name: class_of(name) for name in launched}
    assert found and set(found.values()) <= CLASSES_OF_FOLDER[folder], found
