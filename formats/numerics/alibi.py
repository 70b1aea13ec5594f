"""Slopes of ALiBi: a head adds slope * (key's position - query's position) to its scores."""


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slope of each head, as BLOOM and MPT have them.

    Head i of a power of two n has 2^(-8 (i + 1) / n). Other numbers of heads take every second
    slope of the next power of two, then those left out, as far as needed.
    """
    count = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-8 * (head + 1) / count) for head in range(count)]
    return slopes if count == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]
