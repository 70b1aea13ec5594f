"""Dense bit packing of small unsigned codes into int32 words.

Along one dimension, codes form a little-endian bit stream: code i takes bits [i*b, (i+1)*b), and
stream bit j is bit j % 32 of word j // 32. For b = 4, word 0 is  c7 c6 c5 c4 c3 c2 c1 c0  (high to
low nibble). A code may straddle two words (b = 3, 5, 6, 7). Words are unsigned, stored in
torch.int32.
"""

import math

import torch

from formats.errors import SchemeError

# Tensors of up to this many words are unpacked in one pass, which takes less time and more memory
# than code by code. A layer may have thousands of small tensors: the zeros of its experts.
FEW_WORDS = 2**14


def _period(bits: int) -> tuple[int, int]:
    """Return the shortest run of codes that fills whole words: (codes, words)."""
    words = bits // math.gcd(32, bits)
    return words * 32 // bits, words


def code_multiple(bits: int) -> int:
    """Return the number of codes after which a code starts at a word boundary again."""
    return _period(bits)[0]


def packed_length(length: int, bits: int) -> int:
    """Return the words for `length` codes. Raises SchemeError if the last word is not full."""
    codes, words = _period(bits)
    if length % codes:
        raise SchemeError(
            f"{length} codes of {bits} bits",
            f"the number must be divisible by {codes}",
            "pad the codes to a multiple",
        )
    return length // codes * words


def pack(codes: torch.Tensor, bits: int, dim: int = -1) -> torch.Tensor:
    """Pack codes, each in 0..2^bits-1, along `dim`: D codes become D*bits/32 int32 words."""
    codes = codes.movedim(dim, -1)
    num_words = packed_length(codes.shape[-1], bits)
    period_codes, period_words = _period(bits)
    codes = codes.unflatten(-1, (-1, period_codes))
    words = torch.zeros(*codes.shape[:-1], period_words, dtype=torch.int32, device=codes.device)
    for i in range(period_codes):
        word, offset = divmod(i * bits, 32)
        code = codes[..., i].to(torch.int32)
        words[..., word] |= code << offset
        if offset + bits > 32:
            words[..., word + 1] |= code >> (32 - offset)
    return words.flatten(-2).view(*codes.shape[:-2], num_words).movedim(-1, dim).contiguous()


def unpack(words: torch.Tensor, bits: int, dim: int = -1) -> torch.Tensor:
    """Unpack int32 words along `dim` to uint8 codes."""
    words = words.movedim(dim, -1)
    period_codes, period_words = _period(bits)
    if words.shape[-1] % period_words:
        raise SchemeError(
            f"{words.shape[-1]} words of {bits}-bit codes",
            f"the number must be divisible by {period_words}",
            "download the checkpoint again",
        )
    mask = 2**bits - 1
    if period_words == 1 and words.numel() <= FEW_WORDS:
        offsets = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
        codes = (words.unsqueeze(-1) >> offsets).bitwise_and_(mask).to(torch.uint8)
        return codes.flatten(-2).movedim(-1, dim).contiguous()
    words = words.unflatten(-1, (-1, period_words))
    codes = torch.empty(*words.shape[:-1], period_codes, dtype=torch.uint8, device=words.device)
    for i in range(period_codes):
        word, offset = divmod(i * bits, 32)
        # >> is an arithmetic shift: the mask removes the copies of the sign bit
        code = words[..., word] >> offset
        if offset + bits > 32:
            low = 32 - offset
            code = (code & (2**low - 1)) | (words[..., word + 1] << low)
        codes[..., i] = (code & mask).to(torch.uint8)
    return codes.flatten(-2).movedim(-1, dim).contiguous()
