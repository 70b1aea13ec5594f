"""Choice of a product's variant and input form, and what the caller may request."""

import itertools
from dataclasses import replace

import pytest
import torch

from formats.scheme import QuantSpec
from qkernels import ops
from qkernels.choice import parse_choice
from qkernels.errors import KernelError
from qkernels.operands.limbs import LimbForm
from qkernels.operations import explain
from qkernels.wna16.sm90_gemv_imma_config import GemvImmaConfig
from qkernels.wna16.sm90_large_m_config import LargeMConfig, large_m_config_fault
from qkernels.wna16.sm90_small_m_config import SmallMConfig, small_m_config_fault
from qkernels.wna16.triton_config import TritonGemmConfig
from qkernels.wna16.variants import NAMES, VARIANTS, Shape, default_config, variant_of

gemm = pytest.importorskip("qkernels.wna16.gemm", exc_type=ImportError)

H200 = 132
NO_SM90 = (("sm_90", "written for sm_90, not sm_80"),)


def chosen(M, N, K, fused, lacks=(), bits=4, group=128, choice=None):
    spec = QuantSpec(bits=bits, symmetric=True, group_size=group)
    shape = Shape(N=N, K=K, spec=spec, sm_count=H200, lacks=lacks)
    return default_config(shape, M, fused=fused, choice=parse_choice(choice))


def kind(*args, **options):
    config = chosen(*args, **options)
    return type(config), config.block_m if isinstance(config, SmallMConfig) else None


@pytest.mark.parametrize("M", [1, 4])
def test_few_rows_use_limbs_of_preceding_operation(M):
    for N, K in ((4096, 4096), (4096, 14336), (128256, 4096)):
        assert kind(M, N, K, fused=True) == (GemvImmaConfig, None)


def test_separate_limb_kernel_used_for_two_rows_or_large_weights():
    assert kind(2, 4096, 4096, fused=False) == (GemvImmaConfig, None)
    assert kind(3, 4096, 4096, fused=False) == (SmallMConfig, 8)
    assert kind(1, 4096, 14336, fused=False) == (SmallMConfig, 8), "making them takes long"
    for M in (1, 4):
        assert kind(M, 128256, 4096, fused=False) == (GemvImmaConfig, None)
        assert kind(M, 4096, 14336, fused=False, bits=8) == (GemvImmaConfig, None)


@pytest.mark.parametrize("M, rows", [(5, 8), (9, 16), (17, 32), (33, 64), (64, 64)])
@pytest.mark.parametrize("fused", [False, True])
def test_up_to_64_rows_use_small_m_kernel(M, rows, fused):
    for N, K in ((896, 896), (4096, 4096), (128256, 4096)):
        assert kind(M, N, K, fused) == (SmallMConfig, rows)
    assert kind(M, 4096, 4096, fused, bits=8)[0] is not SmallMConfig
    assert kind(65, 4096, 4096, fused)[0] is LargeMConfig


def test_other_gpus_and_group_sizes_use_triton_kernel():
    for M in (1, 8):
        assert kind(M, 28672, 4096, fused=True, lacks=NO_SM90) == (TritonGemmConfig, None)
        assert kind(M, 28672, 4096, fused=True, group=64) == (TritonGemmConfig, None)


def test_without_tma_x_is_loaded_through_pointers():
    spec = QuantSpec(bits=4, symmetric=True, group_size=128)
    for M in (17, 64, 256, 1024):
        with_tma, without = (
            default_config(
                Shape(N=4096, K=4096, spec=spec, sm_count=108, lacks=NO_SM90, has_tma=has_tma), M
            )
            for has_tma in (True, False)
        )
        warps = 8 if with_tma.block_m >= 64 else 4
        assert with_tma.use_tma and without == replace(with_tma, use_tma=False, warps=warps)


def test_requested_variant_is_chosen_if_supported():
    for name in (variant.name for variant in VARIANTS):
        for M in (1, 4, 5, 64, 65, 1024, 4096):
            got = variant_of(chosen(M, 4096, 4096, False, choice=name)).name
            alone = next(variant for variant in VARIANTS if variant.name == name)
            spec = QuantSpec(bits=4, symmetric=True, group_size=128)
            shape = Shape(N=4096, K=4096, spec=spec, sm_count=H200)
            runs = name == "cublas" or alone.default(shape, M, True) is not None
            assert (got == name) == runs, (name, M, got)


@pytest.mark.parametrize("sm_count", [16, 78, 132])
@pytest.mark.parametrize("bits", [4, 8])
def test_fixed_order_k_splits_do_not_depend_on_rows(bits, sm_count):
    for N, K in itertools.product((64, 576, 4096, 6144, 28672), (128, 1152, 4096, 14336)):
        spec = QuantSpec(bits=bits, symmetric=True, group_size=128)
        shape = Shape(N=N, K=K, spec=spec, sm_count=sm_count)
        choice = parse_choice("fixed_order")
        ranges = set()
        for M in (1, 8, 9, 17, 33, 64, 65, 128, 129, 300, 1024, 8000):
            config = default_config(shape, M, choice=choice)
            fault = (
                large_m_config_fault if isinstance(config, LargeMConfig) else small_m_config_fault
            )
            assert fault(config, M=M, N=N, K=K, group=128, bits=bits) is None, config
            ranges.add(config.split * getattr(config, "segments", 1))
            if isinstance(config, LargeMConfig) and config.split > 1:
                assert config.tiles(M, N) * config.split <= sm_count, "all are resident"
            if isinstance(config, SmallMConfig):
                assert config.scales_weights
        assert len(ranges) == 1, (N, K, ranges)


def test_forbidden_variant_is_never_chosen():
    for name in (variant.name for variant in VARIANTS):
        if name == "cublas":  # takes what no other can
            continue
        for M in (1, 2, 5, 64, 65, 300, 1024):
            assert variant_of(chosen(M, 4096, 4096, True, choice=f"-{name}")).name != name
    both = "-sm90_gemv_imma, -sm90_small_m"
    assert kind(3, 4096, 4096, fused=True, choice=both)[0] is TritonGemmConfig


def test_names_are_checked_and_explained(make_weight):
    problem = {
        "device": "cuda",
        "dtype": torch.bfloat16,
        "spec": QuantSpec(bits=4, symmetric=True, group_size=128),
        "out_features": 256,
        "in_features": 512,
    }
    reasons = {each.name: each.reason for each in explain("linear", **problem).variants}
    assert tuple(reasons) == NAMES
    asked = str(explain("linear", **problem, requested="triton,-sm90_small_m"))
    assert "forbidden by name" in asked and "requested, so used" in asked
    packed = make_weight(64, 256, 128).to("cpu")
    with pytest.raises(KernelError, match="'nonsense': unknown to linear.*sm90_small_m"):
        ops.prepare_weight(packed, torch.float32, kernel="nonsense")
    with pytest.raises(KernelError, match="runs on cuda, not on cpu"):
        ops.prepare_weight(packed, torch.bfloat16, "cpu", kernel="sm90_small_m")
    weight = ops.prepare_weight(packed, torch.float32, "cpu", kernel="-dense")
    assert weight.kernel == "reference"
    with pytest.raises(KernelError, match="except the excluded"):
        ops.prepare_weight(packed, torch.float32, "cpu", kernel="-dense,-reference")


@pytest.mark.parametrize(
    "config, form",
    [
        (GemvImmaConfig(), LimbForm(bits=4, with_sums=True)),
        (SmallMConfig(block_m=8), None),
        (TritonGemmConfig(block_m=16, block_n=64, split=1), None),
    ],
)
def test_variant_accepts_only_planned_input_form(monkeypatch, make_weight, config, form):
    """A replacement for the kernel records its input and config."""
    packed = make_weight(64, 256, 128, symmetric=False).to("cpu")
    weight = ops.prepare_weight(packed, torch.float16, "cpu", kernel="reference")
    weight = replace(weight, kernel="w4a16")
    plan = gemm.plan_for(config, weight.problem)
    assert plan.input == plan.operand == form and plan.output == "sum"
    handed = []

    class Kernel:
        @staticmethod
        def run(*given):
            handed.append(given)
            return torch.zeros(3, 64)

    monkeypatch.setattr(gemm, "_module", lambda variant: Kernel)
    x = torch.zeros(3, 256, dtype=torch.float16)
    ops.linear(x, weight, None, plan)  # made into limbs where the kernel takes them
    assert getattr(handed[0][0], "form", None) == form and handed[0][3] is config
    for asked in (LimbForm(bits=4, with_sums=True), LimbForm(bits=4)):
        limbs = ops.to_limbs(x, asked, kernel="reference")
        if asked == form:
            ops.linear(limbs, weight, None, plan)
            assert handed[-1] == (limbs, weight, None, config)
        else:
            with pytest.raises(KernelError, match="linear x: expected the form"):
                ops.linear(limbs, weight, None, plan)


@pytest.mark.parametrize(
    "config", [SmallMConfig(block_m=8), TritonGemmConfig(block_m=16, block_n=64, split=1)]
)
def test_only_the_small_m_kernel_leaves_partial_sums(monkeypatch, make_weight, config):
    """A table may say that another variant is faster on this GPU."""
    packed = make_weight(256, 512, 128).to("cpu")
    weight = ops.prepare_weight(packed, torch.float16, "cpu", kernel="reference")
    monkeypatch.setattr(gemm, "_config", lambda *problem: config)
    plan = gemm.plan(weight.problem, 8, "norm")
    assert (plan.output == "split_k") == isinstance(config, SmallMConfig)
    assert gemm.plan(weight.problem, 8).output == "sum"


def adapted_plan(monkeypatch, make_weight, M, sizes, bits=4, lacks=(), **options):
    """As plan_linear plans on an H200, of 512 inputs."""
    packed = make_weight(sum(sizes), 512, 128, bits=bits).to("cpu")
    weight = ops.prepare_weight(packed, torch.float16, "cpu", kernel="reference")
    weight = replace(weight, kernel=f"w{bits}a16", **options)
    shape = Shape(N=sum(sizes), K=512, spec=packed.spec, sm_count=H200, lacks=lacks)
    monkeypatch.setattr(gemm, "shape_of", lambda problem: shape)
    return ops.plan_linear(weight, M, "norm", adapted=sizes)


@pytest.mark.parametrize("M", [1, 4, 5, 64, 65])
def test_products_of_few_rows_add_adapters(monkeypatch, make_weight, M):
    """Limbs come with the tensor that adapters read, and other inputs are one."""
    plan = adapted_plan(monkeypatch, make_weight, M, (192, 64))
    assert plan.adds_adapters == (M <= 64)
    limbs = LimbForm(bits=4)
    assert plan.operand == (limbs if M <= 4 else None)
    assert plan.input == (replace(limbs, with_tensor=True) if M <= 4 else None)


def test_variants_without_adapters_use_separate_expand(monkeypatch, make_weight):
    plan = adapted_plan(monkeypatch, make_weight, 4, (96, 64))
    assert not plan.adds_adapters, "a tile of outputs would reach from one linear into the next"
    assert not adapted_plan(monkeypatch, make_weight, 8, (192, 64), lacks=NO_SM90).adds_adapters
    assert adapted_plan(monkeypatch, make_weight, 2, (192, 64), bits=8).adds_adapters
    assert not adapted_plan(monkeypatch, make_weight, 8, (192, 64), bits=8).adds_adapters
    order = torch.arange(512).flip(0)
    sorting = adapted_plan(monkeypatch, make_weight, 1, (192, 64), input_order=order)
    assert sorting.adds_adapters and sorting.input is None, "adapters read x as it is"


def test_other_kernels_add_no_adapters(make_weight):
    packed = make_weight(64, 256, 128).to("cpu")
    for kernel in ("reference", "dense"):
        weight = ops.prepare_weight(packed, torch.float32, "cpu", kernel=kernel)
        plan = ops.plan_linear(weight, 3, adapted=(64,))
        assert not plan.adds_adapters and plan.input is None


def test_preceding_operation_does_not_sort_inputs(monkeypatch, make_weight):
    packed = make_weight(64, 256, 128).to("cpu")
    weight = ops.prepare_weight(packed, torch.float16, "cpu", kernel="reference")
    sorting = replace(weight, kernel="w4a16", input_order=torch.arange(256).flip(0))
    monkeypatch.setattr(gemm, "_config", lambda *problem: GemvImmaConfig())
    plan = gemm.plan(sorting.problem, 1)
    assert plan.input is None and plan.operand == LimbForm(bits=4)
