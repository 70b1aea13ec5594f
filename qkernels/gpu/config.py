"""What the configs of all kernels share: integer helpers, limits, and what a launch allows.

Plain Python; knows no operation.
"""

from qkernels.gpu.workspace import WORKSPACE_COUNTERS, WORKSPACE_FLOATS

HOPPER_SHARED_BYTES = 227 * 1024  # of a block on sm_90


class CompileTimeConfig:
    """A tile that is a kernel's constant, with what is computed of it.

    Triton's cache on disk knows a constant by its `cache_key`, or by its text, which for a
    dataclass is its fields: what another version computes otherwise would not be told apart.
    """

    __slots__ = ()

    @property
    def cache_key(self) -> str:
        of_type = type(self)
        names = [name for name in dir(of_type) if isinstance(getattr(of_type, name), property)]
        return f"{self} {[(name, getattr(self, name)) for name in names if name != 'cache_key']}"


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


MAX_STAGES = 8
WARPGROUP_ROWS = 64  # of the left operand of one product


def launch_fault(block_m: int, warps: int, stages: int, *, least: int, most: int) -> str | None:
    if not is_power(block_m, least, most):
        return f"a block must be a power of two from {least} to {most}, found {block_m}"
    if warps not in (1, 2, 4, 8, 16):
        return f"warps must be 1, 2, 4, 8 or 16, found {warps}"
    if not 1 <= stages <= MAX_STAGES:
        return f"stages must be 1 to {MAX_STAGES}, found {stages}"
    return None


def split_fault(split: int, steps: int, tiles: int, outputs: int) -> str | None:
    if not 1 <= split <= steps:
        return f"split must be 1 to {steps}, the steps of K, found {split}"
    if split > 1 and split * outputs > WORKSPACE_FLOATS:
        return f"split {split} of {outputs} outputs overruns the workspace"
    if split > 1 and tiles > WORKSPACE_COUNTERS:
        return f"{tiles} tiles cannot be split: there are {WORKSPACE_COUNTERS} counters"
    return None


def is_power(n: int, least: int, most: int) -> bool:
    return least <= n <= most and n == power_of_two(n)
