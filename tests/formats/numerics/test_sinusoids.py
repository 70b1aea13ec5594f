"""Sinusoids of positions are transformers', for odd widths and any padding token."""

import pytest
import torch
from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding

from formats.numerics.sinusoids import sinusoids


@pytest.mark.parametrize(("count", "width"), [(40, 64), (7, 33), (130, 6)])
@pytest.mark.parametrize("zero_row", [None, 1, 6])
def test_sinusoids_equal_transformers(count, width, zero_row):
    want = XGLMSinusoidalPositionalEmbedding.get_embedding(count, width, zero_row)
    found = sinusoids(count, width, zero_row)
    assert torch.equal(found, want)
    assert (found.abs().sum(1) == 0).nonzero().flatten().tolist() == (
        [] if zero_row is None else [zero_row]
    )


def test_padding_index_beyond_table_is_ignored():
    assert torch.equal(sinusoids(9, 8, 50), sinusoids(9, 8))
