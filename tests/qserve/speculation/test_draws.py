"""Drafts that are drawn together are those that are drawn one by one."""

import pytest
import torch

from qkernels.drafts.reference import draft_words
from qkernels.sampling.words import SampleRow, pack_row
from qserve.speculation.draws import Draws

K, V = 3, 50


@pytest.mark.parametrize("rejection", [False, True])
def test_verify_draws_equal_single_draws(rejection):
    logits_KDV = torch.randn(K, 2, V, generator=torch.Generator().manual_seed(1))
    rows = [SampleRow(temperature=0.0), SampleRow(temperature=1.0, seed=7, position=4)]
    words_DP = torch.tensor([(*pack_row(row), 0, 0) for row in rows])
    made = []
    for _ in range(2):
        kept = [] if rejection else None
        words_KDP = draft_words(words_DP, K + 1)  # of one more row than there are drafts
        made.append(Draws(words_KDP=words_KDP, any_random=True, any_filter=False, kept=kept))
    together, apart = made
    found_KD = together.draw_all(logits_KDV)
    assert found_KD.tolist() == [apart.draw(logits_KDV[k], k).tolist() for k in range(K)]
    assert found_KD[:, 0].tolist() == logits_KDV[:, 0].argmax(-1).tolist()
    if rejection:
        assert len(together.kept) == K
        torch.testing.assert_close(torch.stack(together.kept), torch.stack(apart.kept))
