"""Grids of GGUF's K-quants: quantized scales and minima; conversion of codes to blocks and back.

    W[n, k] = d[n, b] · scale[n, g] · (code[n, k] − zero) − dmin[n, b] · minimum[n, g]

d and dmin are float16 numbers of a block of 256 inputs. Scales and minima of a group are integers.
Types with minima have no zero: Q4_K and Q5_K (6 bits, groups of 32), Q2_K (4 bits, groups of 16).
Types without minima have signed scales: Q6_K (8 bits, groups of 16, zero 32), Q3_K (6 bits, groups
of 16, zero 4), IQ4_XS (6 bits, groups of 32; code − 128 is the value of the file's 4-bit code). A
block of Q4_1 or Q5_1 is a group of 32 with scale and minimum 1; the file stores −dmin. Legend: N
outputs, K inputs, B blocks of a row, G groups of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from formats.gguf.block_types import BY_NAME
from formats.gguf.blocks import (
    iq4_xs_scales,
    iq4_xs_values,
    k_scales,
    nibbles,
    q2_codes,
    q3_codes,
    q3_scales,
    q5_codes,
    q5_k_codes,
    q6_codes,
)
from formats.scheme import BLOCK_TYPES, K_BLOCK, QuantSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KGrid:
    """Values that the weights of a K-quant may take; codes choose among them."""

    spec: QuantSpec
    d_NB: torch.Tensor  # float16
    dmin_NB: torch.Tensor  # float16; zeros without minima
    scales_NG: torch.Tensor  # int16
    minima_NG: torch.Tensor  # int16; zeros without minima

    @property
    def length(self) -> int:
        """Inputs per group."""
        return BLOCK_TYPES[self.spec.type][2]

    @property
    def has_minima(self) -> bool:
        """Return False if groups have only a scale: codes then have a zero."""
        return not self.spec.symmetric

    def steps(self) -> torch.Tensor:
        """Return the distance between neighboring values, float32 [N, G]; may be 0 or negative."""
        return _of_groups(self.d_NB, self.scales_NG) * self.scales_NG

    def lows(self) -> torch.Tensor:
        """Return the negated value of code 0, float32 [N, G]."""
        if not self.has_minima:
            return self.steps() * self.spec.symmetric_zero
        return _of_groups(self.dmin_NB, self.minima_NG) * self.minima_NG

    def nearest(self, weight_NK: torch.Tensor) -> torch.Tensor:
        """Return the code of the nearest value, uint8 [N, K]."""
        groups_NGL = weight_NK.float().unflatten(1, (self.scales_NG.shape[1], -1))
        steps_NG1, lows_NG1 = self.steps()[..., None], self.lows()[..., None]
        return nearest_codes(groups_NGL, steps_NG1, lows_NG1, self.spec.max_code).flatten(1)

    def rows(self, start: int, stop: int) -> "KGrid":
        """Return the grid of some outputs."""
        return self._map(lambda tensor: tensor[start:stop])

    @staticmethod
    def merge(parts: "list[KGrid]") -> "KGrid":
        """Stack the outputs of several grids."""
        tensors = {
            field.name: torch.cat([getattr(part, field.name) for part in parts])
            for field in fields(KGrid)
            if field.name != "spec"
        }
        return KGrid(spec=parts[0].spec, **tensors)

    def blocks(self, codes_NK: torch.Tensor) -> torch.Tensor:
        """Return the rows of a GGUF file, uint8 [N, row bytes], for codes [N, K] of K_TYPES."""
        codes_XL = codes_NK.reshape(-1, K_BLOCK).to(torch.uint8)
        d_X2 = self.d_NB.reshape(-1, 1).view(torch.uint8)
        scales = self.scales_NG.reshape(len(codes_XL), -1)
        if not self.has_minima:
            parts = [*_q6_codes(codes_XL), scales.to(torch.int8).view(torch.uint8), d_X2]
        else:
            minima = self.minima_NG.reshape(len(codes_XL), -1)
            dmin_X2 = self.dmin_NB.reshape(-1, 1).view(torch.uint8)
            parts = [d_X2, dmin_X2, _packed_scales(scales.to(torch.uint8), minima.to(torch.uint8))]
            if self.spec.bits == 5:
                parts.append(_fifth_bits(codes_XL))
            parts.append(_nibbles(codes_XL & 15))
        return torch.cat(parts, 1).reshape(len(codes_NK), -1)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "KGrid":
        tensors = {
            field.name: change(getattr(self, field.name))
            for field in fields(self)
            if field.name != "spec"
        }
        return KGrid(spec=self.spec, **tensors)


def read_blocks(bytes_NX: torch.Tensor, spec: QuantSpec) -> tuple[torch.Tensor, KGrid]:
    """Return the codes, uint8 [N, K], and the grid of a GGUF file's rows of BLOCK_TYPES."""
    kind, N = BY_NAME[spec.type.upper()], len(bytes_NX)
    blocks_XB = bytes_NX.reshape(-1, kind.num_bytes)
    codes_XL, d, dmin, scales, minima = _READERS[spec.type](blocks_XB)
    grid = KGrid(
        spec=spec,
        d_NB=d.reshape(N, -1),
        dmin_NB=dmin.reshape(N, -1),
        scales_NG=scales.to(torch.int16).reshape(N, -1),
        minima_NG=minima.to(torch.int16).reshape(N, -1),
    )
    return codes_XL.reshape(N, -1), grid


# of blocks [X, bytes]: codes [X, length], d, dmin [X, 1], scales, minima [X, groups]
_Fields = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _without_minima(codes: torch.Tensor, d: torch.Tensor, scales: torch.Tensor) -> _Fields:
    return codes, d, torch.zeros_like(d), scales, torch.zeros_like(scales)


def _read_min(blocks_XB: torch.Tensor, codes: torch.Tensor) -> _Fields:
    d, dmin = _float16(blocks_XB, 0), -_float16(blocks_XB, 2)
    ones = torch.ones_like(d, dtype=torch.int16)
    return codes, d, dmin, ones, ones


def _read_k(blocks_XB: torch.Tensor, codes: torch.Tensor) -> _Fields:
    return codes, _float16(blocks_XB, 0), _float16(blocks_XB, 2), *k_scales(blocks_XB[:, 4:16])


def _read_q2_k(blocks_XB: torch.Tensor) -> _Fields:
    both, codes = blocks_XB[:, :16], q2_codes(blocks_XB[:, 16:80])
    return codes, _float16(blocks_XB, 80), _float16(blocks_XB, 82), both & 15, both >> 4


def _read_q6_k(blocks_XB: torch.Tensor) -> _Fields:
    scales = blocks_XB[:, 192:208].view(torch.int8)
    return _without_minima(q6_codes(blocks_XB), _float16(blocks_XB, 208), scales)


def _read_iq4_xs(blocks_XB: torch.Tensor) -> _Fields:
    codes = (iq4_xs_values(blocks_XB) + 128).to(torch.uint8)
    return _without_minima(codes, _float16(blocks_XB, 0), iq4_xs_scales(blocks_XB))


_READERS: dict[str, Callable[[torch.Tensor], _Fields]] = {
    "q2_k": _read_q2_k,
    "q3_k": lambda b: _without_minima(q3_codes(b), _float16(b, 108), q3_scales(b)),
    "q4_k": lambda b: _read_k(b, torch.cat([nibbles(part) for part in b[:, 16:].split(32, 1)], 1)),
    "q5_k": lambda b: _read_k(b, q5_k_codes(b)),
    "q6_k": _read_q6_k,
    "iq4_xs": _read_iq4_xs,
    "q4_1": lambda b: _read_min(b, nibbles(b[:, 4:])),
    "q5_1": lambda b: _read_min(b, q5_codes(b, 4)),
}


def _float16(blocks_XB: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 number at a byte of each block, [X, 1]."""
    return blocks_XB[:, at : at + 2].contiguous().view(torch.float16)


def nearest_codes(
    weights: torch.Tensor, steps: torch.Tensor, lows: torch.Tensor, last: int
) -> torch.Tensor:
    """Return the codes 0 to `last`, uint8, whose values step · code − low are nearest to weights.

    A group with a step of 0 gets code 0.
    """
    divisors = torch.where(steps == 0, 1.0, steps)
    codes = ((weights + lows) / divisors).round_().clamp_(0, last)
    return torch.where(steps == 0, 0.0, codes).to(torch.uint8)


def _of_groups(of_blocks_NB: torch.Tensor, of_groups_NG: torch.Tensor) -> torch.Tensor:
    """Repeat the number of each block for all of its groups, float32 [N, G]."""
    repeats = of_groups_NG.shape[1] // of_blocks_NB.shape[1]
    return of_blocks_NB.float().repeat_interleave(repeats, 1)


def _packed_scales(scales_X8: torch.Tensor, minima_X8: torch.Tensor) -> torch.Tensor:
    """Pack eight 6-bit scales and minima into 12 bytes; k_scales in blocks.py reads them."""
    (first, second), (low, high) = scales_X8.split(4, 1), minima_X8.split(4, 1)
    return torch.cat(
        [first | second >> 4 << 6, low | high >> 4 << 6, (second & 15) | (high & 15) << 4], 1
    )


def _nibbles(codes_XL: torch.Tensor) -> torch.Tensor:
    """Pack two groups of 32 codes into 32 bytes, the first group in the low four bits."""
    pairs = codes_XL.unflatten(1, (-1, 2, 32))
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)


def _fifth_bits(codes_XL: torch.Tensor) -> torch.Tensor:
    """Return 32 bytes; bit g of byte l is the fifth bit of element l in group g."""
    groups = codes_XL.unflatten(1, (8, 32)) >> 4
    return sum(groups[:, g] << g for g in range(8))


def _q6_codes(codes_XL: torch.Tensor) -> list[torch.Tensor]:
    """Return the low four bits, 128 bytes, and the high two, 64 bytes, of 6-bit codes."""
    quarters = codes_XL.unflatten(1, (2, 4, 32))  # of each half
    low = (quarters & 15)[:, :, :2] | (quarters & 15)[:, :, 2:] << 4
    high = sum((quarters >> 4)[:, :, i] << 2 * i for i in range(4))
    return [low.flatten(1), high.flatten(1)]
