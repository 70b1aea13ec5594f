"""Helpers of the fuzzed operations: device, random values, a bound for each element."""

import torch

from qkernels.operands.split_k import LinearOutput, SplitKPartials

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
# the interpreter has no bfloat16 arithmetic
HALF = ("float16", "bfloat16") if ON_GPU else ("float16",)
FLOAT = (*HALF, "float32")

EPS = {name: torch.finfo(getattr(torch, name)).eps for name in ("float16", "bfloat16", "float32")}
ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 63, 64, 65, 118, 130, 257, 600, 1025)
OUTPUTS = (8, 16, 24, 64, 72, 128, 136, 200, 1000, 4096)
WIDTHS = (8, 64, 24, 200, 1000, 1025, 4096, 5120, 14336)
BOOLS = (False, True)
PARTS = (0, 1, 2, 3, 5, 8, 16)  # of K, still to be added; 0: none


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(shape, dtype: str, seed: int, strided: bool = False, spread: float = 0) -> torch.Tensor:
    """Random values, each row of its own size; strided: every second column of a wider tensor."""
    made = torch.randn(*shape[:-1], shape[-1] * (1 + strided), generator=generator(seed))
    made = made * 2 ** (torch.rand(*shape[:-1], 1, generator=generator(seed + 1)) * spread)
    return made.to(DEVICE, getattr(torch, dtype))[..., :: 1 + strided]


def in_parts(x: torch.Tensor, parts: int, seed: int) -> LinearOutput:
    """As many parts of about x's size, whose sum is about x; 0: x itself."""
    if not parts:
        return x
    made = torch.randn(parts, *x.shape, generator=generator(seed + 3)).to(DEVICE) * x.float().abs()
    made[-1] = x.float() - made[:-1].sum(0)
    return SplitKPartials(parts=made, dtype=x.dtype)


def assert_near(name: str, want: torch.Tensor, got: torch.Tensor, bound: torch.Tensor) -> None:
    """Element by element, in float64."""
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, not {list(want.shape)}"
    off = (got.double().cpu() - want.double().cpu()).abs() / bound.double().cpu().clamp(min=1e-30)
    worst = float(off.nan_to_num(torch.inf).max()) if off.numel() else 0
    assert worst <= 1, f"{name}: an element is off by {worst:.3g} times what is allowed"
