"""Fixtures of the kernel tests, and where these tests run.

unit/         plain Python and torch on the CPU
interpreter/  Triton kernels against torch; with a GPU they run compiled, marked gpu
compile/      machine code of the kernels for each architecture, without a GPU
gpu/          tests that need a GPU, marked gpu
fuzz/         problems drawn from a seed, run like those of interpreter/

Triton's interpreter must be chosen before triton is imported anywhere in the process. So without a
GPU, interpreter/test_interpreter.py runs the files that launch kernels in separate processes, and
they are not collected here. gpu/ is not collected either: unit/test_gpu_files.py imports its files.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from formats.in_memory.packed import PackedWeight
from formats.numerics.bits import pack
from formats.scheme import QuantSpec
from qkernels.gpu.device import lacks_arch
from tests.qkernels.parameter_pairs import diagonal, with_every_pair

ON_GPU = torch.cuda.is_available()
INTERPRETED = not ON_GPU and os.environ.get("TRITON_INTERPRET") == "1"

# why kernels in Gluon for sm_90 cannot run here, or None
LACKS_HOPPER = lacks_arch(torch.device("cuda", 0), "sm_90") if ON_GPU else "needs a GPU"


def launches_kernels(path: Path) -> bool:
    """Return True if a test file runs compiled on a GPU and interpreted elsewhere."""
    if path.parent.name == "fuzz":
        return path.name == "test_kernels.py"
    return path.parent.name == "interpreter" and path.name != "test_interpreter.py"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if ON_GPU or collection_path.suffix != ".py":
        return None
    runs_elsewhere = launches_kernels(collection_path) and not INTERPRETED
    return runs_elsewhere or collection_path.parent.name == "gpu" or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if INTERPRETED:
        left_to_gpus: set[pytest.Item] = set()
        for same_test in with_parameters(items):
            values = [values_of(item) for item in same_test]
            quick = diagonal(values)
            thorough = with_every_pair(values, quick)
            for item, own in zip(same_test, values, strict=True):
                if own not in thorough:
                    left_to_gpus.add(item)
                elif own not in quick:
                    item.add_marker(pytest.mark.exhaustive)
        config.hook.pytest_deselected(items=list(left_to_gpus))
        items[:] = [item for item in items if item not in left_to_gpus]
    for item in items:
        if ON_GPU and launches_kernels(item.path):
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("hopper"):
            item.add_marker(pytest.mark.gpu)
            if LACKS_HOPPER:
                item.add_marker(pytest.mark.skip(reason=LACKS_HOPPER))


def with_parameters(items: list[pytest.Item]) -> Iterable[list[pytest.Item]]:
    """The items of each test that launches kernels.

    The interpreter takes a second for what a GPU does in microseconds. A run has of each test as
    many items as show every value of every parameter, --exhaustive as many as show every two
    values of two parameters together, and a GPU all.
    """
    of_test: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        if launches_kernels(item.path) and hasattr(item, "callspec"):
            of_test.setdefault((item.path, item.originalname), []).append(item)
    return of_test.values()


def values_of(item: pytest.Item) -> tuple[str, ...]:
    """Return this item's value of each parametrization; "H, J" is one parametrization."""
    parameters = dict(item.callspec.params)
    values = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.split(",") if isinstance(names, str) else names
        values.append(repr([parameters.pop(name.strip()) for name in names]))
    return (*values, *map(repr, parameters.values()))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`half`: the 16-bit dtypes that run here. `dtype`: float32 as well."""
    # the interpreter has no bfloat16 arithmetic
    half = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16]
    for name, dtypes in (("half", half), ("dtype", [*half, torch.float32])):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, dtypes, ids=[str(d).removeprefix("torch.") for d in dtypes])


@pytest.fixture(scope="session", autouse=INTERPRETED)
def quick_interpreter():
    from tests.qkernels.quick_interpreter import patch

    with pytest.MonkeyPatch.context() as monkeypatch:
        patch(monkeypatch)
        yield


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


@pytest.fixture
def make_weight(device):
    """Random packed weights: signed scales, and where asymmetric zeros over the whole range."""

    def make(
        N: int, K: int, group: int, symmetric: bool = True, spread: float = 1, bits: int = 4
    ) -> PackedWeight:
        spec = QuantSpec(bits=bits, symmetric=symmetric, group_size=group)
        generator = torch.Generator().manual_seed(N + K)
        G = spec.num_groups(K)
        codes = torch.randint(0, 2**bits, (N, K), dtype=torch.uint8, generator=generator)
        scales = 2 ** (torch.rand(N, G, generator=generator) * spread - 8)
        scales *= torch.randint(0, 2, (N, G), generator=generator) * 2 - 1
        zeros = torch.full((N, G), spec.symmetric_zero, dtype=torch.uint8)
        if not symmetric:
            zeros = torch.randint(0, 2**bits, (N, G), dtype=torch.uint8, generator=generator)
            zeros[0], zeros[-1] = 0, spec.max_code
            codes[0], codes[-1] = spec.max_code, 0
        # from_codes would refuse N that GPTQ cannot pack; the kernel takes any multiple of 8
        return PackedWeight(
            words_NW=pack(codes, bits),
            scales_NG=scales.half(),
            zeros_NG=zeros,
            spec=spec,
            in_features=K,
        ).to(device)

    return make


@pytest.fixture
def poison(monkeypatch):
    """Every uninitialised tensor holds NaN, so an element that is never written shows."""

    def poisoned(create):
        def create_poisoned(*args, **kwargs):
            tensor = create(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return create_poisoned

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture
def assert_close():
    """Frobenius error of `got` relative to `want`; prints what it measured."""

    def check(name: str, want: torch.Tensor, got: torch.Tensor, ratio: float) -> None:
        assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, not {list(want.shape)}"
        want, got = want.double().cpu(), got.double().cpu()
        error = float((got - want).norm() / want.norm().clamp(min=1e-30))
        print(f"{name}: relative error {error:.2e}, allowed {ratio:.0e}")
        assert error <= ratio, f"{name}: relative error {error:.2e} over {ratio:.0e}"

    return check


@pytest.fixture
def tolerance():
    """Relative Frobenius error that a result in `dtype` may have: a few times its rounding."""
    return {torch.float16: 2e-3, torch.bfloat16: 5e-3, torch.float32: 2e-6}.__getitem__
