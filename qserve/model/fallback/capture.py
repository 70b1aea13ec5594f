"""Check that a CUDA graph can hold a step of a model that transformers runs.

Code that reads values of the device, such as the number of tokens of an expert, cannot be captured.
"""

from typing import Any

import torch

from formats.errors import one_line
from qserve.model.fallback.decoder import FallbackDecoder

TOLERANCE = 1e-2  # a replayed step runs the kernels that ran before, perhaps with other split sums


def refusal_of_graphs(
    decoder: FallbackDecoder, step: tuple[Any, ...], want_TC: torch.Tensor
) -> str:
    """Capture and replay a step. Return the reason why that fails; empty: it works.

    `step`: arguments of decoder.forward. `want_TC`: its hidden states.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _states_and_logits(decoder, step)  # compiles kernels, too
    except Exception as error:  # of model code that was not written for this
        return f"its code waits for the device ({one_line(error)})"
    finally:
        torch.cuda.set_sync_debug_mode(before)
    graph = torch.cuda.CUDAGraph()
    try:
        torch.cuda.synchronize(want_TC.device)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found_TC, _ = _states_and_logits(decoder, step)
        found_TC.zero_()
        graph.replay()
        torch.cuda.synchronize(want_TC.device)
    except Exception as error:
        return f"a capture of its step failed ({one_line(error)})"
    distance = (found_TC.float() - want_TC.float()).norm() / want_TC.float().norm()
    if not distance < TOLERANCE:
        return f"a captured step gives other hidden states (relative distance {distance:.3g})"
    return ""


def _states_and_logits(
    decoder: FallbackDecoder, step: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden_TC = decoder.forward(*step)
    return hidden_TC, decoder.logits(hidden_TC)
