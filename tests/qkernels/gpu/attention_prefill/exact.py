"""Causal attention of one request in float64."""

import torch


def exact(q, k, v, length, scale, window, soft_cap, sinks_H=None):
    """One request in float64: q [T, H, D], k and v [length, J, D]."""
    count, group = q.shape[0], q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = torch.arange(length - count, length, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)
    visible = key <= position
    if window is not None:
        visible &= key > position - window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks_H is not None:
        sinks = sinks_H.double()[:, None, None].expand(-1, count, 1)
        scores = torch.cat([scores, sinks], 2)
    weights = scores.softmax(-1).nan_to_num(0)[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, v)
