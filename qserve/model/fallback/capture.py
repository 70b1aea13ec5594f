"""Check whether steps of a model that transformers runs can be captured in CUDA graphs.

Code that reads values from the device, such as an expert's token count, cannot be captured.
"""

from typing import Any

import torch

from formats.errors import one_line
from qserve.model.fallback.decoder import FallbackDecoder

TOLERANCE = 1e-2  # relative; a replay runs the same kernels, perhaps with sums in another order


def refusal_of_graphs(
    decoder: FallbackDecoder, step: tuple[Any, ...], want_TC: torch.Tensor
) -> str:
    """Capture and replay a step. Returns the reason why it failed, or "" if it worked.

    `step`: arguments of decoder.forward. `want_TC`: the expected hidden states.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _states_and_logits(decoder, step)  # also compiles kernels
    except Exception as error:  # any error of model code that does not support capture
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
