"""The report: its numbers, its file, its table."""

import json
import re
from dataclasses import replace

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from calibrate.results import report_html
from calibrate.results.report import LinearReport
from formats.in_memory.packed import PackedWeight
from formats.scheme import Scheme

SCHEME = Scheme.parse("w4a16-sym-g32")


def measure(weight: torch.Tensor, packed: PackedWeight) -> LinearReport:
    return LinearReport.measure(weight, packed, SCHEME, name="up", seconds=0.5, num_bytes=100)


def test_errors_equal_norms_of_difference():
    weight = torch.zeros(32, 32)
    weight[0, 0], weight[5, 5] = 8.0, 3.25
    codes = torch.full((32, 32), 8)
    codes[0, 0], codes[5, 5] = 0, 11
    scales = torch.ones(32, 1).half()
    scales[0] = -1
    report = measure(weight, PackedWeight.from_codes(codes, scales, None, SCHEME.weight))
    assert report.largest_error == 0.25
    assert report.relative_error == pytest.approx(0.25 / (8.0**2 + 3.25**2) ** 0.5)
    assert (report.name, report.shape, report.scheme) == ("up", (32, 32), "w4a16-sym-g32")


def test_all_zero_weight_has_no_error_instead_of_nan():
    weight = torch.zeros(32, 32)
    report = measure(weight, PackedWeight.from_float(weight, SCHEME.weight))
    assert (report.relative_error, report.largest_error) == (0.0, 0.0)


def test_report_file_and_table(tiny_checkpoint):
    model = tiny_checkpoint()
    source = model.write()
    target = source.parent / "out"
    report = quantize_checkpoint(source, target, scheme=SCHEME, progress=False, quantizer="q:1")
    errors = [linear.relative_error for linear in report.linears]
    assert [linear.relative_error for linear in report.worst] == sorted(errors, reverse=True)[:5]
    lines = report.to_text().splitlines()
    (worst,) = (line for line in lines if line.startswith("worst: "))
    assert report.worst[0].name in worst.split(",")[0]
    assert report.loads_in.keys() == {"this project", "vLLM", "SGLang", "transformers"}
    answers = {
        "this project": ("yes", ""),
        "vLLM": ("no", "takes symmetric codes"),
        "SGLang": ("slow", "by a plain kernel"),
        "transformers": ("yes", "with gptqmodel"),
    }
    assert replace(report, loads_in=answers).to_text().splitlines()[-3:] == [
        "loads in: this project, transformers (with gptqmodel)",
        "vLLM: no: takes symmetric codes",
        "SGLang: slow: by a plain kernel",
    ]
    stored = json.loads((target / "quantization_report.json").read_text())
    assert stored == json.loads(json.dumps(report.to_dict()))
    assert stored["scheme"] == "w4a16-sym-g32"
    assert (stored["recipe"], stored["format"]) == ("rtn", "gptq")
    assert stored["versions"]["quantizer"] == "q:1"
    assert stored["versions"]["torch"] == torch.__version__
    assert stored["bytes_before"] == sum(tensor.nbytes for tensor in model.tensors.values())
    # 4 bits, a float16 scale and 4 bits of zero for 32 weights, 32 bits of g_idx for N weights
    shapes = [linear["shape"] for linear in stored["linears"]]
    bits = sum(n * k * (4 + 20 / 32) + 32 * k for n, k in shapes) / sum(n * k for n, k in shapes)
    assert stored["bits_per_weight"] == pytest.approx(bits)
    text = report.to_text()
    page = (target / "quantization_report.html").read_text()
    for linear in report.linears:
        assert linear.name in text and linear.name in page
    many = f"{len(shapes)} linears"
    assert len(shapes) > 1 and many in text and f"{source.name}: {many} as gptq" in page


def test_plots_have_one_line_per_linear():
    weight = torch.zeros(32, 32)
    packed = PackedWeight.from_float(weight, SCHEME.weight)
    names = {
        "model.layers.0.mlp.experts.0.up_proj": 2.0,
        "model.layers.0.mlp.experts.1.up_proj": 4.0,
        "model.layers.3.self_attn.q_proj": 6.0,
        "lm_head": 8.0,
    }
    linears = [
        replace(measure(weight, packed), name=name, relative_error=error / 100)
        for name, error in names.items()
    ]
    plot = report_html._mean_plot(
        report_html._by_place(linears), report_html._percent("relative_error")
    )
    assert re.findall(r"<title>(.*?)</title>", plot) == [
        "mlp.experts.up_proj, layer 0: 3",
        "self_attn.q_proj, layer 3: 6",
        "lm_head, layer 0: 8",
    ]
    at_3 = re.search(r'<circle cx="([\d.]+)"[^>]*><title>self_attn', plot)[1]
    assert float(at_3) == report_html.WIDTH - report_html.MARGIN
    linears = [replace(r, weight_absmax=e) for r, e in zip(linears, names.values(), strict=True)]
    largest = report_html._largest_plot(report_html._by_place(linears), "weight_absmax")
    assert "mlp.experts.up_proj, layer 0: 4<" in largest
