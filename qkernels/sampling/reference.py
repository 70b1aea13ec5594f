"""Plain torch reference of `sample_`, which CPUs run.

Random numbers are a hash of (seed, position, token id), so a row's draw does not depend on the rest
of the batch and repeats when a request is computed again. The largest value of logit + Gumbel noise
is a draw from the softmax (Gumbel-max). Legend: S rows, V vocabulary, W rows of the history table,
N alternatives.
"""

import torch

from qkernels.sampling.settings import Samples, SampleSettings
from qkernels.sampling.words import BIAS_END, BIAS_START, MASK_BITS

MIN_TEMPERATURE = 1e-5  # lower temperatures would overflow

# splitmix64's constants as signed 64-bit integers: torch multiplies modulo 2^64
MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15


def sample_(
    logits_SV: torch.Tensor, settings: SampleSettings, history_WV: torch.Tensor | None = None
) -> Samples:
    """Reference of ops.sample_."""
    raw_SV = logits_SV.float()
    invalid_S = raw_SV.isnan().any(-1)
    adjusted_SV = adjust(raw_SV, settings, history_WV)
    tokens_S = adjusted_SV.argmax(-1)
    if settings.any_random:
        temperature_S = settings.column("temperature")
        scaled_SV = adjusted_SV / temperature_S.clamp(min=MIN_TEMPERATURE)[:, None]
        if settings.any_filter:
            scaled_SV = filter_logits(
                scaled_SV, *(settings.column(name) for name in ("min_p", "top_k", "top_p"))
            )
        noise_SV = gumbel_noise(
            settings.column("seed"), settings.column("position"), scaled_SV.shape[1]
        )
        tokens_S = torch.where(temperature_S == 0, tokens_S, (scaled_SV + noise_SV).argmax(-1))
    tokens_S = tokens_S.masked_fill(invalid_S, settings.invalid_token)
    if history_WV is not None:
        row_S = settings.column("history_row")
        counted_S = (row_S >= 0) & (tokens_S >= 0)
        history_WV.index_put_(
            (row_S.clamp(min=0), tokens_S.clamp(min=0)), 2 * counted_S.int(), accumulate=True
        )
    if settings.num_logprobs < 0:
        return Samples(tokens_S, None, None, None)
    return Samples(tokens_S, *row_logprobs(raw_SV, tokens_S, settings))


def adjust(
    logits_SV: torch.Tensor, settings: SampleSettings, history_WV: torch.Tensor | None
) -> torch.Tensor:
    """Apply bias and mask, then the repetition, frequency and presence penalties, as vLLM does."""
    if len(settings.bias_E):
        starts_S, ends_S = settings.words_SP[:, BIAS_START], settings.words_SP[:, BIAS_END]
        counts_S = ends_S - starts_S
        row_E = torch.repeat_interleave(counts_S)
        # the rows may be only some of the packed rows; the masks follow the biases of all rows
        before_S = counts_S.cumsum(0) - counts_S
        index_E = torch.arange(len(row_E), device=row_E.device) + (starts_S - before_S)[row_E]
        bias_E = settings.bias_E[index_E]
        values_E = bias_E.to(torch.int32).view(torch.float32)
        logits_SV = logits_SV.index_put((row_E, bias_E >> 32), values_E, accumulate=True)
        # an infinite logit of a forbidden token gives NaN
        logits_SV = logits_SV.masked_fill(logits_SV.isnan(), -torch.inf)
        logits_SV = _masked(logits_SV, settings.column("mask_start"), settings.bias_E)
    if history_WV is None:
        return logits_SV
    row_S = settings.column("history_row")
    history_SV = history_WV[row_S.clamp(min=0)] * (row_S >= 0)[:, None]
    repetition_S1, frequency_S1, presence_S1 = (
        settings.column(f"{name}_penalty")[:, None]
        for name in ("repetition", "frequency", "presence")
    )
    repeated_SV = torch.where(logits_SV > 0, logits_SV / repetition_S1, logits_SV * repetition_S1)
    logits_SV = torch.where(history_SV > 0, repeated_SV, logits_SV)
    count_SV = (history_SV >> 1).float()
    return logits_SV - frequency_S1 * count_SV - presence_S1 * (count_SV > 0)


def _masked(logits_SV: torch.Tensor, start_S: torch.Tensor, bias_E: torch.Tensor) -> torch.Tensor:
    """Set tokens to -inf whose bit in the row's mask is 0."""
    masked_M = (start_S >= 0).nonzero()[:, 0]
    if not len(masked_M):
        return logits_SV
    token_V = torch.arange(logits_SV.shape[1], device=logits_SV.device)
    word_MV = bias_E[start_S[masked_M, None] + token_V // MASK_BITS]
    forbidden_MV = (word_MV >> (token_V % MASK_BITS)) & 1 == 0
    return logits_SV.index_put(
        (masked_M,), logits_SV[masked_M].masked_fill(forbidden_MV, -torch.inf)
    )


def filter_logits(
    logits_SV: torch.Tensor, min_p_S: torch.Tensor, top_k_S: torch.Tensor, top_p_S: torch.Tensor
) -> torch.Tensor:
    """Set tokens to -inf that min_p, then top_k, then top_p exclude.

    The likeliest token always stays.
    """
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
    bits_SV = _mix(key_S[:, None] + token_V * GOLDEN)
    # the 23 high bits plus a half, so never 0 or 1
    uniform_SV = ((_shift(bits_SV, 41)).float() + 0.5) * 2.0**-23
    return -(-uniform_SV.log()).log()


def row_logprobs(
    raw_SV: torch.Tensor, tokens_S: torch.Tensor, settings: SampleSettings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log probabilities of drawn and likeliest tokens: the last three fields of Samples."""
    logprobs_SV = raw_SV.log_softmax(-1)
    drawn_S = logprobs_SV.gather(1, tokens_S.clamp(min=0)[:, None])[:, 0]
    count = min(settings.num_logprobs, raw_SV.shape[1])
    top_SN = _likeliest(logprobs_SV, count)
    values_SN = logprobs_SV.gather(1, top_SN)
    beyond_SN = (
        torch.arange(count, device=raw_SV.device) >= settings.column("num_logprobs")[:, None]
    )
    return (
        drawn_S,
        top_SN.masked_fill(beyond_SN, -1),
        values_SN.masked_fill(beyond_SN, -torch.inf),
    )


def _likeliest(logprobs_SV: torch.Tensor, count: int) -> torch.Tensor:
    """Return the tokens [S, count] of the largest values; among equals the lower id comes first.

    It searches over unique integers: a stable sort of a whole row takes ten times as long.
    """
    if count == 0:
        return torch.empty(len(logprobs_SV), 0, dtype=torch.int64, device=logprobs_SV.device)
    # negated values are at least 0, so their bits sort like the values; 0.0 - x also removes -0.0
    bits_SV = (0.0 - logprobs_SV).view(torch.int32).to(torch.int64)
    token_V = torch.arange(logprobs_SV.shape[1], device=logprobs_SV.device)
    return (bits_SV << 32 | token_V).topk(count, largest=False, sorted=True).values & 0xFFFFFFFF


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's step (Steele, Lea, Flood 2014)."""
    x = x + GOLDEN
    x = (x ^ _shift(x, 30)) * MIX_1
    x = (x ^ _shift(x, 27)) * MIX_2
    return x ^ _shift(x, 31)
