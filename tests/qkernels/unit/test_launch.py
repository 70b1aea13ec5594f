"""Launches that skip Triton's lookup: arguments with the same key are the same to Triton."""

import inspect
import itertools
from typing import NamedTuple

import pytest
import torch

from qkernels.gpu import device, launch

triton = pytest.importorskip("triton")
descriptors = pytest.importorskip("qkernels.gpu.tma")

WIDE = 2**31


class Struct(NamedTuple):
    pointer: object
    n: int


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.calls.append(("compiled", grid, arguments))


class Kernel:
    """A kernel that launches nothing and records how it was called."""

    def __init__(self, body):
        self.signature = inspect.signature(body)
        self.calls = []

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.calls.append(("triton", grid, arguments, constants))
            return Compiled(self)

        return run

    @property
    def ways(self):
        return [call[0] for call in self.calls]


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_COMPILED", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel(lambda x_ptr, y_ptr, n, scale, BLOCK, STAGES=3: None)


def tensor(dtype=torch.float16, offset=0):
    return torch.zeros(64, dtype=dtype)[offset:]


def test_equal_key_launch_reuses_compiled_kernel(kernel):
    x, other = tensor(), tensor()
    launch.launch(kernel, (5,), x, None, 17, 0.5, BLOCK=128, num_warps=4)
    launch.launch(kernel, (7, 2), other, None, 33, 2.5, BLOCK=128, num_warps=4)
    assert kernel.calls[0] == ("triton", (5,), (x, None, 17, 0.5), {"BLOCK": 128, "num_warps": 4})
    way, grid, arguments = kernel.calls[1]
    assert way == "compiled" and grid[:3] == (7, 2, 1)
    # options are no parameters; a constant that is not given has its default
    assert arguments[0] is other and arguments[1:] == (None, 33, 2.5, 128, 3)


def test_parameter_and_tensor_share_a_key(kernel):
    for x in (tensor(), torch.nn.Parameter(tensor()), tensor()):
        launch.launch(kernel, (5,), x, BLOCK=128)
    assert kernel.ways == ["triton", "compiled", "compiled"]


CHANGES = {
    "dtype": ({"x": tensor(torch.bfloat16)}, {}),
    "no tensor": ({"x": None}, {}),
    "a tensor where there was none": ({"y": tensor()}, {}),
    "divisible by 16": ({"n": 48}, {}),
    "one": ({"n": 1}, {}),
    "constant": ({}, {"BLOCK": 64}),
    "another constant": ({}, {"STAGES": 2}),
    "option": ({}, {"num_warps": 8}),
    "another option": ({}, {"launch_pdl": True}),
    "kind": ({"scale": None}, {}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_different_key_launch_compiles_and_keeps_both(kernel, change):
    first = ({"x": tensor(), "y": None, "n": 17, "scale": 0.5}, {"BLOCK": 128, "num_warps": 4})
    second = tuple(old | new for old, new in zip(first, CHANGES[change], strict=True))
    for arguments, constants in (first, second, first, second):
        launch.launch(kernel, (1,), *arguments.values(), **constants)
    assert kernel.ways == ["triton", "triton", "compiled", "compiled"]


def test_other_device_or_kernel_compiles_separately(kernel, monkeypatch):
    x = tensor()
    launch.launch(kernel, (1,), x, BLOCK=1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch.launch(kernel, (1,), x, BLOCK=1)
    other = Kernel(lambda x_ptr, BLOCK: None)
    launch.launch(other, (1,), x, BLOCK=1)
    assert kernel.ways == ["triton"] * 2 and other.ways == ["triton"]


def test_struct_fields_are_distinguished_like_arguments(kernel):
    x = tensor()
    structs = [Struct(x, 17), Struct(tensor(), 33), Struct(x, 16), Struct(None, 17)]
    for struct in structs:
        launch.launch(kernel, (1,), x, struct, BLOCK=1)
    assert kernel.ways == ["triton", "compiled", "triton", "triton"]
    assert kernel.calls[1][2][1] is structs[1], "the struct itself is passed on"


class Subclass(torch.Tensor):
    """It may have another address, type or size than it says."""


UNTOLD = {
    "address": tensor(offset=1),
    "wide": WIDE,
    "wide and negative": -WIDE - 1,
    "bool": True,
    "unknown": object(),
    "tensor of a subclass": torch.zeros(8).as_subclass(Subclass),
}


@pytest.mark.parametrize("argument", UNTOLD)
def test_unknown_argument_types_use_triton_launch(kernel, argument):
    for _ in range(2):
        launch.launch(kernel, (1,), UNTOLD[argument], BLOCK=1)
    assert kernel.ways == ["triton"] * 2


def test_interpreter_launch_is_unchanged(kernel, monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", True)
    for _ in range(2):
        launch.launch(kernel, (1,), tensor(), BLOCK=1)
    assert kernel.ways == ["triton"] * 2


def test_plain_launch_mode_uses_triton(kernel, monkeypatch):
    monkeypatch.setattr(launch, "settle_cache_keys", None)  # a plain launch patches nothing
    launch.set_plain_launches(True)
    try:
        for n in (17, 33):
            launch.launch(kernel, (5,), tensor(), None, n, 0.5, BLOCK=128, num_warps=4)
    finally:
        launch.set_plain_launches(False)
    assert kernel.ways == ["triton"] * 2
    assert kernel.calls[1][3] == {"BLOCK": 128, "num_warps": 4}


def test_fast_launches_return_after_plain_ones(kernel):
    x = tensor()
    for plain in (False, True, False):
        launch.set_plain_launches(plain)
        launch.launch(kernel, (1,), x, BLOCK=1)
    assert kernel.ways == ["triton", "triton", "compiled"]


def matrix(rows, columns, dtype=torch.bfloat16):
    return torch.zeros(rows, columns, dtype=dtype)


def portable(tensor, block):
    from triton.tools.tensor_descriptor import TensorDescriptor

    return descriptors.describe(TensorDescriptor, tensor, block)


def gluon(tensor, block):
    names = pytest.importorskip("qkernels.gpu.gluon_compat")
    return names.descriptor(tensor, list(block))


@pytest.mark.parametrize("describe", [portable, gluon])
def test_descriptor_keys_differ_with_tensors(describe):
    first, second = matrix(64, 128), matrix(64, 128)
    one, two = describe(first, (32, 64)), describe(second, (32, 64))
    assert one.base is first and two.base is second, "like descriptors share no tensor"
    assert one.kind is two.kind and (one.shape, one.strides) == ((64, 128), (128, 1))
    assert one.block_shape == [32, 64]
    wider = describe(matrix(32, 256), (32, 64))
    assert wider.kind is one.kind and wider.shape == (32, 256) and wider.strides == (256, 1)
    assert describe(first, (16, 64)).kind is not one.kind
    assert describe(matrix(64, 128, torch.float16), (32, 64)).kind is not one.kind
    # what TMA cannot take is refused, like descriptors or not
    with pytest.raises(AssertionError):
        describe(matrix(65, 128).view(-1)[1 : 1 + 64 * 128].view(64, 128), (32, 64))
    with pytest.raises(AssertionError):
        describe(matrix(64, 132)[:, :128], (32, 64))
    with pytest.raises(AssertionError):
        describe(first.t(), (32, 64))


@pytest.mark.parametrize("describe", [portable, gluon])
def test_descriptor_equals_triton_descriptor(describe):
    made = describe(matrix(64, 128), (32, 64))
    fields = {name: value for name, value in vars(made).items() if name != "kind"}
    assert fields == vars(type(made)(**fields))


def test_arguments_with_equal_keys_are_equal_to_triton(monkeypatch):
    """Every pair of arguments with equal keys, by the function that Triton itself asks."""
    if device.INTERPRETED:
        pytest.skip("the interpreter compiles nothing")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def body(x, y, N: triton.language.constexpr):
        pass

    kernel = triton.jit(body)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32, torch.int64)
    values = [tensor(dtype, offset) for dtype in dtypes for offset in (0, 1)]
    values += [tensor(torch.float8_e4m3fn), None, 0.0, 1.0, 16.0, True, False]
    values += [0, 1, 2, 15, 16, 17, -1, -16, WIDE - 1, WIDE, -WIDE, -WIDE - 1, 2**63, 16 * WIDE]
    for describe, dtype, columns in itertools.product((portable, gluon), dtypes[:2], (64, 32)):
        values += [describe(matrix(rows, 128, dtype), (16, columns)) for rows in (16, 100)]
    values += [Struct(value, 17) for value in values]
    found = {}
    for first, second in itertools.product(values, repeat=2):
        key = launch._launch_key(kernel, (first, second), {"N": 1})
        if key is not None:
            _, specialization, _ = binder(first, second, N=1)
            assert found.setdefault(key, specialization) == specialization, (first, second)
    assert 100 < len(found) < len(values) ** 2 / 4, "some are alike, and some are not"
