"""Sums over two ranks whose rows are copied while later rows are computed."""

import multiprocessing
import random
import time

import pytest
import torch

from qkernels.collective import pair_sum, reference
from qkernels.collective.channels import PAIR_MAX_BYTES, PeerLayout
from qkernels.collective.pair_sum import PairSum
from qkernels.errors import KernelError
from qkernels.rowwise import norm
from qkernels.rowwise.spec import PLAIN, NormSpec
from tests.qkernels.conftest import ON_GPU
from tests.qkernels.interpreter.test_collective import of_ranks
from tests.qkernels.ranks import CHANNELS, PAIR_ROWS, results_of_ranks

ENDS = {1: [1], 7: [3, 4, 7], 24: [24], PAIR_ROWS: [16, 32, PAIR_ROWS]}  # rows -> ends of chunks


def begun(x_MC, peers, ends, before=lambda: None):
    """The sum of x, whose rows are written chunk by chunk, each after the one before is sent."""
    written_MC = torch.full_like(x_MC, float("nan"))
    found = PairSum(written_MC, peers)
    for start, stop in zip([0, *ends], ends, strict=False):
        before()
        written_MC[start:stop] = x_MC[start:stop]
        found.send(start, stop)
    return found


def test_sums_equal_other_kernels_bitwise(device, half):
    """Ranks are late by turns; each phase of the buffer is used several times."""
    given = [
        of_ranks(2, rows, CHANNELS, dtype=half, device=device, seed=seed)
        for seed, rows in enumerate((7, PAIR_ROWS, 1, 24, PAIR_ROWS, 7))
    ]

    def work(peers):
        delays = random.Random(peers.rank)

        def late():
            if not ON_GPU:
                time.sleep(0.03 * delays.random())

        return [begun(x[peers.rank], peers, ENDS[x.shape[1]], late).total().clone() for x in given]

    want = [reference.all_reduce(list(x)).cpu() for x in given]
    for found in results_of_ranks(2, work, device):
        assert all(map(torch.equal, found, want))


def test_norm_of_a_sum(device, half):
    x = of_ranks(2, 7, CHANNELS, dtype=half, device=device)
    residual = of_ranks(1, 7, CHANNELS, dtype=half, device=device, seed=1)[0]
    spec = NormSpec(weight_C=torch.rand(CHANNELS).to(device, half), eps=1e-5)

    def work(peers):
        summed = begun(x[peers.rank], peers, ENDS[7])
        return list(summed.norm(residual, spec, None, PLAIN))

    want = norm.norm(reference.all_reduce(list(x)), residual, spec)
    for found in results_of_ranks(2, work, device):
        for got, expected in zip(found, want, strict=True):
            assert torch.equal(got, expected.cpu())


@pytest.mark.skipif(ON_GPU, reason="streams of one GPU take turns by themselves")
@pytest.mark.parametrize("phases", [2, 1])
def test_buffer_is_not_overwritten_before_slow_rank_reads(device, half, phases):
    """With one phase (a planted fault) the fast rank overwrites them."""
    given = [of_ranks(2, 7, CHANNELS, dtype=half, device=device, seed=seed) for seed in range(4)]
    sent = [multiprocessing.get_context("fork").Event() for _ in given]  # by the fast rank

    def work(peers):
        found = []
        for number, x in enumerate(given):
            if phases == 1:
                peers.pair.phase = 0
            summed = begun(x[peers.rank], peers, ENDS[7])
            if peers.rank == 0:
                sent[number].set()
            summed.received()
            if peers.rank == 1 and number + 1 < len(given):
                assert sent[number + 1].wait(60)
            found.append(summed.total())
        return found

    want = [reference.all_reduce(list(x)) for x in given]
    same = [list(map(torch.equal, found, want)) for found in results_of_ranks(2, work, device)]
    assert all(same[0])
    assert all(same[1]) == (phases == 2)


def test_unsent_rows_change_the_result(device, half):
    """Otherwise the tests above would prove nothing."""
    x = of_ranks(2, 7, CHANNELS, dtype=half, device=device)

    def work(peers):
        own = x[peers.rank]
        begun(own, peers, [7]).total()  # as many bytes in the other phase
        summed = PairSum(own, peers)
        summed.send(0, 6)
        return [summed.total()]

    want = reference.all_reduce(list(x)).cpu()
    for (found,) in results_of_ranks(2, work, device):
        assert torch.equal(found[:6], want[:6]) and not torch.equal(found[6], want[6])


def test_unread_sum_changes_nothing(device, half):
    given = [of_ranks(2, 7, CHANNELS, dtype=half, device=device, seed=seed) for seed in range(5)]

    def work(peers):
        found = []
        for number, x in enumerate(given):
            summed = begun(x[peers.rank], peers, ENDS[7])
            if number % 2 == 0:
                found.append(summed.total())
        return found

    want = [reference.all_reduce(list(x)).cpu() for x in given[::2]]
    for found in results_of_ranks(2, work, device):
        assert all(map(torch.equal, found, want))


def test_only_the_last_sum_is_read(device, half):
    x = of_ranks(2, 1, CHANNELS, dtype=half, device=device)

    def work(peers):
        first, second = (begun(x[peers.rank], peers, [1]) for _ in range(2))
        with pytest.raises(KernelError, match="before this one was read"):
            first.received()
        return [second.total()]

    results_of_ranks(2, work, device)


def test_sums_larger_than_buffer_are_refused(device, half):
    def work(peers):
        large = torch.zeros(PAIR_ROWS + 1, CHANNELS, dtype=half, device=device)
        assert not pair_sum.takes_pair_sum(large, peers)
        with pytest.raises(KernelError, match="call all_reduce"):
            PairSum(large, peers)
        assert pair_sum.takes_pair_sum(large[1:], peers)
        with pytest.raises(KernelError, match="contiguous"):
            PairSum(large[1:, 1:], peers)
        return []

    results_of_ranks(2, work, device)
    layout = PeerLayout.of_model(3, CHANNELS, None, PAIR_ROWS)
    assert layout.pair_bytes == 0
    most = PeerLayout.of_model(2, CHANNELS, None, 2**20).pair_bytes
    assert 0.99 * PAIR_MAX_BYTES < most <= PAIR_MAX_BYTES + 255
