"""Warm-up launches every kernel that serving can launch: by the plans, and on a GPU."""

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from formats.in_memory.packed import PackedWeight
from formats.scheme import QuantSpec, Scheme
from qkernels import ops
from qkernels.attention.config import default_attention_config, prefill_split
from qkernels.gpu import device as gpu_device
from qkernels.moe.experts import ExpertsProblem, PreparedExperts
from qkernels.moe.routing import SILU
from qkernels.tuning import table as tuning_table
from qkernels.tuning.table import TuningTable
from qkernels.warm_up import (
    compiled,
    decode_boundaries,
    experts_compiled,
    plan_boundaries,
    prefill_boundaries,
    row_boundaries,
)

gemm = pytest.importorskip("qkernels.wna16.gemm", exc_type=ImportError)

H200 = 132
BUDGET = 4096
SHAPES = {
    "8B qkv": (6144, 4096, "rope"),
    "8B o": (4096, 4096, "norm"),
    "8B gate_up": (28672, 4096, None),
    "8B down": (4096, 14336, "norm"),
    "0.5B qkv": (1152, 896, "rope"),
    "0.5B down": (896, 4864, "norm"),
}


@pytest.fixture
def on_an_h200(monkeypatch):
    """Plans as that GPU makes them; nothing is launched."""

    def weight(N, K, bits=4):
        spec = QuantSpec(bits=bits, symmetric=True, group_size=128)
        packed = PackedWeight(
            words_NW=torch.zeros(8, K * bits // 32, dtype=torch.int32),
            scales_NG=torch.ones(8, K // 128).half(),
            zeros_NG=torch.full((8, K // 128), 2 ** (bits - 1), dtype=torch.uint8),
            spec=spec,
            in_features=K,
        )
        prepared = gemm.prepare_weight(packed, torch.bfloat16)
        object.__setattr__(prepared, "out_features", N)
        prepared.__post_init__()
        shape = gemm.Shape(N=N, K=K, spec=spec, sm_count=H200)
        shapes[prepared.problem] = shape
        return prepared

    shapes = {}
    monkeypatch.setattr(gemm, "shape_of", lambda problem: shapes[problem])
    return weight


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_boundary_sizes_cover_every_m(on_an_h200, shape, bits):
    N, K, consumer = SHAPES[shape]
    weight = on_an_h200(N, K, bits)
    warmed = plan_boundaries(weight, BUDGET, consumer)
    kernels = {compiled(ops.plan_linear(weight, M, consumer), M) for M in warmed}
    assert len(warmed) == len(kernels), "each of them once"
    for M in range(1, BUDGET + 1):
        assert compiled(ops.plan_linear(weight, M, consumer), M) in kernels, M
    assert len({variant for variant, *_ in kernels}) >= 3


@pytest.mark.parametrize("sizes", [(4096, 14336, 8, 2), (2048, 768, 128, 8)])
@pytest.mark.parametrize("requested", [None, "-sm90_few_tokens"])
def test_boundary_sizes_cover_every_m_of_experts(monkeypatch, sizes, requested):
    """Also where pairs are looked through, by a kernel that has room for a power of two of them."""
    monkeypatch.setattr(gpu_device, "sm_count", lambda device: H200)
    monkeypatch.setattr(gpu_device, "shared_bytes", lambda device: 227 * 1024)
    monkeypatch.setattr(gpu_device, "lacks_arch", lambda device, arch: None)
    hidden, inner, num_experts, top_k = sizes
    problem = ExpertsProblem(
        kernel="triton",
        kind="packed",
        spec=QuantSpec(bits=4, symmetric=True, group_size=128),
        activation=None,
        num_experts=num_experts,
        routed_experts=num_experts,
        top_k=top_k,
        hidden=hidden,
        inner=inner,
        dtype=torch.bfloat16,
        device=torch.device("cuda", 0),
        requested=requested,
    )
    monkeypatch.setattr(tuning_table, "tuning_table_of", lambda device: TuningTable(gpu="none"))
    experts = PreparedExperts(gate_up=None, down=None, glu=SILU, problem=problem)
    warmed = plan_boundaries(experts, BUDGET)
    kernels = {experts_compiled(experts, M) for M in warmed}
    plans = {plan for plan, *_ in kernels}
    for M in range(1, BUDGET + 1):
        assert experts_compiled(experts, M) in kernels, M
    assert {"sorted", "few" if requested else "sm90_few_tokens"} == {p.variant for p in plans}


def test_decoder_rows_cover_rows_of_all_products(on_an_h200):
    products = [(on_an_h200(N, K), consumer) for N, K, consumer in SHAPES.values()]
    rows = row_boundaries(products, BUDGET, H200)
    assert rows == sorted(set(rows)) and rows[0] == 1 and rows[-1] == BUDGET
    for weight, consumer in products:
        kernels = {compiled(ops.plan_linear(weight, M, consumer), M) for M in rows}
        for M in range(1, BUDGET + 1):
            assert compiled(ops.plan_linear(weight, M, consumer), M) in kernels, M
    assert {129, 17, 2 * H200 + 1} <= set(rows), "of norms, of rounding"


ADAPTED = {(4096, 6144): (4096, 1024, 1024), (4096, 28672): (14336, 14336)}


@pytest.mark.exhaustive
def test_adapter_warm_up_rows_cover_every_kernel(on_an_h200):
    """Linears with adapters, fused into the product or not, and linears without."""
    products = [(on_an_h200(N, K), consumer) for N, K, consumer in list(SHAPES.values())[:4]]
    rows = row_boundaries(products, BUDGET, H200, adapted=ADAPTED)
    for weight, consumer in products:
        sizes = ADAPTED.get((weight.in_features, weight.out_features))
        options = {"fused": sizes is not None, "adapted": sizes}
        plans = {M: ops.plan_linear(weight, M, consumer, **options) for M in range(1, BUDGET + 1)}
        kernels = {compiled(plans[M], M) for M in rows}
        assert all(compiled(plan, M) in kernels for M, plan in plans.items())
        assert {plan.adds_adapters for plan in plans.values()} == {False, sizes is not None}


@pytest.mark.parametrize("page_element_size", [1, 2])
@pytest.mark.parametrize("heads", [(8, 4), (2, 7), (32, 1)])
def test_boundary_sizes_cover_every_decode_step(heads, page_element_size):
    fixed = {
        "num_kv_heads": heads[0],
        "heads_per_kv_head": heads[1],
        "head_dim": 128,
        "element_size": 2,
        "page_element_size": page_element_size,
        "window": None,
        "sm_count": H200,
        "gluon": page_element_size == 1,
    }

    def config(requests, count, keys):
        return default_attention_config(
            num_requests=requests, max_query_len=count, max_context_len=keys, **fixed
        )

    warmed = decode_boundaries(
        max_requests=256, max_tokens=BUDGET, max_context_len=8192, page_size=16, **fixed
    )
    configs = {config(*case) for case in warmed}
    assert len(configs) == len(warmed)
    for requests in (*range(1, 65), 100, 128, 200, 256):
        for count in range(1, 32 // heads[1] + 1):
            for keys in range(1, 8193, 157):
                assert config(requests, count, keys) in configs, (requests, count, keys)


@pytest.mark.parametrize("window", [None, 1024])
def test_boundary_sizes_cover_every_chunk(window):
    def split(tokens, keys):
        tiles = max(1, -(-tokens * 4 // 128)) * 8
        return prefill_split(tiles, min(keys, window or keys), H200)

    warmed = prefill_boundaries(
        max_tokens=BUDGET,
        max_context_len=32768,
        num_kv_heads=8,
        heads_per_kv_head=4,
        window=window,
        sm_count=H200,
    )
    splits = {split(*case) for case in warmed}
    assert len(splits) == len(warmed), "each of them once"
    for tokens in range(9, BUDGET, 61):
        for keys in range(tokens, 32768, 509):
            assert split(tokens, keys) in splits, (tokens, keys)


@pytest.fixture(scope="module")
def w8a8_5m(docs_5m, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "docs-5m-w8a8"
    scheme = Scheme.parse("w8a8")
    quantize_checkpoint(docs_5m, folder, scheme=scheme, recipe="rtn", progress=False)
    return folder


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("scheme", ["quantized_5m", "w8a8_5m"])
def test_no_kernel_compiles_after_the_warm_up(request, monkeypatch, scheme, enforce_eager):
    """Every number of tokens up to the budget, with and without decodes, and contexts of all
    lengths."""
    from triton.runtime.jit import JITFunction

    from qserve.engine.step.step_input import StepInput
    from qserve.llm import LLM

    folder = request.getfixturevalue(scheme)
    budget, longest = 1300, 1024
    llm = LLM(
        folder,
        device="cuda",
        max_model_len=longest,
        max_num_seqs=40,
        max_num_batched_tokens=budget,
        enforce_eager=enforce_eager,
    )
    names = []
    compile_one = JITFunction._do_compile

    def counted(kernel, *arguments, **options):
        names.append(kernel.fn.__name__)
        return compile_one(kernel, *arguments, **options)

    monkeypatch.setattr(JITFunction, "_do_compile", counted)
    runner = llm.engine.runner
    with torch.inference_mode():
        for tokens in range(1, longest + 1):
            step = StepInput.padding(
                num_requests=1, count=tokens, max_context_len=tokens, page_size=16
            )
            runner.launch(step).result()
        for requests in range(1, 41):
            for keys in (1, 16, 17, 100, 128, 129, 256, 500, 1000, 1024):
                for count in (1, 3, 32):
                    step = StepInput.padding(
                        num_requests=requests,
                        count=min(count, budget // requests),
                        max_context_len=max(keys, count),
                        page_size=16,
                    )
                    runner.launch(step).result()
    assert not names, sorted(set(names))
