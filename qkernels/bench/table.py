"""Table of the benchmarked operations of `qserve bench kernels`, and the loop over them.

Each operation's file holds its shapes, cases and baselines.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from qkernels.bench import (
    attention,
    blocks,
    elementwise,
    fed_linear,
    float8,
    fused_quant,
    host,
    latent,
    linear,
    moe,
    read_linear,
    sampling,
)
from qkernels.bench.measure import CEILINGS, Baselines, BenchedOp, Case, Result, measure
from qkernels.bench.tune import Tuned, tune
from qkernels.errors import KernelError
from qkernels.tuning import table as tuning_table

OPS: dict[str, BenchedOp] = (
    linear.OPS
    | blocks.OPS
    | fed_linear.OPS
    | read_linear.OPS
    | float8.OPS
    | attention.OPS
    | latent.OPS
    | elementwise.OPS
    | fused_quant.OPS
    | sampling.OPS
    | host.OPS
    | moe.OPS
)

# Baseline -> package that it needs. Without the package it is skipped, unless requested by name.
NEEDS = {"gemlite": "gemlite"}


def available_baselines(names: tuple[str, ...]) -> Baselines:
    return frozenset(
        name for name in names if name not in NEEDS or importlib.util.find_spec(NEEDS[name])
    )


def select(
    op: str | None, shape: str | None, m: str | None, baseline: str | None
) -> list[tuple[BenchedOp, str, tuple[int, ...], Baselines]]:
    """Parse what to measure. Each argument is a comma-separated list; None: all.

    Raises KernelError for an unknown name.
    """
    ops_asked = _names("--op", op, OPS)
    known_shapes = dict.fromkeys(s for name in ops_asked for s in OPS[name].shapes)
    shapes = shape.split(",") if shape else []
    for each in shapes:
        if not any(OPS[name].has_shape(each) for name in ops_asked):
            names = ", ".join(known_shapes)
            raise KernelError("--shape", f"{each!r} is unknown", f"known: {names}")
    known = dict.fromkeys(b for name in ops_asked for b in OPS[name].baselines)
    asked = _names("--baseline", baseline, (*known, "none")) if baseline else None
    try:
        ms = tuple(int(text) for text in m.split(",")) if m else None
    except ValueError:
        raise KernelError(
            "--m", f"expected numbers such as 1,16,64, found {m!r}", "separate numbers with commas"
        ) from None
    if ms and min(ms) < 1:
        raise KernelError(
            "--m", f"expected numbers from 1 on, found {min(ms)}", "leave out smaller ones"
        )
    chosen = []
    for name in ops_asked:
        benched = OPS[name]
        if asked is None:
            baselines = available_baselines(benched.baselines)
        else:
            baselines = frozenset(asked) & frozenset(benched.baselines)
        for each in filter(benched.has_shape, shapes or benched.shapes):
            chosen.append((benched, each, ms or benched.m_of(each), baselines))
    return chosen


def _names(flag: str, text: str | None, known: Iterable[str]) -> tuple[str, ...]:
    names = tuple(text.split(",")) if text else tuple(known)
    for name in names:
        if name not in known:
            raise KernelError(flag, f"{name!r} is unknown", f"known: {', '.join(known)}")
    return names


def run(
    *,
    op: str | None = None,
    shape: str | None = None,
    m: str | None = None,
    baseline: str | None = None,
    show: Callable[[Result], None],
) -> list[Result]:
    """Measure the cases, and show each result immediately. Raises KernelError without a GPU."""
    chosen = select(op, shape, m, baseline)
    _check_gpu()
    ceiling = CEILINGS.get(torch.cuda.get_device_name())
    results = []
    with torch.inference_mode():
        for case in _cases(chosen):
            results.append(measure(case, ceiling))
            show(results[-1])
    return results


def run_tune(
    *,
    op: str | None = None,
    shape: str | None = None,
    m: str | None = None,
    seconds: float,
    show: Callable[[Tuned], None],
) -> Path:
    """Tune configs for this GPU, and return the path of the table.

    Raises KernelError without a GPU.

    Without `op`, every tunable operation is tuned.
    """
    chosen = select(op, shape, m, "none")
    if op is None:
        chosen = [row for row in chosen if row[0].dims]
    _check_gpu()
    with torch.inference_mode():
        return tune(_cases(chosen), seconds, _software(), show)


def _cases(chosen: list[tuple[BenchedOp, str, tuple[int, ...], Baselines]]) -> Iterator[Case]:
    for benched, shape, ms, baselines in chosen:
        yield from benched.cases(shape, ms, baselines)


def _check_gpu() -> None:
    if not torch.cuda.is_available():
        raise KernelError(
            "GPU",
            "is needed to measure kernels, and torch sees none",
            "run this on a machine with an NVIDIA GPU and the CUDA build of torch",
        )


def versions() -> str:
    """Return the line that precedes every table of times."""
    tuned = tuning_table.tuning_table_of(torch.device("cuda", torch.cuda.current_device()))
    count = tuned.num_rows
    return f"{_software()}, bf16" + (f", {count} configs from --tune" if count else "")


def _software() -> str:
    triton = importlib.metadata.version("triton")
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton}"
