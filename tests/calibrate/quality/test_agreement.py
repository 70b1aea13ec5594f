"""Agreement of two models: judged by float64 formulas over all positions."""

import math

import pytest
import torch

from calibrate.quality.agreement import ROWS, compare_logits
from calibrate.quality.table import agreement_table
from formats.errors import InputError


def tables(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    reference_VV = 3 * torch.randn(size, size, generator=generator)
    return reference_VV, reference_VV + torch.randn(size, size, generator=generator)


def test_means_weight_tokens_equally():
    generator = torch.Generator().manual_seed(1)
    windows = torch.randint(0, 31, (3, ROWS + 40), generator=generator)  # two blocks of rows
    reference_VV, other_VV = tables(31)
    found = compare_logits(
        windows, lambda ids: reference_VV[ids], lambda ids: other_VV[ids], progress=False
    )
    p, q = reference_VV.double().log_softmax(-1), other_VV.double().log_softmax(-1)
    first, target = windows[:, :-1].flatten(), windows[:, 1:].flatten()
    divergence_T = (p.exp() * (p - q)).sum(-1)[first]
    assert found.tokens == len(target) == 3 * (ROWS + 39)
    assert found.divergence == pytest.approx(float(divergence_T.mean()), rel=1e-5)
    assert found.largest_divergence == pytest.approx(float(divergence_T.max()), rel=1e-5)
    for value, logs in ((found.reference_perplexity, p), (found.perplexity, q)):
        assert value == pytest.approx(math.exp(-float(logs[first, target].mean())), rel=1e-5)
    same = (p.argmax(-1) == q.argmax(-1))[first]
    assert found.same_top_token == pytest.approx(float(same.double().mean()))
    assert 0 < found.same_top_token < 1


def test_equal_models_agree():
    windows = torch.arange(12).view(2, 6)
    table, _ = tables(12)
    found = compare_logits(windows, lambda ids: table[ids], lambda ids: table[ids], progress=False)
    assert (found.divergence, found.same_top_token) == (0, 1)
    assert found.perplexity == found.reference_perplexity


def test_tokens_added_by_tokenizer_are_not_counted():
    windows = torch.tensor([[1, 3, 4, 1, 5], [1, 1, 1, 1, 2]])
    reference_VV, other_VV = tables(6)
    found = compare_logits(
        windows, lambda ids: reference_VV[ids], lambda ids: other_VV[ids], [1], progress=False
    )
    p, q = reference_VV.double().log_softmax(-1), other_VV.double().log_softmax(-1)
    divergence_V = (p.exp() * (p - q)).sum(-1)
    assert found.tokens == 4  # 3, 4, 5 and 2, after 1, 3, 1 and 1
    expected = float(divergence_V[[1, 3, 1, 1]].mean())
    assert found.divergence == pytest.approx(expected, rel=1e-5)
    with pytest.raises(InputError, match="no token to predict"):
        compare_logits(windows[:, :1].repeat(1, 3), lambda i: i, lambda i: i, [1], progress=False)


@pytest.mark.parametrize("broken", ["reference", "model"])
def test_nonfinite_logits_error_names_model(broken):
    good, bad = torch.zeros(4, 5), torch.full((4, 5), math.nan)
    pair = (bad, good) if broken == "reference" else (good, bad)
    with pytest.raises(InputError, match=f"window 1: the {broken}'s logits contain NaN"):
        compare_logits(torch.ones(1, 4).long(), *(lambda _, v=v: v for v in pair), progress=False)


def test_table_names_both_models():
    table, other = tables(9)
    windows = torch.arange(8).view(1, 8)
    found = compare_logits(windows, lambda ids: table[ids], lambda ids: other[ids], progress=False)
    text = agreement_table(found, "float", "w4", "text.txt")
    lines = text.splitlines()
    assert lines[1].startswith("float") and lines[1].endswith("0           100 %")
    assert lines[2].startswith("w4") and f"{found.divergence:.5f}" in lines[2]
    assert "1 window of 8 tokens of text.txt" in text
