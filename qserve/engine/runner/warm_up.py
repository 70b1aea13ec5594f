"""Warm-up steps: steps of padding that launch every kernel before the first request.

The shapes of these steps follow from the plans of the decoder's matrix products
(qkernels/warm_up.py) and from the specs of its caches.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from qkernels.gpu.device import sm_count
from qkernels.lora import config as lora
from qkernels.lora.weights import NO_ADAPTER
from qkernels.warm_up import adapted_expert_boundaries, row_boundaries
from qserve.engine.scheduling.plan import Drafting
from qserve.engine.step.step_input import StepInput
from qserve.lora.slot_memory import SlotMemory
from qserve.model.cache_spec import CacheSpec, StepLimits, WarmUpShape
from qserve.model.decoder import Decoder


def warm_up_shapes(
    decoder: Decoder,
    specs: Sequence[CacheSpec],
    limits: StepLimits,
    *,
    sums: Iterable[int] = (),
    adapters: SlotMemory | None = None,
) -> Iterator[WarmUpShape]:
    """Yield step shapes that together launch every kernel that serving can use.

    `specs`: specs of the decoder's caches. `sums`: numbers of rows at which the ranks' all-reduce
    switches to another kernel. CUDA graphs launch no other kernels.
    """
    device, max_tokens = decoder.device, limits.max_tokens
    sms = sm_count(device)

    if adapters is not None:
        # With adapters, the kernels before them and the kernels of the products may differ.
        adapted = {(each.in_features, each.out_features): each.sizes for each in adapters.weights}
        rows = set(row_boundaries(decoder.products(), max_tokens, sms, adapted=adapted))
        kinds = {
            (each.in_features, each.num_slices, each.max_rank, each.num_slots)
            for each in adapters.weights
        }
        for kind in kinds:
            fixed = adapters.fixed_order
            rows |= set(lora.row_boundaries(max_tokens, *kind, fixed_order=fixed))
        rows |= set(adapted_expert_boundaries(adapters.experts, max_tokens))
        yield from ((1, count, count) for count in sorted(rows))
    of_products = row_boundaries(decoder.products(), max_tokens, sms)
    for rows in sorted({*of_products, *(rows for rows in sums if rows <= max_tokens)}):
        yield 1, rows, rows
    for spec in dict.fromkeys(specs):
        yield from spec.warm_up_shapes(limits, decoder.dtype, device)


def warm_up_step(shape: WarmUpShape, page_size: int, drafting: Drafting | None = None) -> StepInput:
    """Return a step of padding with this shape."""
    num_requests, count, keys = shape
    return StepInput.padding(
        num_requests=num_requests,
        count=count,
        max_context_len=max(keys, count),
        page_size=page_size,
        drafting=drafting,
    )


def with_adapters(step: StepInput) -> StepInput:
    """Return a step that launches the adapter kernels, although no row has an adapter."""
    slots_T = np.full(step.num_tokens, NO_ADAPTER, np.int32)
    return replace(step, adapter_slots_T=slots_T)
