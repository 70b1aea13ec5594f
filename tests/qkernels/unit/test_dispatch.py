"""Which kernel runs an operation, and why others do not."""

import importlib.metadata

import pytest
import torch

from formats.scheme import ActivationSpec, QuantSpec, Scheme
from qkernels import dispatch, explain
from qkernels import problem as problem_module
from qkernels.errors import KernelError
from qkernels.gpu import device
from qkernels.gpu import device as gpu_device
from qkernels.linear.rows import LINEAR
from qkernels.operations import OPERATIONS
from qkernels.problem import Problem
from qkernels.tuning import table as tuning_table
from qkernels.tuning.table import TuningRow
from qkernels.w8a8.config import W8A8Sm90Config, W8A8TritonConfig
from qkernels.w8a8.tuned import TUNED as W8A8
from qkernels.wna16.sm90_gemv_imma_config import GemvImmaConfig
from qkernels.wna16.sm90_large_m_config import LargeMConfig
from qkernels.wna16.tuned import TUNED as WNA16

SPEC = QuantSpec(bits=4, symmetric=True, group_size=32)


def linear_problem(**changes):
    problem = {"device": "cuda", "dtype": torch.bfloat16, "spec": SPEC}
    return problem | {"out_features": 32, "in_features": 64} | changes


def taken(explanation):
    return [choice.name for choice in explanation if choice.taken]


def test_explain_gives_chosen_row_and_reasons_for_others():
    explanation = explain("linear", **linear_problem())
    assert taken(explanation) == ["w4a16"]
    names = [choice.name for choice in explanation]
    weight_only = ["w4a16", "w8a16"]
    with_codes = ["sm90_w8a8", "triton_w8a8", "sm90_w4a8", "triton_w4a8"]
    cpu = ["cpu_w4a16", "cpu_w8a16", "cpu_w8a8", "cpu_w4a8"]
    rest = ["fixed_order", "dense", "reference"]
    assert names == [*weight_only, *with_codes, *cpu, *rest]
    assert all(choice.reason for choice in explanation)
    assert str(explanation).splitlines()[0].startswith("-> w4a16: supported")


def test_explain_says_which_variants_of_w4a16_run(monkeypatch):
    def variants(group, bits=4):
        spec = QuantSpec(bits=bits, symmetric=True, group_size=group)
        problem = linear_problem(spec=spec, in_features=256)
        return {each.name: each.reason for each in explain("linear", **problem).variants}

    monkeypatch.setattr(gpu_device, "lacks_arch", lambda device, arch: None)
    few = "up to 64 rows, adds adapters"
    assert variants(128)["sm90_small_m"] == few == variants(256)["sm90_small_m"]
    assert variants(128)["sm90_large_m"] == "many rows"
    assert variants(128, bits=8)["sm90_small_m"] == "takes 4 bits, not 8"
    assert variants(128, bits=8)["sm90_gemv_imma"] == "up to 4 rows, adds adapters"
    assert variants(64)["sm90_large_m"] == "takes groups divisible by 128, not 64"
    assert variants(64)["triton"] == "up to 1024 rows"
    monkeypatch.setattr(gpu_device, "lacks_arch", lambda device, arch: f"written for {arch}")
    others = variants(128)
    assert others["sm90_gemv_imma"] == others["sm90_large_m"] == "written for sm_90"
    assert others["triton"] == "up to 1024 rows"


def test_explain_says_for_how_many_rows_a_table_has_configs(monkeypatch):
    def reason(**changes):
        spec = QuantSpec(bits=4, symmetric=True, group_size=128)
        shape = {"out_features": 64, "in_features": 256} | changes
        return str(explain("linear", **linear_problem(spec=spec, **shape)))

    table = tuning_table.TuningTable(gpu="made up")
    tiles = {512: LargeMConfig(blocks=132), 3: GemvImmaConfig(), 4096: None}
    for M, tile in tiles.items():
        problem = {"N": 64, "K": 256, "group": 128, "bits": 4, "M": M}
        times = {"microseconds": 1.0, "default_microseconds": None}
        table.add_(TuningRow(op=WNA16, problem=problem, config=tile, **times))
    monkeypatch.setattr(tuning_table, "tuning_table_of", lambda device: table)
    monkeypatch.setattr(gpu_device, "lacks_arch", lambda device, arch: None)
    assert "measured" not in reason()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name, rows in (("sm90_gemv_imma", 4), ("sm90_large_m", 512), ("cublas", 4096)):
        line = next(line for line in reason().splitlines() if f" {name}: " in line)
        assert line.endswith(f"; measured on this GPU for up to {rows} rows")
    assert "measured" not in reason(in_features=512)


@pytest.mark.parametrize(
    "changes, kernel, reason",
    [
        ({"device": "cpu", "dtype": torch.float32}, "dense", "cpu"),
        ({"dtype": torch.float32}, "reference", "float32"),
        ({"spec": QuantSpec(bits=8, symmetric=True, group_size=32)}, "w8a16", "of 2 to 4 bits"),
        ({"spec": QuantSpec(bits=5, symmetric=True, group_size=32)}, "w8a16", "of 2 to 4 bits"),
        ({"spec": QuantSpec(bits=4, symmetric=True, group_size=16)}, "reference", "groups"),
        ({"out_features": 36}, "reference", "outputs"),
    ],
)
def test_refused_row_gives_reason(changes, kernel, reason):
    explanation = explain("linear", **linear_problem(**changes))
    assert taken(explanation) == [kernel]
    assert reason in explanation[0].reason


def w8a8_problem(**changes):
    scheme = Scheme.parse("w8a8")
    return linear_problem(spec=scheme.weight, activation=scheme.activation) | changes


@pytest.mark.parametrize("sm_90", [True, False])
def test_8_bit_activations_have_a_kernel(monkeypatch, sm_90):
    monkeypatch.setattr(gpu_device, "lacks_arch", lambda device, arch: None if sm_90 else "sm_80")
    for name in ("w8a8", "w8a8-static", "w8a8-fp8", "w8a8-fp8-static"):
        scheme = Scheme.parse(name)
        problem = w8a8_problem(spec=scheme.weight, activation=scheme.activation)
        want = "sm90_w8a8" if sm_90 else "triton_w8a8"
        assert taken(explain("linear", **problem)) == [want], name


@pytest.mark.parametrize("sm_90", [True, False])
def test_explain_says_for_how_many_rows_8_bit_products_have_configs(monkeypatch, sm_90):
    """Only configs of the kernel's own type count; it ignores those of the other kernel."""
    table = tuning_table.TuningTable(gpu="made up")
    tiles = {
        100: W8A8Sm90Config(num_consumers=1, block_b=64),
        3: W8A8Sm90Config(num_consumers=2, block_b=16),
    }
    tiles[1000] = W8A8TritonConfig(block_m=128, block_n=128)
    for M, tile in tiles.items():
        problem = {"N": 64, "K": 256, "integers": True, "M": M}
        times = {"microseconds": 1.0, "default_microseconds": None}
        table.add_(TuningRow(op=W8A8, problem=problem, config=tile, **times))
    monkeypatch.setattr(tuning_table, "tuning_table_of", lambda device: table)
    monkeypatch.setattr(gpu_device, "lacks_arch", lambda device, arch: None if sm_90 else "sm_80")

    def reason(name="w8a8", **changes):
        scheme = Scheme.parse(name)
        shape = {"out_features": 128, "in_features": 256, "device": "cuda"} | changes
        problem = w8a8_problem(spec=scheme.weight, activation=scheme.activation, **shape)
        return next(c.reason for c in explain("linear", **problem) if c.taken)

    assert reason(out_features=64) == "supported"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    rows = "up to 4 rows, up to 128 rows" if sm_90 else "up to 1024 rows"
    assert reason(out_features=64) == f"supported; configs measured on this GPU: {rows}"
    assert reason() == reason("w8a8-fp8", out_features=64) == "supported"
    assert reason("w8a8-fp8-block") == "supported"


@pytest.mark.parametrize(
    "lacks, changes, reason",
    [
        ("written for sm_90", {}, "sm_90"),
        (None, {"dtype": torch.float32}, "float32"),
        (None, {"in_features": 48}, "divisible by 32"),
    ],
)
def test_sm90_row_gives_refusal_reason(monkeypatch, lacks, changes, reason):
    monkeypatch.setattr(gpu_device, "lacks_arch", lambda device, arch: lacks)
    explanation = explain("linear", **w8a8_problem(**changes))
    row = next(c for c in explanation if c.name == "sm90_w8a8")
    assert not row.taken and reason in row.reason


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"in_features": 48}, "divisible by 32"),
        ({"out_features": 36}, "divisible by 8"),
        ({"in_features": 2**16}, "at most"),
        ({"activation": ActivationSpec(per="tensor")}, "for each tensor"),
        ({"activation": ActivationSpec(type="float")}, "both sides"),
        ({"spec": QuantSpec(bits=8, symmetric=True)}, "one scale for each output"),
    ],
)
def test_8_bit_row_gives_refusal_reason(changes, reason):
    problem = w8a8_problem(in_features=256) | changes
    explanation = explain("linear", **problem)
    assert taken(explanation) == ["reference"]
    assert reason in next(c for c in explanation if c.name == "triton_w8a8").reason


def test_rounding_refusal_gives_row_length_limit():
    problem = {"device": "cuda", "dtype": torch.bfloat16, "activation": ActivationSpec()}
    problem["form"] = "codes"
    for op, longest in (("quantize_input", 2**15), ("norm", 2**14)):
        assert taken(explain(op, **problem, in_features=longest)) == ["triton"]
        explanation = explain(op, **problem, in_features=longest + 32)
        assert taken(explanation) == ["reference"] and str(longest) in explanation[0].reason
    silu = problem | {"in_features": 2**15}
    assert taken(explain("activate", **silu)) == ["triton"]
    silu["dtype"] = torch.float32
    assert taken(explain("activate", **silu)) == ["reference"]


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({}, None),
        ({"in_features": 4096 + 64}, "divide the inputs"),
        ({"activation": ActivationSpec(type="float", per="group", group_size=48)}, "32, 64"),
    ],
)
def test_groups_of_inputs_are_rounded_by_a_kernel(changes, reason):
    problem = {"device": "cuda", "dtype": torch.bfloat16, "in_features": 4096}
    problem |= {"activation": ActivationSpec(type="float", per="group")} | changes
    explanation = explain("quantize_input", **problem)
    assert taken(explanation) == ["triton" if reason is None else "reference"]
    assert reason is None or reason in explanation[0].reason
    assert taken(explain("norm", **problem, form="codes")) == ["reference"], "not fused"


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({}, None),
        ({"in_features": 4096 + 32}, "divide the inputs"),
        ({"activation": ActivationSpec(per="group")}, "both sides"),
        ({"activation": ActivationSpec(type="float", per="group", group_size=64)}, "128 x 128"),
        ({"activation": ActivationSpec(type="float")}, "not blocks"),
    ],
)
def test_float8_in_blocks_has_a_kernel(changes, reason):
    scheme = Scheme.parse("w8a8-fp8-block")
    problem = w8a8_problem(spec=scheme.weight, activation=scheme.activation, in_features=4096)
    problem |= changes
    explanation = explain("linear", **problem)
    row = next(c for c in explanation if c.name == "triton_w8a8")
    if reason is None:
        assert taken(explanation)[0] in ("sm90_w8a8", "triton_w8a8")
    else:
        assert taken(explanation) == ["reference"] and reason in row.reason


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({}, None),
        ({"dtype": torch.float16, "head_dim": 80, "soft_cap": True}, None),
        ({"pages_dtype": torch.bfloat16}, None),
        ({"chunk": False}, "many rows"),
        ({"dtype": torch.float32}, "float32"),
        ({"pages_dtype": torch.int8}, None),
        ({"pages_dtype": torch.float8_e4m3fn, "dtype": torch.float16}, None),
        ({"pages_dtype": torch.float16}, "float16"),
        ({"head_dim": 256}, None),
        ({"head_dim": 264}, "264"),
        ({"head_dim": 256, "page_size": 128}, "128"),
        ({"head_dim": 256, "pages_dtype": torch.int8}, "8-bit"),
        ({"head_dim": 20}, "20"),
        ({"page_size": 8}, "8"),
        ({"tma_pages": False}, "16 bytes"),
        ({"alibi": True}, "ALiBi"),
        ({"chunked": True}, "chunked attention"),
        ({"device": "cpu"}, "cpu"),
    ],
)
def test_sm90_chunk_row_explains_portable_fallback(monkeypatch, changes, reason):
    pytest.importorskip("triton")
    monkeypatch.setattr(gpu_device, "lacks_arch", lambda device, arch: None)
    problem = {"device": "cuda", "dtype": torch.bfloat16, "head_dim": 128, "page_size": 16}
    row = explain("paged_attention", **problem | {"chunk": True} | changes)[0]
    assert row.name == "sm90_prefill" and row.taken == (reason is None)
    assert reason is None or reason in row.reason


def test_other_gpus_use_portable_attention(monkeypatch):
    pytest.importorskip("triton")
    problem = {"device": "cuda", "dtype": torch.bfloat16, "head_dim": 128, "page_size": 16}
    monkeypatch.setattr(gpu_device, "lacks_arch", lambda *_: "written for sm_90, not sm_80")
    rows = explain("paged_attention", **problem, chunk=True)
    assert taken(rows) == ["triton"] and "sm_80" in rows[0].reason


@pytest.mark.parametrize(
    "capability, version, reason",
    [
        ((9, 0), "3.6.0", None),
        ((9, 0), "3.10.1", None),
        ((9, 0), "3.5.1", "triton 3.6 and later, not 3.5.1"),
        ((8, 0), "3.6.0", "sm_90, not sm_80"),
        ((12, 0), "3.6.0", "sm_90, not sm_120"),
    ],
)
def test_gluon_requires_sm90_and_recent_triton(monkeypatch, capability, version, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(device, "arch", device.arch.__wrapped__)
    found = device.lacks_arch.__wrapped__(torch.device("cuda", 0), "sm_90")
    assert found is None if reason is None else reason in found
    assert "cpu" in device.lacks_arch.__wrapped__(torch.device("cpu"), "sm_90")


def test_missing_triton_is_a_refusal_reason(monkeypatch):
    monkeypatch.setattr(problem_module, "has_triton", lambda: False)
    for op in ("linear", "norm", "paged_attention"):
        explanation = explain(op, **linear_problem(head_dim=64, page_size=16))
        assert taken(explanation) == ["reference"]
        assert explanation[0].reason == "triton is not installed"


def test_every_row_has_its_module_and_function():
    pytest.importorskip("triton")
    import importlib

    for name, operation in OPERATIONS.items():
        functions = ("prepare_weight", "run") if name == "linear" else (name,)
        for row in operation.kernels:
            module = importlib.import_module(f"qkernels.{row.module}")
            assert all(callable(getattr(module, each)) for each in functions), (name, row.name)


def test_unknown_operation_error_lists_known_operations():
    with pytest.raises(KernelError, match="'rms_norm': unknown .known operations: linear, .*norm"):
        explain("rms_norm", device="cpu", dtype=torch.float32)


def test_dense_on_gpu_requires_explicit_request():
    problem = linear_problem(dtype=torch.float32)
    assert taken(explain("linear", **problem)) == ["reference"]
    assert taken(explain("linear", **problem, requested="dense")) == ["dense"]


@pytest.mark.parametrize("op", ["paged_attention", "write_kv_", "rope_write_kv_"])
def test_float8_pages_require_float8_gpu(monkeypatch, op):
    problem = {"device": "cuda", "dtype": torch.bfloat16, "head_dim": 64, "page_size": 16}
    problem["pages_dtype"] = torch.float8_e4m3fn
    monkeypatch.setattr(problem_module, "has_float8_products", lambda: True)
    assert taken(explain(op, **problem)) == ["triton"]
    monkeypatch.setattr(problem_module, "has_float8_products", lambda: False)
    explanation = explain(op, **problem)
    reason = next(choice.reason for choice in explanation if choice.name == "triton")
    assert taken(explanation) == ["reference"] and "sm_89" in reason
    assert taken(explain(op, **problem | {"pages_dtype": torch.int8})) == ["triton"]


def test_error_uses_requested_variant_name():
    """If several rows have such a variant, the error names each row and its reason."""
    asked = linear_problem(device="cpu", dtype=torch.float32, requested="cpu")
    message = "kernel 'cpu': cpu_w4a16 takes bfloat16.*; cpu_w8a8 takes activations rounded"
    with pytest.raises(KernelError, match=message):
        dispatch.choose(LINEAR, Problem(**asked))
    with pytest.raises(
        KernelError, match="kernel 'triton': runs on cuda, not on cpu .do not request"
    ):
        dispatch.choose(LINEAR, Problem(**asked | {"requested": "triton"}))
