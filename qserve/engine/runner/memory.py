"""Number of KV pages and of state snapshots that fit in memory."""

import logging
from typing import NamedTuple

import torch

from formats.errors import InputError
from qkernels.moe.experts import PreparedExperts
from qserve.engine.kv_cache.memory_split import split_memory
from qserve.engine.runner.model_runner import ModelRunner
from qserve.engine.step.step_input import StepInput
from qserve.model.decoder import Decoder

logger = logging.getLogger(__name__)

GIB = 2**30
SNAPSHOT_SHARE = 0.25  # fraction for snapshots of the memory left after the states of requests
LESS_MEMORY = "lower --max-num-batched-tokens or --max-num-seqs, or use a smaller model"


class Fit(NamedTuple):
    """Numbers of pages and snapshots that fit in memory."""

    num_pages: int
    num_snapshots: int


def num_pages_in(
    memory: float, runner: ModelRunner, flag: str, max_pages: int | None = None
) -> Fit:
    """Return the pages and snapshots that fit in `memory` GiB next to the states of requests.

    `flag`: name of the setting, for errors. `max_pages`: maximum number of pages that can be in
    use. Raises InputError if no page fits.
    """
    room = memory * GIB - runner.bytes_of_states
    if room < 0:
        raise InputError(
            flag,
            f"{memory} GiB do not hold the states of {runner.num_state_slots} requests and"
            f" {runner.num_snapshots} snapshots, {runner.bytes_of_states / GIB:.3g} GiB",
            "raise it, or lower --max-num-seqs or --num-state-snapshots",
        )
    fit = _fit(int(room), runner, max_pages)
    if fit.num_pages < 1:
        raise InputError(
            flag,
            f"{room / GIB:.3g} GiB have no room for a KV page of"
            f" {runner.bytes_per_page / GIB:.3g} GiB",
            "raise it, or lower --block-size",
        )
    return fit


def _fit(room: int, runner: ModelRunner, max_pages: int | None) -> Fit:
    """Divide memory between pages and snapshots. A flag may fix the number of snapshots.

    Without attention a page has no bytes, and any number of pages fits.
    """
    page_bytes = max(1, runner.bytes_per_page)
    if not runner.chooses_snapshots:
        return Fit(room // page_bytes, runner.num_snapshots)
    num_pages, num_snapshots = split_memory(
        room,
        page_bytes=page_bytes,
        state_bytes=runner.bytes_per_state,
        page_size=runner.config.block_size,
        share=SNAPSHOT_SHARE,
        max_pages=max_pages,
    )
    return Fit(num_pages, num_snapshots)


def num_pages_on_gpu(
    runner: ModelRunner,
    largest_step: StepInput,
    graph_step: StepInput | None = None,
    max_pages: int | None = None,
) -> Fit:
    """Return the pages and snapshots that fit next to weights, activations and CUDA graphs.

    Runs the largest step once, on a few pages, to measure its peak. Also runs `graph_step`, the
    largest step in a graph, since graphs have their own memory. `max_pages`: maximum number of
    pages that can be in use. Raises InputError if no page fits.
    """
    device = runner.device
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_stats(device)["allocated_bytes.all.current"]
    runner.allocate_pages(largest_step.block_tables_RX.shape[1])
    sample = runner.sample()
    step_peak = _peak_of(sample, largest_step)
    graphs = 0
    if graph_step is not None:
        before = torch.cuda.memory_stats(device)["allocated_bytes.all.current"]
        graphs = max(0, _peak_of(sample, graph_step) - before) + _media_bytes(runner)
    sample.layer_caches.free()
    runner.layer_caches.free()
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    # Memory outside of torch's allocator: the CUDA context, other processes.
    outside = total - free - stats["reserved_bytes.all.current"]
    # deferred_bytes is allocated later, for example with the first request that has a penalty.
    peak = step_peak + outside + runner.deferred_bytes + graphs
    budget = total * runner.config.gpu_memory_utilization
    logger.info(
        "GPU memory: weights %.2f GiB, activations %.2f GiB, CUDA graphs %.2f GiB, outside of"
        " torch %.2f GiB; %.2f GiB are left for KV pages of %.2f GiB * %g"
        " (--gpu-memory-utilization)",
        weights / GIB,
        (step_peak - weights + runner.deferred_bytes) / GIB,
        graphs / GIB,
        outside / GIB,
        (budget - peak) / GIB,
        total / GIB,
        runner.config.gpu_memory_utilization,
    )
    fit = _fit(max(0, int(budget - peak)), runner, max_pages)
    if fit.num_pages < 1:
        raise InputError(
            "--gpu-memory-utilization",
            f"weights and activations take {peak / GIB:.1f} GiB of the {budget / GIB:.1f} GiB"
            " it allows, which leaves nothing for KV pages",
            f"raise it, {LESS_MEMORY}",
        )
    return fit


def weight_bytes(decoder: Decoder) -> int:
    """Return the bytes of a decoder's weights in the kernels' layouts."""
    total = sum(tensor.nbytes for tensor in decoder.buffers())
    for prepared, _ in decoder.products():
        stacks = [prepared]
        if isinstance(prepared, PreparedExperts):
            stacks = [prepared.gate_up, prepared.down]
        for stack in stacks:
            for member in getattr(stack, "members", [stack]):
                tensors = [member] if isinstance(member, torch.Tensor) else member.tensors.values()
                total += sum(tensor.nbytes for tensor in tensors)
    return total


def _media_bytes(runner: ModelRunner) -> int:
    """Return the bytes of the input buffers of CUDA graphs with media."""
    buffers = runner.media_buffers()
    return 0 if buffers is None else buffers.nbytes


def _peak_of(runner: ModelRunner, step: StepInput) -> int:
    """Return the peak of allocated device memory during a step."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(runner.device)
    runner.launch(step).result()
    return torch.cuda.memory_stats(runner.device)["allocated_bytes.all.peak"]
