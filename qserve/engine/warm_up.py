"""The steps that compile every kernel before a request comes. Knows the decoder's shapes.

They follow from the plans of its products and the configs of attention (qkernels/warm_up.py).
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from qkernels.gpu.device import lacks_arch, sm_count
from qkernels.lora import config as lora
from qkernels.lora.weights import NO_ADAPTER
from qkernels.warm_up import decode_boundaries, prefill_boundaries, row_boundaries
from qserve.config import EngineConfig
from qserve.engine.step_input import StepInput
from qserve.engine.step_plan import Drafting
from qserve.lora.slot_memory import SlotMemory
from qserve.model.decoder import Decoder

# A step of padding: requests, tokens of each, keys that the longest sees.
WarmUpShape = tuple[int, int, int]


def warm_up_shapes(
    decoder: Decoder,
    config: EngineConfig,
    *,
    max_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    page_bytes: int,
    sums: Iterable[int] = (),
    adapters: SlotMemory | None = None,
) -> Iterator[WarmUpShape]:
    """Those of steps that together launch every kernel that serving can reach.

    `page_bytes`: of one element of the KV pages. `sums`: rows for which ranks add up their parts by
    other kernels. Graphs launch nothing else.
    """
    device = decoder.device
    sms = sm_count(device)

    if adapters is not None:
        # What they read is a tensor, so the kernels before them and the products may be others.
        adapted = {(each.in_features, each.out_features): each.sizes for each in adapters.weights}
        rows = set(row_boundaries(decoder.products(), max_tokens, sms, adapted=adapted))
        kinds = {
            (each.in_features, each.num_slices, each.max_rank, each.num_slots)
            for each in adapters.weights
        }
        for kind in kinds:
            rows |= set(lora.row_boundaries(max_tokens, *kind))
        yield from ((1, count, count) for count in sorted(rows))
    of_products = row_boundaries(decoder.products(), max_tokens, sms)
    for rows in sorted({*of_products, *(rows for rows in sums if rows <= max_tokens)}):
        yield 1, rows, rows
    model, element_size = decoder.config, decoder.dtype.itemsize
    heads = {
        "num_kv_heads": model.num_kv_heads,
        "heads_per_kv_head": model.num_heads // model.num_kv_heads,
    }
    for window in sorted(set(model.windows), key=lambda window: window or 0):
        for tokens, keys in prefill_boundaries(
            max_tokens=max_tokens,
            max_context_len=max_model_len,
            window=window,
            sm_count=sms,
            **heads,
        ):
            yield 1, tokens, keys
        for requests, count, keys in decode_boundaries(
            max_requests=max_num_seqs,
            max_tokens=max_tokens,
            max_context_len=max_model_len,
            page_size=config.block_size,
            window=window,
            head_dim=model.head_dim,
            element_size=element_size,
            page_element_size=page_bytes,
            sm_count=sms,
            gluon=page_bytes < element_size and lacks_arch(device, "sm_90") is None,
            **heads,
        ):
            yield requests, count, keys


def warm_up_step(shape: WarmUpShape, page_size: int, drafting: Drafting | None = None) -> StepInput:
    """The step of a shape."""
    num_requests, count, keys = shape
    return StepInput.padding(
        num_requests=num_requests,
        count=count,
        max_context_len=max(keys, count),
        page_size=page_size,
        drafting=drafting,
    )


def with_adapters(step: StepInput) -> StepInput:
    """The same with the kernels of adapters, which none of its rows has."""
    slots_T = np.full(step.num_tokens, NO_ADAPTER, np.int32)
    return replace(step, adapter_slots_T=slots_T)
