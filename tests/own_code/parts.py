"""Norms, rotations, attention and feed-forwards that several references share."""

import torch
from torch.nn.functional import linear, silu, softmax


def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x_TNd, theta, width=None):
    """Turn the first `width` channels of each head; channel i and channel i + width / 2 pair."""
    width = width or x_TNd.shape[-1]
    angles = torch.outer(
        torch.arange(len(x_TNd)).float(), theta ** (-torch.arange(0, width, 2).float() / width)
    )
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x_TNd[..., : width // 2], x_TNd[..., width // 2 : width]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*turned, x_TNd[..., width:]], -1)


def attend(q_THd, k_TJd, v_TJd, slopes=None):
    T, H, d = q_THd.shape
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k_TJd, v_TJd))
    scores = torch.einsum("thd,shd->hts", q_THd, k) * d**-0.5
    ids = torch.arange(T)
    if slopes is not None:
        scores = scores + torch.tensor(slopes)[:, None, None] * (ids - ids[:, None])
    scores = scores.masked_fill(ids > ids[:, None], -torch.inf)
    return torch.einsum("hts,shd->thd", softmax(scores, -1), v).flatten(1)


def swiglu(x, gate, up, down):
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def sequential(ids, table, layers, last, head):
    """`layers`: pairs of functions whose results are added one after the other."""
    x = table[torch.tensor(ids)]
    for attention, feed_forward in layers:
        x = x + attention(x)
        x = x + feed_forward(x)
    return linear(last(x), head)
