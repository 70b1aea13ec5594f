"""From logits to tokens, on the device and without waiting for it. Knows rows, not requests' lives.

Legend: S rows, V vocabulary. Random numbers come from a counter: a hash of (seed, position, token
id), so a row's draw depends on nothing else in the batch and is the same when a request is computed
again. Picking the largest of logit + Gumbel noise draws from the softmax (Gumbel-max).
"""

from dataclasses import dataclass

import numpy as np
import torch

from qserve.engine.scheduler import Chunk
from qserve.engine.transfer import to_device

INVALID_TOKEN = -1  # stands for a row whose logits hold NaN
# splitmix64's constants as signed 64-bit integers: torch multiplies modulo 2^64
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """The sampling parameters of a step's rows, as host arrays [S]."""

    temperature: np.ndarray  # float32, 0: greedy
    top_k: np.ndarray  # int64, 0: all
    top_p: np.ndarray  # float32
    min_p: np.ndarray  # float32
    seed: np.ndarray  # int64
    position: np.ndarray  # int64: of the token that is drawn
    banned_row: np.ndarray  # int64, with banned_token: tokens that min_tokens forbids
    banned_token: np.ndarray

    @classmethod
    def of(cls, chunks: list[Chunk]) -> "SamplingRows":
        params = [chunk.request.params for chunk in chunks]
        banned = [
            (row, token)
            for row, chunk in enumerate(chunks)
            if chunk.end - chunk.request.num_prompt_tokens < chunk.request.params.min_tokens
            for token in chunk.request.stop_token_ids | chunk.request.eos_token_ids
        ]
        return cls(
            temperature=np.array([p.temperature for p in params], np.float32),
            top_k=np.array([max(p.top_k, 0) for p in params], np.int64),
            top_p=np.array([p.top_p for p in params], np.float32),
            min_p=np.array([p.min_p for p in params], np.float32),
            seed=np.array([chunk.request.seed for chunk in chunks], np.int64),
            position=np.array([chunk.end for chunk in chunks], np.int64),
            banned_row=np.array([row for row, _ in banned], np.int64),
            banned_token=np.array([token for _, token in banned], np.int64),
        )

    @property
    def all_greedy(self) -> bool:
        return bool((self.temperature == 0).all())

    @property
    def any_filter(self) -> bool:
        return bool((self.top_k > 0).any() or (self.top_p < 1).any() or (self.min_p > 0).any())


def sample(logits_SV: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Draw one token for each row: int64 [S], INVALID_TOKEN where a row's logits hold NaN."""
    device = logits_SV.device
    logits_SV = logits_SV.float()
    invalid_S = logits_SV.isnan().any(-1)
    if len(rows.banned_row):
        index = (to_device(rows.banned_row, device), to_device(rows.banned_token, device))
        logits_SV = logits_SV.index_put(index, logits_SV.new_tensor(-torch.inf))
    tokens_S = logits_SV.argmax(-1)
    if not rows.all_greedy:
        temperature_S = to_device(rows.temperature, device)
        scaled_SV = logits_SV / temperature_S.clamp(min=1e-5)[:, None]
        if rows.any_filter:
            scaled_SV = filter_logits(
                scaled_SV, *(to_device(a, device) for a in (rows.min_p, rows.top_k, rows.top_p))
            )
        noise_SV = gumbel_noise(
            to_device(rows.seed, device), to_device(rows.position, device), scaled_SV.shape[1]
        )
        tokens_S = torch.where(temperature_S == 0, tokens_S, (scaled_SV + noise_SV).argmax(-1))
    return tokens_S.masked_fill(invalid_S, INVALID_TOKEN)


def filter_logits(
    logits_SV: torch.Tensor, min_p_S: torch.Tensor, top_k_S: torch.Tensor, top_p_S: torch.Tensor
) -> torch.Tensor:
    """Set to -inf what min_p, then top_k, then top_p exclude. The likeliest token always stays."""
    vocabulary = logits_SV.shape[1]
    sorted_SV, order_SV = logits_SV.sort(dim=-1, descending=True, stable=True)
    # p >= min_p * p_max, in logits
    dropped_SV = sorted_SV < sorted_SV[:, :1] + min_p_S.log()[:, None]
    rank_V = torch.arange(vocabulary, device=logits_SV.device)
    limit_S = torch.where(top_k_S > 0, top_k_S, vocabulary)
    dropped_SV |= rank_V >= limit_S[:, None]
    probabilities_SV = sorted_SV.masked_fill(dropped_SV, -torch.inf).softmax(-1)
    before_SV = probabilities_SV.cumsum(-1) - probabilities_SV
    dropped_SV |= (before_SV >= top_p_S[:, None]) & (top_p_S < 1)[:, None]
    dropped_SV[:, 0] = False
    kept_SV = sorted_SV.masked_fill(dropped_SV, -torch.inf)
    return torch.empty_like(kept_SV).scatter_(1, order_SV, kept_SV)


def gumbel_noise(seed_S: torch.Tensor, position_S: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Gumbel noise [S, V] in float32, a function of (seed, position, token id)."""
    key_S = _mix(_mix(seed_S) + position_S)
    token_V = torch.arange(vocabulary, device=seed_S.device)
    bits_SV = _mix(key_S[:, None] + token_V * _GOLDEN)
    # 23 high bits and a half: never 0 or 1
    uniform_SV = ((_shift(bits_SV, 41)).float() + 0.5) * 2.0**-23
    return -(-uniform_SV.log()).log()


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's step (Steele, Lea, Flood 2014)."""
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)
