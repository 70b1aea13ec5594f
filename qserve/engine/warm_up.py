"""The steps that compile every kernel before a request comes. Knows the decoder's shapes.

They follow from the plans of its products and the configs of attention (qkernels/warm_up.py).
"""

from collections.abc import Iterator

from qkernels.gpu.device import lacks_arch, sm_count
from qkernels.warm_up import decode_boundaries, prefill_boundaries, row_boundaries
from qserve.config import EngineConfig
from qserve.engine.step_input import StepInput
from qserve.model.decoder import Decoder


def warm_up_steps(
    decoder: Decoder,
    config: EngineConfig,
    *,
    max_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    page_bytes: int,
) -> Iterator[StepInput]:
    """Steps of padding, which together launch every kernel that serving can reach.

    `page_bytes`: of one element of the KV pages. Graphs launch nothing else.
    """
    device = decoder.embedding.weight.device
    sms = sm_count(device)

    def step(num_requests: int, count: int, keys: int) -> StepInput:
        return StepInput.padding(
            num_requests=num_requests,
            count=count,
            max_context_len=max(keys, count),
            page_size=config.block_size,
        )

    for rows in row_boundaries(decoder.products(), max_tokens, sms):
        yield step(1, rows, rows)
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
            yield step(1, tokens, keys)
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
            yield step(requests, count, keys)
