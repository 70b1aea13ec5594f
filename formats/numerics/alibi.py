"""Slopes of ALiBi: a head adds slope * (key's position - query's position) to its scores."""


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slope of each head, as in BLOOM and MPT.

    If the number of heads n is a power of two, head i has 2^(-8 (i + 1) / n). Otherwise the heads
    take every second slope of the next power of two, then the skipped ones, as far as needed.
    """
    count = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-8 * (head + 1) / count) for head in range(count)]
    return slopes if count == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


def ling_decay_factor(layer: int, num_layers: int) -> float:
    """Return the factor that turns ALiBi slopes into -log of decays in Ling's lightning attention.

    Later layers have smaller ones. The published code counts layers from -1 here, vLLM and SGLang
    from 0.
    """
    return 1 - (layer - 1) / max(num_layers - 1, 1) + 1e-5
