"""Rotary position embedding: the table of cosines and sines, for all scaling types.

D: rotated dimensions of a head, all or the first ones. Dimension i is paired with i + D/2 (NeoX),
or dimension 2 i with 2 i + 1 if the rope is interleaved.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from formats.architecture.rope_types import ROPE_DEFAULT, ROPE_TYPES
from formats.errors import COPY_CONFIG, InputError, one_line
from formats.files.json_file import fits_float32


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of a layer, from `rope_parameters` of config.json."""

    type: str
    theta: float
    dim: int
    max_position: int  # max_position_embeddings
    parameters: dict[str, Any]  # parameters of the scaling type
    interleaved: bool = False
    is_reversed: bool = False  # True: pairs are rotated in the opposite direction

    @classmethod
    def from_dict(
        cls,
        rope: dict[str, Any],
        *,
        dim: int,
        max_position: int,
        interleaved: bool = False,
        is_reversed: bool = False,
    ) -> "RopeConfig":
        """Create a RopeConfig. Raises InputError for an unsupported scaling type."""
        kind = rope.get("rope_type", ROPE_DEFAULT)
        if kind not in ROPE_TYPES:
            known = ", ".join(ROPE_TYPES)
            raise InputError(
                "config.json rope_type",
                f"expected one of {known}, found {kind!r}",
                COPY_CONFIG,
            )
        theta, rotated = (
            float(rope["rope_theta"]),
            int(dim * rope.get("partial_rotary_factor", 1.0)),
        )
        if kind == "proportional":  # the table has all pairs, some with frequency 0
            rotated = dim
        if kind == "dynamic" and rope.get("alpha"):  # Hunyuan's type, the same for all lengths
            kind, theta = ROPE_DEFAULT, theta * rope["alpha"] ** (rotated / (rotated - 2))
        return cls(
            type=kind,
            theta=theta,
            dim=rotated,
            max_position=max_position,
            parameters=dict(rope),
            interleaved=interleaved,
            is_reversed=is_reversed,
        )

    def check_length(self, max_model_len: int) -> None:
        """Raise InputError if "dynamic" scaling would change cached keys within this length."""
        if self.type == "dynamic" and max_model_len > self.max_position:
            raise InputError(
                "--max-model-len",
                f"dynamic rope scaling recomputes earlier keys beyond {self.max_position} tokens,"
                " which is impossible with a KV cache",
                f"use --max-model-len {self.max_position}",
            )


def cos_sin_table(rope: RopeConfig, length: int, device: torch.device) -> torch.Tensor:
    """Return float32 [length, D]: D/2 cosines, then D/2 sines, for each position."""
    frequencies, scale = inverse_frequencies(rope, length)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos() * scale, angles.sin() * scale], -1).to(device)


def inverse_frequencies(rope: RopeConfig, length: int) -> tuple[torch.Tensor, float]:
    """Return the angle per position of each of D/2 pairs, and the factor of cosines and sines.

    `length`: maximum number of positions of a sequence. Raises InputError if the values in
    config.json give non-finite angles.
    """
    try:
        frequencies, scale = _inverse_frequencies(rope, length)
    except (ArithmeticError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, InputError):
            raise
        raise _invalid_rope(rope, f"{type(error).__name__}: {one_line(error)}") from None
    if not (frequencies.isfinite().all() and math.isfinite(scale)):
        raise _invalid_rope(rope, "found angles that are not finite")
    return -frequencies if rope.is_reversed else frequencies, scale


def _invalid_rope(rope: RopeConfig, problem: str) -> InputError:
    stated = {name: rope.parameters[name] for name in sorted(rope.parameters)}
    return InputError(
        "config.json rope_parameters",
        f"{stated!r:.300} give no valid rotary embedding: {problem}",
        "copy config.json from the float model",
    )


def _inverse_frequencies(rope: RopeConfig, length: int) -> tuple[torch.Tensor, float]:
    if not (rope.theta > 0 and fits_float32(rope.theta)):
        raise ValueError(f"expected a rope_theta above 0 and within float32, found {rope.theta}")
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    periods = rope.theta**exponents
    plain = 1.0 / periods
    if rope.type == "proportional":
        turning = int(rope.parameters.get("partial_rotary_factor", 1.0) * rope.dim // 2)
        pairs = torch.arange(len(plain))
        return plain.where(pairs < turning, 0) / rope.parameters.get("factor", 1.0), 1.0
    if rope.type == "linear":
        return plain / rope.parameters["factor"], 1.0
    if rope.type == "llama3":
        return _llama3(plain, rope.parameters), 1.0
    if rope.type == "yarn":
        return _yarn(plain, rope)
    if rope.type == "longrope":
        return _longrope(periods, rope, length)
    return plain, 1.0  # "dynamic" equals "default" up to max_position (RopeConfig.check_length)


def _llama3(plain: torch.Tensor, parameters: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1: divide long wavelengths by the factor, keep short ones, interpolate between."""
    factor = parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * plain / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / factor + smooth * plain


def _yarn(plain: torch.Tensor, rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071), with the DeepSeek mscale keys."""
    parameters = rope.parameters
    factor = parameters["factor"]
    original = parameters.get("original_max_position_embeddings") or rope.max_position

    def pair_of(turns: float) -> float:
        """Return the index of the pair that makes `turns` full turns over the original length."""
        span = original / (turns * 2 * math.pi)
        return rope.dim * math.log(span) / (2 * math.log(rope.theta))

    low = pair_of(parameters.get("beta_fast") or 32)
    high = pair_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(len(plain), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = plain / factor * ramp + plain * (1 - ramp)

    if parameters.get("attention_factor") is not None:
        return frequencies, float(parameters["attention_factor"])
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        mscale, every = parameters["mscale"], parameters["mscale_all_dim"]
        return frequencies, yarn_magnitude(factor, mscale) / yarn_magnitude(factor, every)
    return frequencies, yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Return YaRN's attention factor for a context that was extended by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(periods: torch.Tensor, rope: RopeConfig, length: int) -> tuple[torch.Tensor, float]:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): a factor for each pair.

    transformers switches from short to long factors when a sequence exceeds the original length,
    and recomputes all keys, which is impossible with a KV cache. Here, as in vLLM, the maximum
    sequence length selects the factors.
    """
    parameters = rope.parameters
    original = parameters["original_max_position_embeddings"]
    factors = parameters["long_factor" if length > original else "short_factor"]
    if len(factors) != len(periods):
        raise InputError(
            "config.json long_factor and short_factor",
            f"expected {len(periods)} numbers, one for each pair, found {len(factors)}",
            "copy config.json from the float model",
        )
    factor = parameters.get("factor") or rope.max_position / original
    scale = parameters.get("long_mscale" if length > original else "short_mscale")  # PhiMoE
    scale = parameters.get("attention_factor") if scale is None else scale
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * periods), float(scale)
