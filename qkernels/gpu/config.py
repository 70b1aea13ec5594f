"""Base of all kernels' configs: integer helpers, limits, and checks. Plain Python."""

from qkernels.gpu.workspace import WORKSPACE_COUNTERS, WORKSPACE_FLOATS

HOPPER_SHARED_BYTES = 227 * 1024  # the most that a block may have on sm_90
SM_REGISTERS = 65536


class CompileTimeConfig:
    """A config that is passed to a kernel as a constexpr, together with its properties.

    Triton's disk cache distinguishes constants by `cache_key`, or by their repr, which for a
    dataclass is its fields. A kernel also depends on the properties, and another version of this
    package may compute them differently, so the key contains them.
    """

    __slots__ = ()

    @property
    def cache_key(self) -> str:
        of_type = type(self)
        names = [name for name in dir(of_type) if isinstance(getattr(of_type, name), property)]
        return f"{self} {[(name, getattr(self, name)) for name in names if name != 'cache_key']}"


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


MAX_STAGES = 8
WARPGROUP_ROWS = 64  # of operand A of one wgmma


def launch_fault(block_m: int, warps: int, stages: int, *, least: int, most: int) -> str | None:
    """Why a launch cannot have these numbers, block_m from `least` to `most`; None: it can."""
    if not is_power(block_m, least, most):
        return f"a block must be a power of two from {least} to {most}, found {block_m}"
    if warps not in (1, 2, 4, 8, 16):
        return f"warps must be 1, 2, 4, 8 or 16, found {warps}"
    if not 1 <= stages <= MAX_STAGES:
        return f"stages must be 1 to {MAX_STAGES}, found {stages}"
    return None


def split_fault(split: int, steps: int, tiles: int, outputs: int) -> str | None:
    """Why K cannot be split so often, of so many K steps, tiles and outputs M * N; None: it can."""
    if not 1 <= split <= steps:
        return f"split must be 1 to {steps}, the number of K steps, found {split}"
    if split > 1 and split * outputs > WORKSPACE_FLOATS:
        return f"split {split} of {outputs} outputs does not fit into the workspace"
    if split > 1 and tiles > WORKSPACE_COUNTERS:
        return f"{tiles} tiles cannot be split: the workspace has {WORKSPACE_COUNTERS} counters"
    return None


def is_power(n: int, least: int, most: int) -> bool:
    return least <= n <= most and n == power_of_two(n)
