"""Sums over ranks that are separate processes and run in any order."""

import random
import time

import pytest
import torch
import triton.language as tl

from formats.scheme import ActivationSpec
from qkernels.collective import exchange_triton, one_shot, one_shot_norm, ops, reference, two_shot
from qkernels.collective.channels import PeerLostError
from qkernels.operands.codes import Codes, InputRounding
from qkernels.operands.limbs import LimbForm, Limbs
from qkernels.operands.split_k import LinearOutput, SplitKPartials
from qkernels.rowwise.spec import PLAIN, Branch, NormSpec
from tests.qkernels.conftest import ON_GPU
from tests.qkernels.ranks import CHANNELS, results_of_ranks

EXHAUSTIVE = pytest.mark.exhaustive
SIZES = (1, 7, 4096, 16381)  # the last one in float32 fills one shot but for little


def many(*values: object):
    """Parameters that take many processes."""
    return pytest.param(*values, marks=EXHAUSTIVE)


def of_ranks(ranks: int, *shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0):
    """Return numbers of very different sizes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ranks, *shape, generator=generator)
    x *= 2 ** (8 * torch.rand(ranks, *shape, generator=generator) - 4)
    return x.to(dtype).to(device)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


@pytest.mark.parametrize("how", ["one_shot", "two_shot"])
@pytest.mark.parametrize("ranks", [2, 3, many(4), many(8)])
def test_sums_in_rank_order(device, dtype, ranks, how):
    shares = [of_ranks(ranks, size, dtype=dtype, device=device) for size in SIZES]

    def work(peers):
        return [ops.all_reduce(x[peers.rank], peers, how) for x in shares]

    want = [reference.all_reduce(list(x)).cpu() for x in shares]
    for found in results_of_ranks(ranks, work, device):
        for got, expected in zip(found, want, strict=True):
            assert torch.equal(got, expected)


def test_other_rank_order_changes_bits(device):
    """Otherwise the test above would prove nothing."""
    x = of_ranks(3, 4096, dtype=torch.float32, device=device)
    assert not torch.equal(reference.all_reduce(list(x)), reference.all_reduce(list(x.flip(0))))


def test_alternating_calls_of_all_kinds(device):
    """Ranks drift apart by up to one call; phases come round several times, blocks at their own."""
    turns = random.Random(1)
    calls = [turns.choice(["one_shot", "two_shot", "norm", "float32"]) for _ in range(12)]
    sizes = [turns.choice((5, 4097, 9000)) for _ in calls]
    rows = [turns.choice((1, 3, 6)) for _ in calls]
    weight, residual = torch.ones(CHANNELS), torch.zeros(6, CHANNELS)
    weight, residual = weight.half().to(device), residual.half().to(device)

    def shares(i: int) -> torch.Tensor:
        shape = (rows[i], CHANNELS) if calls[i] == "norm" else (sizes[i],)
        dtype = torch.float32 if calls[i] == "float32" else torch.float16
        return of_ranks(2, *shape, dtype=dtype, device=device, seed=i)

    # Made here: on a GPU a copy from the host waits for the stream, whose kernels wait for a rank.
    given = [shares(i) for i in range(len(calls))]

    def work(peers):
        delays = random.Random(peers.rank)
        found = []
        for i, kind in enumerate(calls):
            if not ON_GPU and delays.random() < 0.3:
                time.sleep(0.02 * delays.random())
            x = given[i][peers.rank]
            if kind == "norm":
                spec = NormSpec(weight_C=weight, eps=1e-5)
                _, total = ops.all_reduce_norm(x, residual[: rows[i]], spec, peers)
                found.append(total)
            else:
                found.append(ops.all_reduce(x, peers, "two_shot" if kind == "two_shot" else None))
        return found

    for found in results_of_ranks(2, work, device):
        for i, got in enumerate(found):
            want = reference.all_reduce(list(given[i])).cpu()
            assert torch.equal(got, want), f"call {i}, {calls[i]}"


def slowed(function):
    """A device function of the interpreter that begins late."""

    def late(*arguments, **named):
        time.sleep(0.15)
        return function(*arguments, **named)

    return late


@pytest.mark.skipif(ON_GPU, reason="delays are put into the interpreter")
@pytest.mark.parametrize("kind", ["one_shot", many("two_shot"), "norm"])
def test_slow_reader_receives_all_data(device, half, kind):
    """The other rank sends the next call's data before this one has read, or cleared, what it had.

    It cannot send what comes after that: it needs this rank's data first.
    """
    calls = [of_ranks(2, 1, CHANNELS, dtype=half, device=device, seed=i) for i in range(4)]
    zeros, ones = torch.zeros_like(calls[0][0]), torch.ones_like(calls[0][0, 0])

    def work(peers):
        if peers.rank == 1:
            module = {"one_shot": one_shot, "two_shot": two_shot, "norm": one_shot_norm}[kind]
            module.clear, module.sum_of_ranks = slowed(module.clear), slowed(module.sum_of_ranks)
        if kind != "norm":
            return [ops.all_reduce(x[peers.rank], peers, kind) for x in calls]
        totals = []
        for x in calls:
            spec = NormSpec(weight_C=ones, eps=1e-5)
            out = ops.all_reduce_norm(x[peers.rank], zeros, spec, peers)
            totals.append(out[1])
        return totals

    want = [reference.all_reduce(list(x)) for x in calls]
    for found in results_of_ranks(2, work, device):
        assert all(map(torch.equal, found, want))


def test_payload_equal_to_empty_marker_arrives(device, half):
    """A NaN whose bits are all ones, and both zeros."""
    x = torch.zeros(2, 2000, dtype=torch.int16, device=device)
    x[0, 10:14], x[1, 20] = -1, -1
    x = x.view(half)
    x[:, 30] = -0.0

    def work(peers):
        return [ops.all_reduce(x[peers.rank], peers, how) for how in ("one_shot", "two_shot")]

    first, second = results_of_ranks(2, work, device)
    for got in (*first, *second):
        nan = got.isnan().nonzero().flatten().tolist()
        assert nan == [10, 11, 12, 13, 20] and not got.nan_to_num().any()
    assert all(map(same_bits, first, second))


def flat(out) -> list[torch.Tensor]:
    x, total = out
    if isinstance(x, Codes):
        return [x.codes_MK, x.scales_M1, total]
    if isinstance(x, Limbs):
        return [x.words, x.scales, *([] if x.sums is None else [x.sums]), total]
    return [x, total]


def split(x: torch.Tensor) -> SplitKPartials:
    parts = torch.stack([x.float() * 0.3, x.float() * 0.7, x.float() * 2**-9])
    return SplitKPartials(parts=parts, dtype=x.dtype)


FORMS = {
    "plain": None,
    "int8": InputRounding(ActivationSpec(), None),
    "float8": InputRounding(ActivationSpec(type="float"), None),
    "static": InputRounding(ActivationSpec(dynamic=False, per="tensor"), torch.tensor(0.02)),
    "limbs": LimbForm(bits=4),
    "limbs with sums": LimbForm(bits=8, with_sums=True),
    "limbs beside a tensor": LimbForm(bits=4, with_tensor=True),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("parts", [False, True], ids=["", "split-K"])
@pytest.mark.parametrize("ranks, rows", [(2, 1), (2, 6), (3, 5), many(4, 3), many(8, 2)])
@pytest.mark.parametrize("branch", ["", "branch", "layer norms"])
def test_norm_of_a_sum_over_ranks(device, half, ranks, rows, parts, form, branch):
    form = FORMS[form]
    if isinstance(form, LimbForm):
        rows = min(rows, 4)
    if isinstance(form, InputRounding) and form.scale is not None:
        form = InputRounding(form.activation, form.scale.to(device))
    x = of_ranks(ranks, rows, CHANNELS, dtype=half, device=device)
    shares: list[LinearOutput] = [split(own) if parts else own for own in x]
    residual, weight, behind = (
        of_ranks(1, n, CHANNELS, dtype=half, device=device, seed=n)[0] for n in (rows, 1, 2)
    )
    kind, bias_C = ("layer", behind[0]) if branch == "layer norms" else ("rms", None)
    spec = NormSpec(kind=kind, weight_C=weight[0], bias_C=bias_C, eps=1e-5)
    end = NormSpec(kind=kind, weight_C=behind[1], bias_C=bias_C, eps=1e-5)
    changes = Branch(norm=end, factor=0.5) if branch else PLAIN

    def work(peers):
        assert ops.fuses(shares[peers.rank], form, peers)
        return flat(ops.all_reduce_norm(shares[peers.rank], residual, spec, peers, form, changes))

    first, *others = results_of_ranks(ranks, work, device)
    for found in others:
        defined = slice(-1, None) if isinstance(form, LimbForm) else slice(None)
        # what limbs hold beyond their rows is not defined
        assert all(map(same_bits, first[defined], found[defined]))
    want = flat(reference.all_reduce_norm(shares, residual, spec, form, changes))
    total, want_total = first[-1], want[-1].cpu()
    eps = torch.finfo(half).eps
    exact = not branch and not (parts and ranks > 4)
    off = 0 if exact else 4 * eps * float(want_total.abs().max())
    assert float((total.float() - want_total.float()).abs().max()) <= off
    check_form(form, first[:-1], [each.cpu() for each in want[:-1]], rows, eps)


def check_form(form, got: list[torch.Tensor], want: list[torch.Tensor], rows: int, eps: float):
    if isinstance(form, LimbForm):
        pairs = zip(unpacked(form, got, rows), unpacked(form, want, rows), strict=True)
        a, b = next(pairs)
        assert float((a - b).abs().max()) <= 8 * eps * float(b.abs().max())
    elif isinstance(form, InputRounding):
        assert torch.allclose(got[1], want[1], rtol=8 * eps)
        # of bfloat16 a last bit is a whole code of float8
        share = 0.05 if eps < 1e-3 else 0.15
        assert float((got[0].float() != want[0].float()).float().mean()) < share
    else:
        off = (got[0].float() - want[0].float()).abs().max()
        assert float(off) <= 8 * eps * float(want[0].abs().max())


def unpacked(form: LimbForm, tensors: list[torch.Tensor], rows: int) -> list[torch.Tensor]:
    from qkernels.operands.limbs_reference import from_limbs

    words, scales, *sums = tensors
    sums = sums[0] if sums else None
    return [from_limbs(Limbs(form=form, num_rows=rows, words=words, scales=scales, sums=sums))]


@pytest.mark.parametrize(("ranks", "rows"), [(2, 1), (3, 6), (2, 9), many(4, 3), many(8, 2)])
def test_unequal_shards_send_one_form(device, half, ranks, rows):
    """The last rank has a tensor, the others have partial sums. Nine rows are beyond the norm."""
    x = of_ranks(ranks, rows, CHANNELS, dtype=half, device=device)
    shares: list[LinearOutput] = [*map(split, x[:-1]), x[-1]]
    residual, weight = (
        of_ranks(1, n, CHANNELS, dtype=half, device=device, seed=n)[0] for n in (rows, 1)
    )
    spec = NormSpec(weight_C=weight[0], eps=1e-5)

    def work(peers):
        share = shares[peers.rank]
        assert ops.fuses(share, None, peers) == (rows <= 8)
        summed = ops.all_reduce(share, peers)
        return [summed, *flat(ops.all_reduce_norm(share, residual, spec, peers))]

    found = results_of_ranks(ranks, work, device, equal_shards=False)
    assert all(all(map(same_bits, found[0], other)) for other in found[1:])
    rounded = [each.total() if isinstance(each, SplitKPartials) else each for each in shares]
    summed, _, total = found[0]
    assert torch.equal(summed, reference.all_reduce(rounded).cpu())
    # with more than four ranks, or beyond the norm, partial sums are rounded before they are sent
    sent = rounded if ranks > 4 or rows > 8 else shares
    assert torch.equal(total, (reference.all_reduce(sent) + residual).cpu())


def test_sum_without_norm(device, half):
    x = of_ranks(2, 3, CHANNELS, dtype=half, device=device)
    residual = of_ranks(1, 3, CHANNELS, dtype=half, device=device, seed=5)[0]

    def work(peers):
        return flat(ops.all_reduce_norm(x[peers.rank], residual, None, peers))

    want = reference.all_reduce(list(x)) + residual
    for normed, total in results_of_ranks(2, work, device):
        assert torch.equal(normed, want.cpu()) and torch.equal(total, want.cpu())


def test_rows_beyond_channel_are_normalized_separately(device, half):
    x = of_ranks(2, 9, CHANNELS, dtype=half, device=device)
    weight = torch.ones(CHANNELS, dtype=half, device=device)

    def work(peers):
        assert not ops.fuses(x[0], None, peers)
        spec = NormSpec(weight_C=weight, eps=1e-5)
        return flat(ops.all_reduce_norm(x[peers.rank], torch.zeros_like(x[0]), spec, peers))

    want = reference.all_reduce(list(x)).cpu()
    for _, total in results_of_ranks(2, work, device):
        assert torch.equal(total, want)


@pytest.mark.parametrize(
    "kind, ranks", [("one_shot", 3), ("norm", 2), pytest.param("two_shot", 3, marks=EXHAUSTIVE)]
)
def test_missing_rank_is_reported(device, half, kind, ranks):
    """The second call does not wait again."""
    last = ranks - 1
    x = of_ranks(ranks, 2, CHANNELS, dtype=half, device=device)

    def work(peers):
        for _ in range(2):
            if kind == "norm":
                spec = NormSpec(weight_C=torch.ones_like(x[0, 0]), eps=1e-5)
                ops.all_reduce_norm(x[0], x[0], spec, peers)
            else:
                ops.all_reduce(x[0], peers, kind)
            if peers.spin_limit:
                peers.spin_limit = 10**9
        return []

    with pytest.raises((AssertionError, PeerLostError), match=f"rank {last} did not send"):
        # on a GPU, time enough for those that come
        limit = 10**7 if ON_GPU else 300
        results_of_ranks(ranks, work, device, spin_limit=limit, absent=(last,))


@pytest.mark.skipif(ON_GPU, reason="compiled kernels hold the constant; tested in gpu/")
def test_host_abort_ends_wait(device, half, monkeypatch):
    """Running kernels see the stop, even with work queued after them. No rank is named as lost."""
    x = of_ranks(2, CHANNELS, dtype=half, device=device)
    monkeypatch.setattr(exchange_triton, "LOOKS_A_LOOK_AT_THE_HOST", tl.constexpr(4))

    def work(peers):
        peers.abort()
        ops.all_reduce(x[0], peers, "one_shot")
        ops.all_reduce(x[0], peers, "two_shot")
        peers.check()
        return []

    assert results_of_ranks(2, work, device, absent=(1,)) == [[], []]
