"""Run the source of a warp-specialized Gluon kernel on a CPU, in plain Python and torch.

Triton's interpreter does not run Gluon. Here the kernel's own functions run, with other globals:
tensors are torch tensors, pointers index flat tensors, and each partition of `warp_specialize` is a
thread. So this tests indices, masks, and what barriers order, but no machine code.

Assumptions about the hardware:

- TMA completes immediately. A box outside of its tensor is zero.
- wgmma reads its operands as late as possible: at the wait for it. Until then it has no value.
- Barriers count arrivals and bytes, as PTX defines it.
- Shared memory of 16-bit numbers, in rows of more than 128 bytes, consists of chunks of 128 bytes
  of all rows (test_sm90_latent.py compares this with Triton's own layouts). The exchange of 16
  bytes within rows is the same for every view, so it is left out.
"""

import itertools
import math
import threading
import time
import types
from collections.abc import Callable
from types import SimpleNamespace

import torch
from triton.experimental.gluon import language as real_gl
from triton.runtime.jit import JITFunction

CHUNK = 64  # 16-bit numbers of 128 bytes
DEADLOCK_SECONDS = 3.0


class Number(SimpleNamespace):
    """A type of numbers, as a kernel sees it."""

    def __init__(self, of_torch: torch.dtype) -> None:
        super().__init__(of_torch=of_torch, primitive_bitwidth=8 * of_torch.itemsize)

    def is_int8(self) -> bool:
        return self.of_torch == torch.int8


def torch_dtype(dtype: "torch.dtype | Number") -> torch.dtype:
    return dtype.of_torch if isinstance(dtype, Number) else dtype


class Tensor(torch.Tensor):
    """A torch tensor with the attributes of a kernel's tensor."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype, bitcast: bool = False) -> "Tensor":
        dtype = torch_dtype(dtype)
        return self.view(dtype) if bitcast else super().to(dtype)

    def split(self) -> tuple["Tensor", ...]:
        return self.unbind(-1)


def tensor(value) -> Tensor:
    return torch.as_tensor(value).as_subclass(Tensor)


class Pointer:
    """Addresses of elements of a flat tensor."""

    def __init__(self, flat: torch.Tensor, offset=0) -> None:
        self.flat, self.offset = flat, tensor(offset)
        self.dtype = SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, offset) -> "Pointer":
        return Pointer(self.flat, self.offset + offset)

    def load(self, mask=None, other=0.0) -> Tensor:
        offset, mask = self._inside(mask)
        found = self.flat[offset.where(mask, tensor(0))]
        return found.where(mask, tensor(other).to(found.dtype)).as_subclass(Tensor)

    def store(self, value, mask=None) -> None:
        offset, mask = self._inside(mask)
        value = tensor(value).expand(mask.shape)
        self.flat[offset[mask]] = value[mask].to(self.flat.dtype)

    def _inside(self, mask) -> tuple[Tensor, Tensor]:
        mask = tensor(True if mask is None else mask)
        offset, mask = torch.broadcast_tensors(self.offset, mask)
        inside = (offset >= 0) & (offset < self.flat.numel())
        assert bool((inside | ~mask).all()), "address outside of its tensor"
        return offset, mask


class Memory:
    """A view of shared memory: indices of its elements in a flat buffer."""

    def __init__(self, flat: torch.Tensor, index: torch.Tensor, dtype: object) -> None:
        self.flat, self.places = flat, index
        self.dtype, self.shape = dtype, list(index.shape)

    @classmethod
    def allocate(cls, dtype: torch.dtype | Number, shape: list[int]) -> "Memory":
        junk = {torch.int8: -77, torch.int32: -(2**20)}.get(torch_dtype(dtype), float("nan"))
        flat = torch.full((math.prod(shape),), junk).to(torch_dtype(dtype))
        return cls(flat, places_of(shape), dtype)

    def index(self, i) -> "Memory":
        assert 0 <= int(i) < self.shape[0], f"index {int(i)} of {self.shape}"
        return Memory(self.flat, self.places[int(i)], self.dtype)

    def slice(self, start, length, dim=0) -> "Memory":
        assert 0 <= start <= start + length <= self.shape[dim], "slice outside of its memory"
        return Memory(self.flat, self.places.narrow(dim, int(start), int(length)), self.dtype)

    def permute(self, order) -> "Memory":
        return Memory(self.flat, self.places.permute(*order), self.dtype)

    def reshaped(self, shape) -> "Memory":
        assert math.prod(shape) == self.flat.numel() == self.places.numel(), "views a whole buffer"
        return Memory(self.flat, places_of(shape), self.dtype)

    def load(self, layout=None) -> Tensor:
        return self.flat[self.places].as_subclass(Tensor)

    def store(self, value) -> None:
        self.flat[self.places] = value.to(self.flat.dtype)


def places_of(shape: list[int]) -> torch.Tensor:
    """Index of each element of a buffer of this shape: chunks of CHUNK columns of all rows."""
    *lead, rows, columns = shape if len(shape) > 1 else (1, *shape)
    if columns <= CHUNK:
        return torch.arange(math.prod(shape)).view(*shape)
    chunks = torch.arange(math.prod(shape)).view(*lead, columns // CHUNK, rows, CHUNK)
    return chunks.transpose(-3, -2).reshape(*shape)


class Barrier:
    """An mbarrier."""

    changed = threading.Condition()
    failed = False

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def update(self, arrivals: int = 0, num_bytes: int = 0) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes += num_bytes
            assert self.pending >= 0, "more arrivals than the barrier was initialized with"
            if self.pending == 0 and self.bytes == 0:
                self.phase ^= 1
                self.pending = self.count
            self.changed.notify_all()

    def wait(self, phase) -> None:
        with self.changed:
            done = self.changed.wait_for(
                lambda: self.phase != int(phase) or Barrier.failed, DEADLOCK_SECONDS
            )
            assert done and not Barrier.failed, "deadlock, or another partition failed"


class Barriers(list):
    def index(self, i) -> Barrier:
        return self[int(i)]


class Descriptor:
    """A TMA descriptor of a tensor."""

    def __init__(self, base: torch.Tensor, block: tuple[int, ...]) -> None:
        self.base, self.block_shape, self.layout = base, list(block), None
        self.shape = [tensor(size) for size in base.shape]
        self.dtype = Number(base.dtype)
        num_bytes = math.prod(block) * base.element_size()
        self.block_type = SimpleNamespace(shape=list(block), nbytes=num_bytes)

    def load(self, first, barrier: Barrier, to: Memory) -> None:
        box = torch.zeros(self.block_shape, dtype=self.base.dtype)
        inside, of_box = [], []
        for start, length, size in zip(
            map(int, first), self.block_shape, self.base.shape, strict=True
        ):
            assert start >= 0, "negative coordinate"
            length = max(0, min(length, size - start))
            inside.append(slice(start, start + length))
            of_box.append(slice(0, length))
        box[tuple(of_box)] = self.base[tuple(inside)]
        assert list(to.shape) == self.block_shape, f"box {self.block_shape} into {to.shape}"
        to.store(box)
        barrier.update(num_bytes=-box.numel() * box.element_size())

    def store(self, first, box: Memory) -> None:
        inside = [
            slice(int(start), min(int(start) + length, size))
            for start, length, size in zip(first, self.block_shape, self.base.shape, strict=True)
        ]
        of_box = tuple(slice(0, max(0, each.stop - each.start)) for each in inside)
        self.base[tuple(inside)] = box.load()[of_box]


class Product:
    """A product that is not waited for: it is only another product's accumulator, or waited for."""

    issued = threading.local()  # of this warpgroup, oldest first
    type = Tensor.type

    def __init__(self, a, b, sums, use_acc: bool) -> None:
        self.a, self.b, self.sums, self.use_acc = a, b, sums, use_acc
        self.value = None

    def finish(self) -> None:
        a, b = (each.load() if isinstance(each, Memory) else each for each in (self.a, self.b))
        number = torch.float64 if a.dtype == torch.int8 else torch.float32
        self.value = (a.to(number) @ b.to(number)).to(torch.float32)
        if self.use_acc:
            self.value += self.sums.value if isinstance(self.sums, Product) else self.sums


def _multiply(a, b, sums, use_acc=True, is_async=False) -> Product | Tensor:
    product = Product(a, b, sums, bool(use_acc))
    Product.issued.__dict__.setdefault("products", []).append(product)
    return product if is_async else _wait(0, [product])


def _wait(count, deps) -> object:
    issued = Product.issued.__dict__.setdefault("products", [])
    finished = issued[: max(0, len(issued) - count)]
    if finished:
        time.sleep(1e-3)  # whoever overwrites operands now has not waited for their readers
    for product in finished:
        product.finish()
    del issued[: len(finished)]
    deps = [each.value if each in finished else each for each in deps]
    return deps[0] if len(deps) == 1 else tuple(deps)


def _asm(function: Callable) -> Callable:
    """inline_asm_elementwise for words that are given once per byte of a result, and alike others.

    Other arguments than the first are given to the function if there are any.
    """

    def run(asm, constraints, arguments, dtypes, is_pure, pack) -> tuple[Tensor, ...]:
        words = (each[..., 0].contiguous() for each in arguments)
        results = function(str(asm), *words)
        return tuple(
            each[..., None].contiguous().view(dtypes[0]).as_subclass(Tensor) for each in results
        )

    return run


def _allocate(dtype, shape, layout) -> Memory | Barriers:
    shape = [int(size) for size in shape]
    if dtype == torch.int64:  # barriers
        return Barriers(Barrier() for _ in range(shape[0]))
    return Memory.allocate(dtype, shape)


def _copy_elements(to: Memory, pointers: Pointer, mask=None) -> None:
    to.store(pointers.load(mask, 0.0))


def _nothing(*args, **kwargs) -> None:
    return None


class _Language:
    """The functions of gluon.language that kernels here call."""

    float32, bfloat16, float16 = torch.float32, torch.bfloat16, torch.float16
    int32, int64, constexpr = torch.int32, torch.int64, object
    allocate_shared_memory = staticmethod(_allocate)
    exp, exp2 = staticmethod(torch.exp), staticmethod(torch.exp2)
    static_range = staticmethod(lambda *ends: range(*map(int, ends)))
    where = staticmethod(lambda c, a, b: torch.where(tensor(c), tensor(a), tensor(b)))
    maximum = staticmethod(lambda a, b: torch.maximum(tensor(a), tensor(b)))
    minimum = staticmethod(lambda a, b: torch.minimum(tensor(a), tensor(b)))
    max = staticmethod(lambda x, axis: x.amax(axis))
    sum = staticmethod(lambda x, axis: x.sum(axis))
    arange = staticmethod(lambda start, end, layout=None: tensor(torch.arange(start, end)))
    full = staticmethod(
        lambda shape, value, dtype, layout=None: tensor(torch.full(shape, value, dtype=dtype))
    )
    zeros = staticmethod(lambda shape, dtype, layout=None: tensor(torch.zeros(shape)))
    convert_layout = staticmethod(lambda x, layout, assert_trivial=False: x)
    expand_dims = staticmethod(lambda x, axis: x.unsqueeze(axis))
    join = staticmethod(lambda a, b: tensor(torch.stack([a, b], -1)))
    split = staticmethod(lambda x: x.split())
    cdiv = staticmethod(lambda a, b: (a + b - 1) // b)
    # not fused: exact where the product is
    fma = staticmethod(lambda a, b, c: (a.double() * b.double() + c.double()).float())
    multiple_of = staticmethod(lambda x, values: x)
    to_tensor = staticmethod(tensor)
    load = staticmethod(
        lambda pointer, mask=None, other=0, cache_modifier="": pointer.load(mask, other)
    )
    store = staticmethod(lambda pointer, value, mask=None: pointer.store(value, mask))
    num_warps = staticmethod(lambda: 4)
    NVMMASharedLayout = SwizzledSharedLayout = NVMMADistributedLayout = staticmethod(_nothing)
    BlockedLayout = SliceLayout = DotOperandLayout = staticmethod(_nothing)

    int8 = torch.int8

    def __init__(self, program: tuple[int, ...], grid: tuple[int, ...], asm: Callable) -> None:
        self.program, self.grid = program, grid
        self.inline_asm_elementwise = _asm(asm)

    def program_id(self, axis: int) -> Tensor:
        return tensor(self.program[axis])

    def num_programs(self, axis: int) -> Tensor:
        return tensor(self.grid[axis])

    def warp_specialize(self, partitions, num_warps, registers) -> None:
        assert len(partitions) == len(num_warps) + 1 == len(registers) + 1
        errors: list[BaseException] = []

        def run(function, arguments) -> None:
            try:
                function(*arguments)
            except BaseException as error:
                errors.append(error)
                with Barrier.changed:
                    Barrier.failed = True
                    Barrier.changed.notify_all()

        Barrier.failed = False
        threads = [threading.Thread(target=run, args=each) for each in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


class _Program:
    """One program of a grid: the kernel's functions with plain globals."""

    def __init__(
        self,
        program: tuple[int, ...],
        grid: tuple[int, ...],
        asm: Callable,
        fakes: dict[str, Callable],
    ) -> None:
        self.fakes = {
            "gl": _Language(program, grid, asm),
            "mbarrier": SimpleNamespace(
                init=lambda barrier, count: barrier.init(count),
                wait=lambda barrier, phase, pred=True: barrier.wait(phase) if pred else None,
                arrive=lambda barrier, count, pred=True: barrier.update(count if pred else 0),
                expect=lambda barrier, size, pred=True: (
                    barrier.update(1, int(size)) if pred else None
                ),
                MBarrierLayout=_nothing,
            ),
            "tma": SimpleNamespace(store_wait=_nothing),
            "async_copy": SimpleNamespace(commit_group=_nothing, wait_group=_nothing),
            "warpgroup_mma": _multiply,
            "warpgroup_mma_wait": _wait,
            "reshaped": lambda memory, shape, layout: memory.reshaped(shape),
            "tma_load": lambda desc, first, barrier, to, pred=True: (
                desc.load(first, barrier, to) if pred else None
            ),
            "tma_store": lambda desc, first, box: desc.store(first, box),
            "load_elements": _copy_elements,
            **dict.fromkeys(
                ("fence_async_shared", "barrier", "griddepcontrol_wait", "launch_dependents"),
                _nothing,
            ),
            **fakes,
        }
        self.made: dict[object, object] = {}

    def plain(self, value):
        """Return the plain form of a global: a function, a class, a number."""
        if isinstance(value, real_gl.constexpr):
            return value.value
        if isinstance(value, JITFunction):
            return self._once(value, lambda: self._function(value.fn))
        if isinstance(value, type) and hasattr(value, "__triton_aggregate__"):
            return self.made[value] if value in self.made else self._struct(value)
        return value

    def _once(self, key, make: Callable):
        if key not in self.made:
            self.made[key] = None  # replaced; a function may name itself
            self.made[key] = make()
        return self.made[key]

    def _function(self, function) -> Callable:
        names = dict.fromkeys(itertools.chain(function.__code__.co_names, ("range",)))
        found = {"__builtins__": __builtins__}
        for name in names:
            if name in self.fakes:
                found[name] = self.fakes[name]
            elif name in function.__globals__:
                found[name] = self.plain(function.__globals__[name])
        defaults = tuple(self.plain(each) for each in function.__defaults__ or ())
        return types.FunctionType(function.__code__, found, function.__name__, defaults)

    def _struct(self, cls: type) -> type:
        made = self.made[cls] = type(cls.__name__, (SimpleNamespace,), {})  # methods may name it
        for name, each in vars(cls).items():
            if isinstance(each, JITFunction):
                setattr(made, name, self._function(each.fn))
        return made


def _no_asm(asm: str, words: Tensor) -> tuple[Tensor, ...]:
    raise NotImplementedError("the test must give a plain twin of the inline assembly")


def launch(
    kernel, grid: tuple[int, ...], *arguments, asm: Callable = _no_asm, fakes=None, **constants
) -> None:
    """Run every program of the grid, one after the other. It replaces gpu/launch.launch.

    `fakes` replace functions that the kernel calls, by name, for example those with inline PTX.
    `asm` computes the results of inline assembly: (text, words) -> one tensor for each result.
    """
    names = list(kernel.signature.parameters)
    given = dict(zip(names, map(_argument, arguments), strict=False))
    given |= {name: value for name, value in constants.items() if name in names}
    for program in itertools.product(*map(range, grid)):
        run = _Program(program, grid, asm, fakes or {}).plain(kernel)
        run(**given)


def _argument(value):
    if isinstance(value, torch.Tensor):
        return Pointer(value.view(-1))
    return tensor(value) if isinstance(value, int) else value
