"""Batch-invariant attention: a row's bits depend only on its own request and position.

- sm_90, 16-bit pages, head dim up to 128: a row's keys are divided into segments at multiples of
  128. Each segment has its own sums, which are folded from the row's last segment to its first. One
  program computes all segments, or several share them; the bits are the same (sm90_segments.py).
- sm_90, 16-bit pages, longer heads: always the kernel for prompt chunks, with one chain of sums
  that is never split.
- 8-bit pages, and all pages on other GPUs: triton_segments.py, which has its own segments, for
  prompts and decode.
- CPU: each row is computed alone.

Rows that see keys after their own (tokens of one image) run a second time in triton_segments.py,
after all rows have run without these keys. So the other rows keep their bits.
"""

import torch

from qkernels.attention import reference
from qkernels.attention.cache import AttentionStep, PagedKv
from qkernels.attention.fixed_order.config import SEGMENT_MAX_HEAD_DIM, SEGMENT_MAX_TOKENS
from qkernels.gpu import device as gpu_device
from qkernels.operands.limbs import LimbForm, Limbs


def paged_attention(
    q_THD: torch.Tensor,
    cache: PagedKv,
    step: AttentionStep,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    limbs: LimbForm | None = None,
    inputs_ready: bool = False,
    sinks_H: torch.Tensor | None = None,
    slopes_H: torch.Tensor | None = None,
    chunk_size: int | None = None,
) -> torch.Tensor | Limbs:
    """Implement ops.paged_attention."""
    biases = {"sinks_H": sinks_H, "slopes_H": slopes_H, "chunk_size": chunk_size}
    if gpu_device.arch(q_THD.device) == "cpu":
        return reference.paged_attention_by_rows(
            q_THD, cache, step, scale=scale, window=window, soft_cap=soft_cap, **biases
        )
    from qkernels.attention.fixed_order import triton_segments

    settings = {"scale": scale, "window": window, "soft_cap": soft_cap, **biases}
    out_THD = _causal(q_THD, cache, step, **settings)
    if step.last_keys_T is not None:
        last_keys_T = step.last_keys_T
        triton_segments.attend_(out_THD, q_THD, cache, step, **settings, last_keys_T=last_keys_T)
    return out_THD


def _causal(
    q_THD: torch.Tensor,
    cache: PagedKv,
    step: AttentionStep,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks_H: torch.Tensor | None,
    slopes_H: torch.Tensor | None,
    chunk_size: int | None,
) -> torch.Tensor:
    """Compute all rows as causal attention: no row sees keys after its own."""
    settings = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks_H": sinks_H}
    if gpu_device.lacks_arch(q_THD.device, "sm_90") is None and not cache.is_8bit:
        by_segment = q_THD.shape[2] <= SEGMENT_MAX_HEAD_DIM
        if by_segment and step.max_query_len <= SEGMENT_MAX_TOKENS:
            from qkernels.attention.fixed_order import sm90_segments

            return sm90_segments.paged_attention(q_THD, cache, step, **settings)
        from qkernels.attention import sm90_prefill

        return sm90_prefill.paged_attention(
            q_THD, cache, step, **settings, split=1, by_segment=by_segment
        )
    from qkernels.attention.fixed_order import triton_segments

    return triton_segments.paged_attention(
        q_THD, cache, step, **settings, slopes_H=slopes_H, chunk_size=chunk_size
    )
