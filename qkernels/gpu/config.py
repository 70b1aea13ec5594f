"""Base of all kernel configs: integer helpers, limits, and checks, in plain Python."""

from qkernels.gpu.workspace import WORKSPACE_COUNTERS, WORKSPACE_FLOATS

HOPPER_SHARED_BYTES = 227 * 1024  # most shared memory of a block on sm_90
SM_REGISTERS = 65536


class CompileTimeConfig:
    """Config that is passed to a kernel as a constexpr; the kernel also uses its properties.

    Triton's disk cache identifies a constant by `cache_key`, else by its repr, which for a
    dataclass shows only the fields. Another version of this package may compute a property
    differently, so the key includes the properties.
    """

    __slots__ = ()

    @property
    def cache_key(self) -> str:
        of_type = type(self)
        names = [name for name in dir(of_type) if isinstance(getattr(of_type, name), property)]
        return f"{self} {[(name, getattr(self, name)) for name in names if name != 'cache_key']}"


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


MAX_STAGES = 8
WARPGROUP_ROWS = 64  # rows of the A operand of one wgmma


def launch_fault(block_m: int, warps: int, stages: int, *, least: int, most: int) -> str | None:
    """Return why these launch parameters are invalid; None: they are valid.

    `block_m` must be from `least` to `most`.
    """
    if not is_power(block_m, least, most):
        return f"a block must be a power of two from {least} to {most}, found {block_m}"
    if warps not in (1, 2, 4, 8, 16):
        return f"warps must be 1, 2, 4, 8 or 16, found {warps}"
    if not 1 <= stages <= MAX_STAGES:
        return f"stages must be 1 to {MAX_STAGES}, found {stages}"
    return None


def split_fault(split: int, steps: int, tiles: int, outputs: int) -> str | None:
    """Return why K cannot be split into `split` ranges; None: it can.

    The product has `steps` K steps, `tiles` output tiles and M * N = `outputs`.
    """
    if not 1 <= split <= steps:
        return f"split must be 1 to {steps}, the number of K steps, found {split}"
    if split > 1 and split * outputs > WORKSPACE_FLOATS:
        return f"split {split} of {outputs} outputs does not fit into the workspace"
    if split > 1 and tiles > WORKSPACE_COUNTERS:
        return f"{tiles} tiles cannot be split: the workspace has {WORKSPACE_COUNTERS} counters"
    return None


def is_power(n: int, least: int, most: int) -> bool:
    return least <= n <= most and n == power_of_two(n)
