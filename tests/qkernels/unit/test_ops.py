"""Public operations: arguments that they refuse, and packages that importing them loads."""

import subprocess
import sys

import pytest
import torch

from formats.errors import InputError
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import round_to_nearest, with_activation
from formats.scheme import CHANNEL, ActivationSpec, QuantSpec, Scheme
from qkernels import dispatch, explain, ops
from qkernels.errors import KernelError
from qkernels.operands.codes import InputRounding
from tests.qkernels.flat_attention import paged_kv, run_attention

SILU = ops.ActSpec(kind="silu")
SPEC = QuantSpec(bits=4, symmetric=True, group_size=32)


SPEC_CHANNEL = QuantSpec(bits=8, symmetric=True, group_size=CHANNEL)


@pytest.fixture(scope="module")
def packed():
    return PackedWeight.from_float(torch.randn(32, 64), SPEC)


def loaded_after(statement: str) -> list[str]:
    """Which of the heavy packages a fresh Python has loaded after `statement`."""
    listing = "print(*[name for name in ('triton', 'transformers') if name in sys.modules])"
    command = [sys.executable, "-c", f"import sys; {statement}; {listing}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_import_loads_no_triton_and_no_transformers():
    assert loaded_after("import qkernels; qkernels.QuantLinear; qkernels.explain") == []


@pytest.mark.exhaustive
def test_cpu_path_loads_no_triton():
    layer = "qkernels.QuantLinear.from_float(torch.nn.Linear(64, 32), 'w4a16-sym-g32')"
    assert loaded_after(f"import torch, qkernels; {layer}(torch.ones(1, 64))") == []


def test_quantize_checks_its_arguments():
    x, rounding = torch.ones(2, 64), InputRounding(ActivationSpec(), None)
    static = ActivationSpec(dynamic=False, per="tensor")
    for spec, scale, match in (
        (static, None, "one number"),
        (ActivationSpec(), torch.tensor(1.0), "None"),
        (static, torch.ones(3), "scale"),
    ):
        with pytest.raises(KernelError, match=match):
            ops.quantize_input(x, spec, scale)
        with pytest.raises(KernelError, match=match):
            ops.activate(x, SILU, InputRounding(spec, scale))
    with pytest.raises(KernelError, match="2 dims"):
        ops.quantize_input(x[0], ActivationSpec())
    with pytest.raises(KernelError, match="even"):
        ops.activate(x[:, 1:], SILU, rounding)
    with pytest.raises(KernelError, match="residual"):
        ops.norm(x, x[:1], ops.NormSpec(weight_C=x[0], eps=1e-5), rounding)


def test_precomputed_codes_are_checked():
    scheme = Scheme.parse("w8a8")
    packed = with_activation(round_to_nearest(torch.randn(32, 64), scheme.weight), scheme, None)
    weight = ops.prepare_weight(packed, torch.float32)
    codes, scales = ops.quantize_input(torch.randn(3, 64), scheme.activation)
    assert ops.linear_codes(codes, scales, weight).shape == (3, 32)
    with pytest.raises(KernelError, match="int8"):
        ops.linear_codes(codes.float(), scales, weight)
    with pytest.raises(KernelError, match="scales"):
        ops.linear_codes(codes, scales[:2], weight)
    with pytest.raises(KernelError, match="codes"):
        ops.linear_codes(codes[:, :32], scales, weight)
    plain = ops.prepare_weight(round_to_nearest(torch.randn(32, 64), SPEC_CHANNEL), torch.float32)
    with pytest.raises(KernelError, match="8-bit inputs"):
        ops.linear_codes(codes, scales, plain)


def test_attention_dispatch_uses_rows_and_strides(monkeypatch):
    """32 query heads of 2 KV heads: a token is 16 rows of each KV head."""
    asked = []

    def spy(op, **problem):
        asked.append((problem["chunk"], problem["tma_pages"]))
        return lambda *_, **__: None

    monkeypatch.setattr(dispatch, "implementation", spy)
    strided = zeros(5, 16, 2, 20)[..., :16]  # 80 bytes from head to head
    shifted = zeros(5 * 16 * 2 * 16 + 1)[1:].view(5, 16, 2, 16)
    narrow = zeros(5, 16, 2, 18)[..., :16]  # 72 bytes
    q = zeros(3, 32, 16)
    for max_query_len, pages in ((2, None), (3, None), (3, strided), (3, shifted), (3, narrow)):
        changes = {} if pages is None else {"k_pages": ATTENTION["k_pages"], "v_pages": pages}
        run_attention(
            ops,
            *(ATTENTION | {"q": q} | changes).values(),
            scale=1.0,
            window=None,
            max_query_len=max_query_len,
            max_context_len=4,
        )
    assert asked == [(False, True), (True, True), (True, True), (True, False), (True, False)]


def test_kernel_requested_by_name(packed):
    assert ops.prepare_weight(packed, torch.float32).kernel == "dense"
    weight = ops.prepare_weight(packed, torch.float32, kernel="reference")
    assert weight.kernel == "reference"
    assert ops.linear(torch.ones(1, 64), weight).shape == (1, 32)
    with pytest.raises(KernelError, match="unknown to linear"):
        ops.prepare_weight(packed, torch.float32, kernel="marlin")
    with pytest.raises(KernelError, match=r"triton|cuda|float"):
        ops.prepare_weight(packed, torch.float32, kernel="w4a16")


def test_prepare_is_pure(packed):
    before = packed.words_NW.clone(), packed.scales_NG.clone()
    for kernel in ("dense", "reference"):
        ops.prepare_weight(packed, torch.bfloat16, kernel=kernel)
    assert torch.equal(before[0], packed.words_NW) and torch.equal(before[1], packed.scales_NG)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


def norm_spec(C, **different):
    return ops.NormSpec(weight_C=zeros(C), eps=1e-5, **different)


INT = torch.int32


ATTENTION = {
    "q": zeros(3, 4, 16),
    "k_pages": zeros(5, 16, 2, 16),
    "v_pages": zeros(5, 16, 2, 16),
    "block_tables": zeros(2, 2, dtype=INT),
    "query_starts": torch.tensor([0, 1, 3], dtype=INT),
    "context_lengths": torch.tensor([4, 2], dtype=INT),
}


def attend(**changes):
    options = {"scale": 1.0, "window": None, "max_query_len": 2, "max_context_len": 4}
    options |= {name: value for name, value in changes.items() if name not in ATTENTION}
    tensors = {name: changes.get(name, tensor) for name, tensor in ATTENTION.items()}
    return run_attention(ops, *tensors.values(), **options)


CODES = {name: zeros(5, 16, 2, 16, dtype=torch.int8) for name in ("k_pages", "v_pages")}


SCALES = {name: zeros(5, 16, 2) for name in ("k_scales", "v_scales")}


def write(codes=False, **changes):
    """rope_write_kv_ of two tokens; `changes` replaces arguments."""
    pages = CODES | SCALES if codes else {n: ATTENTION[n].clone() for n in CODES}
    arguments = {
        "q": zeros(2, 4, 16),
        "k": zeros(2, 2, 16),
        "v": zeros(2, 2, 16),
        "cos_sin": zeros(9, 16),
        "positions": zeros(2, dtype=INT),
        "slots": zeros(2, dtype=INT),
        "k_scales": None,
        "v_scales": None,
        "q_norm": None,
        "k_norm": None,
        **pages,
        **changes,
    }
    cache = paged_kv(*(arguments[name] for name in ("k_pages", "v_pages", "k_scales", "v_scales")))
    norms = {f"{name}_D": arguments[name] for name in ("q_norm", "k_norm")}
    heads = (arguments[name] for name in ("q", "k", "v", "cos_sin", "positions"))
    return ops.rope_write_kv_(*heads, cache, arguments["slots"], **norms)


def test_valid_attention_arguments_are_accepted():
    assert attend().shape == (3, 4, 16)
    assert attend(**CODES, **SCALES, soft_cap=30.0).shape == (3, 4, 16)
    assert write().shape == write(codes=True).shape == (2, 4, 16)


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: attend(q=zeros(3, 64)), "q"),
        (lambda: attend(q=zeros(3, 4, 16, dtype=torch.float64)), "q"),
        (lambda: attend(q=zeros(3, 3, 16)), "q"),
        (lambda: attend(k_pages=zeros(5, 16, 2, 8)), "k_pages"),
        (lambda: attend(v_pages=zeros(5, 16, 2, 16, dtype=torch.bfloat16)), "v_pages"),
        (lambda: attend(block_tables=zeros(2, 2, dtype=torch.int64)), "block_tables"),
        (lambda: attend(query_starts=zeros(2, dtype=INT)), "query_starts"),
        (lambda: attend(window=0), "window"),
        (lambda: attend(max_context_len=33), "max_context_len"),
        (lambda: attend(slopes_H=zeros(4, dtype=torch.float64)), "slopes"),
        (lambda: attend(slopes_H=zeros(2)), "slopes"),
        (lambda: attend(chunk_size=0), "chunk_size"),
        (lambda: attend(chunk_size=8, window=4), "chunk_size"),
        (lambda: attend(soft_cap=0.0), "soft_cap"),
        (lambda: attend(soft_cap=float("nan")), "soft_cap"),
        (lambda: attend(**CODES), "k_scales"),
        (lambda: attend(**SCALES), "k_scales"),
        (lambda: attend(**CODES, **SCALES | {"v_scales": None}), "v_scales"),
        (lambda: attend(**CODES, **SCALES | {"v_scales": zeros(5, 2, 16)}), "v_scales"),
        (lambda: attend(**CODES, **SCALES | {"k_scales": zeros(5, 16, 2).half()}), "k_scales"),
        (lambda: attend(**CODES | {"v_pages": ATTENTION["v_pages"]}, **SCALES), "v_pages"),
        (lambda: attend(k_pages=zeros(5, 16, 16, 2).transpose(2, 3)), "k_pages"),
        (lambda: write(codes=True, k_scales=None), "k_scales"),
        (lambda: write(**SCALES), "k_scales"),
        (lambda: write(codes=True, v_pages=ATTENTION["v_pages"]), "v_pages"),
        (lambda: write(k_pages=zeros(5, 16, 2, 16, dtype=torch.int16)), "k_pages"),
        (lambda: write(q_norm=zeros(16)), "norms"),
        (lambda: write(q_norm=zeros(16), k_norm=zeros(8)), "k_norm"),
        (lambda: write(v=zeros(2, 2, 8)), "v"),
        (lambda: write(slots=zeros(3, dtype=INT)), "slots"),
        (lambda: write(positions=zeros(3, dtype=INT)), "positions"),
        (lambda: ops.norm(zeros(2, 8), None, norm_spec(9)), "norm weight"),
        (lambda: ops.norm(zeros(2, 8), None, norm_spec(8, bias_C=zeros(8))), "norm bias"),
        (
            lambda: ops.norm(zeros(2, 8), None, norm_spec(8, kind="layer", bias_C=zeros(9))),
            "norm bias",
        ),
        (
            lambda: ops.norm(
                *(zeros(2, 8), zeros(2, 8), None), branch=ops.Branch(norm=norm_spec(9))
            ),
            "norm branch weight",
        ),
        (lambda: ops.norm(zeros(2, 8, dtype=INT), None, norm_spec(8)), "norm x"),
        (lambda: ops.norm(zeros(2, 8), zeros(3, 8), norm_spec(8)), "residual"),
        (lambda: ops.activate(zeros(2, 7), SILU), "activate x"),
        (
            lambda: ops.apply_rope(zeros(2, 1, 8), zeros(2, 1, 8), zeros(9, 10), zeros(2)),
            "cos_sin",
        ),
        (
            lambda: ops.apply_rope(zeros(2, 1, 8), zeros(2, 1, 8), zeros(9, 8), zeros(2)),
            "positions",
        ),
        (
            lambda: ops.write_kv_(
                zeros(2, 1, 8),
                zeros(2, 1, 8),
                paged_kv(zeros(4, 16, 2, 8), zeros(4, 16, 2, 8)),
                zeros(2),
            ),
            "k_pages",
        ),
        (
            lambda: ops.write_kv_(
                zeros(2, 1, 8),
                zeros(2, 1, 8),
                paged_kv(zeros(4, 16, 1, 8), zeros(4, 16, 1, 8)),
                zeros(2),
            ),
            "slots",
        ),
    ],
)
def test_invalid_arguments_are_refused(call, name):
    with pytest.raises(KernelError, match="expected|do not fit") as error:
        call()
    assert name in error.value.subject
    assert isinstance(error.value, InputError)


@pytest.mark.parametrize(
    "x, bias, name",
    [
        (zeros(2, 63), None, "linear x"),
        (zeros(2, 64, dtype=torch.bfloat16), None, "linear x"),
        (zeros(2, 64), zeros(31), "linear bias"),
        (zeros(2, 64), zeros(32, dtype=torch.bfloat16), "linear bias"),
    ],
)
def test_invalid_linear_arguments_are_refused(packed, x, bias, name):
    weight = ops.prepare_weight(packed, torch.float32)
    with pytest.raises(KernelError) as error:
        ops.linear(x, weight, bias)
    assert error.value.subject == name


def test_unknown_operation_error_lists_known_operations():
    with pytest.raises(KernelError, match="linear, paged_attention"):
        explain("conv", device="cpu", dtype=torch.float32)
