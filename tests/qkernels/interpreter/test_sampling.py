"""The sampling kernels against their torch twin: filters, penalties, logprobs, ties, odd sizes."""

import math
from dataclasses import replace

import pytest
import torch

from qkernels.sampling import reference as reference_sampling
from qkernels.sampling import triton_sample as sampling
from qkernels.sampling.settings import INVALID_TOKEN, SampleSettings
from qkernels.sampling.words import MASK_BITS, MASK_START, SampleRow

exhaustive = pytest.mark.exhaustive
ON_GPU = torch.cuda.is_available()
SIZES = (33, 1000, 5001, 128256, 151936) if ON_GPU else (pytest.param(33, marks=exhaustive), 2100)


def few(count):
    """Rows of a test: the interpreter takes 0.1 s for each."""
    return count if ON_GPU else max(2, count // 12)


def pack(rows, device):
    return SampleSettings.of(rows).to(device)


def logits_of(size, vocabulary, dtype, device, spread=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, vocabulary, generator=generator) * spread).to(dtype).to(device)


ROWS = {
    "greedy": SampleRow(),
    "temperature": SampleRow(temperature=0.7),
    "top_k": SampleRow(temperature=1.0, top_k=7),
    "top_k 1": SampleRow(temperature=2.0, top_k=1),
    "top_k beyond": SampleRow(temperature=1.0, top_k=10**9),
    "top_p": SampleRow(temperature=1.0, top_p=0.9),
    "top_p tiny": SampleRow(temperature=1.0, top_p=1e-6),
    "min_p": SampleRow(temperature=1.3, min_p=0.05),
    "min_p 1": SampleRow(temperature=1.3, min_p=1.0),
    "top_k, top_p": SampleRow(temperature=0.8, top_k=50, top_p=0.95),
    "all": SampleRow(temperature=1.5, top_k=900, top_p=0.8, min_p=0.001),
    "hot": SampleRow(temperature=2.0, top_p=0.999),
    "cold": SampleRow(temperature=1e-7, top_p=0.5),
}


@pytest.mark.parametrize("vocabulary", SIZES)
def test_every_kind_of_row_equals_reference(device, half, poison, vocabulary):
    """All kinds side by side in one call."""
    num_seeds = 5 if ON_GPU else 1
    rows = [
        replace(row, seed=seed * 2**61 - 5, position=seed + 1)
        for row in ROWS.values()
        for seed in range(num_seeds)
    ]
    logits = logits_of(len(rows), vocabulary, half, device)
    settings = pack(rows, device)
    got = sampling.sample_(logits, settings).tokens_S
    want = reference_sampling.sample_(logits, settings).tokens_S
    wrong = (got != want).nonzero().flatten().tolist()
    names = [name for name in ROWS for _ in range(num_seeds)]
    assert not wrong, [(names[i], int(got[i]), int(want[i])) for i in wrong]
    assert got.dtype is torch.int64


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "top_k, top_p", "all"])
def test_draws_cover_exactly_the_filtered_tokens(device, name):
    """One distribution, many seeds: what is drawn is what the twin keeps, to the last token."""
    size, vocabulary = (20_000, 400) if ON_GPU else (3, 150)
    logits = logits_of(1, vocabulary, torch.float32, device, spread=1.0).expand(size, -1)
    row = replace(ROWS[name], temperature=2.0, top_k=min(ROWS[name].top_k, 9))
    settings = pack([replace(row, seed=seed) for seed in range(size)], device)
    columns = (settings.column(field)[:1] for field in ("min_p", "top_k", "top_p"))
    kept = reference_sampling.filter_logits(logits[:1] / 2.0, *columns).isfinite()[0]
    drawn = torch.bincount(sampling.sample_(logits, settings).tokens_S, minlength=vocabulary)
    assert not drawn[~kept].any()
    if ON_GPU and int(kept.sum()) <= 50:
        assert (drawn[kept] > 0).all()


def seeds_that_draw(token, among, count=2, position=0):
    """Seeds whose noise is largest at `token` of the tokens `among`, all of equal logit."""
    seeds = torch.arange(4000)
    noise = reference_sampling.gumbel_noise(seeds, torch.full_like(seeds, position), max(among) + 1)
    best = torch.tensor(among)[noise[:, among].argmax(-1)]
    return seeds[best == token][:count].tolist()


# the last is more candidates than are compared each with each
@pytest.mark.parametrize(
    "vocabulary, top_k",
    [
        pytest.param(100, 1, marks=exhaustive),
        (100, 40),
        pytest.param(300, 40, marks=exhaustive),
        (1500, 300),
    ],
)
def test_top_k_ties_keep_lower_tokens(device, vocabulary, top_k):
    """The lower tokens stay: the last of them can be drawn, the next cannot, even if it would."""
    last, following = top_k - 1, top_k
    seeds = [
        *seeds_that_draw(last, range(top_k)),
        *seeds_that_draw(following, range(top_k + 1)),
    ]
    logits = torch.zeros(len(seeds), vocabulary, device=device)
    rows = [SampleRow(temperature=2.0, top_k=top_k, seed=seed) for seed in seeds]
    tokens = sampling.sample_(logits, pack(rows, device)).tokens_S
    assert len(seeds) == 4 and tokens[:2].tolist() == [last, last]
    assert (tokens[2:] < following).all()


@pytest.mark.parametrize(
    "vocabulary, top_p",
    [
        (100, 0.4999),
        pytest.param(300, 0.4999, marks=exhaustive),
        pytest.param(64, 0.5, marks=exhaustive),
        (256, 0.5),
    ],
)
def test_top_p_ties_keep_lower_tokens(device, vocabulary, top_p):
    """Half of equal probabilities, or a little less: the lower half of the tokens."""
    half = vocabulary // 2
    seeds = [*seeds_that_draw(half - 1, range(half)), *seeds_that_draw(half, range(half + 1))]
    rows = [SampleRow(temperature=1.0, top_p=top_p, seed=seed) for seed in seeds]
    tokens = sampling.sample_(
        torch.zeros(len(seeds), vocabulary, device=device), pack(rows, device)
    ).tokens_S
    assert len(seeds) == 4 and tokens[:2].tolist() == [half - 1, half - 1]
    assert (tokens[2:] < half).all()


@pytest.mark.parametrize("top_k, kept", [pytest.param(1000, 640, marks=exhaustive), (600, 480)])
def test_top_p_is_relative_to_the_tokens_of_top_k(device, top_k, kept):
    """800 equal candidates and 500 impossible ones: 80 % of the first `top_k` of them."""
    seeds = [*seeds_that_draw(kept - 1, range(kept)), *seeds_that_draw(kept, range(kept + 1))]
    logits = torch.full((len(seeds), 1300), -80.0, device=device)
    logits[:, :800] = 0
    rows = [SampleRow(temperature=1.0, top_k=top_k, top_p=0.7999, seed=seed) for seed in seeds]
    tokens = sampling.sample_(logits, pack(rows, device)).tokens_S
    assert seeds and (tokens < kept).all()
    assert all(t == kept - 1 for t in tokens[: len(seeds_that_draw(kept - 1, range(kept)))])


def test_positive_and_negative_zero_are_equal(device):
    size = few(96)
    logits = torch.full((size, 70), -5.0, device=device)
    logits[:, 3], logits[:, 60], logits[:, 66] = -0.0, 0.0, 0.0
    settings = pack([SampleRow(temperature=1.0, top_k=2, seed=s) for s in range(size)], device)
    assert set(sampling.sample_(logits, settings).tokens_S.tolist()) == {3, 60}


@pytest.mark.parametrize("vocabulary", [pytest.param(70, marks=exhaustive), 2100])
def test_penalties_and_bias(device, half, vocabulary):
    torch.manual_seed(3)
    history = torch.randint(-8, 8, (6, vocabulary), dtype=torch.int32).clamp(min=0)
    bias = ((5, 4.0), (vocabulary - 1, -3.5), (7, -math.inf))
    kinds = [
        SampleRow(history_row=4, presence_penalty=1.5),
        SampleRow(history_row=0, frequency_penalty=-0.3, bias=bias),
        SampleRow(history_row=5, repetition_penalty=1.3),
        SampleRow(history_row=1, presence_penalty=-2, frequency_penalty=2, repetition_penalty=0.5),
        SampleRow(bias=bias),
        SampleRow(),
    ]
    rows = [
        replace(kind, temperature=temperature, top_k=top_k, seed=seed)
        for kind, seed in zip(kinds, range(6), strict=True)
        for temperature, top_k in ((0.0, 0), (1.1, 0), (1.1, 12))
    ]
    # one history row belongs to one request, so each call takes every third of the rows
    for part in range(3):
        settings = pack(rows[part::3], device)
        logits = logits_of(6, vocabulary, half, device, spread=1.0, seed=part)
        histories = [history.clone().to(device) for _ in range(2)]
        got = sampling.sample_(logits, settings, histories[0]).tokens_S
        want = reference_sampling.sample_(logits, settings, histories[1]).tokens_S
        assert got.tolist() == want.tolist()
        assert torch.equal(histories[0], histories[1])
        reduced = histories[0].cpu() - history
        assert int(reduced.sum()) == 8 and all(
            reduced[row.history_row, token] == 2
            for row, token in zip(rows[part::3], got.tolist(), strict=True)
            if row.history_row >= 0
        )


def test_forbidden_tokens_are_never_drawn(device):
    logits = torch.zeros(3, 65, device=device)
    logits[:, 64] = 80
    logits[2, 64] = math.inf
    rows = [SampleRow(), SampleRow(bias=((64, -math.inf),)), SampleRow(bias=((64, -math.inf),))]
    for fields in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}):
        settings = pack([replace(row, **fields) for row in rows], device)
        tokens = sampling.sample_(logits, settings).tokens_S.tolist()
        assert tokens[0] == 64 and 64 not in tokens[1:]
        assert tokens == reference_sampling.sample_(logits, settings).tokens_S.tolist()


@pytest.mark.parametrize("vocabulary", [pytest.param(33, marks=exhaustive), 5001])
def test_logprobs(device, half, poison, vocabulary):
    """They are of the unchanged logits; bias, temperature and filters only affect the draw."""
    asked = [-1, 0, 1, 20, 5]
    rows = [
        SampleRow(num_logprobs=n, temperature=1.5, top_k=3, seed=n + 1, bias=((2, 9.0),))
        for n in asked
    ]
    logits = logits_of(5, vocabulary, half, device)
    settings = pack(rows, device)
    got = sampling.sample_(logits, settings)
    want = reference_sampling.sample_(logits, settings)
    exact = logits.double().log_softmax(-1)
    for i, n in enumerate(asked):
        assert got.tokens_S[i] == want.tokens_S[i]
        if n >= 0:
            assert abs(got.logprobs_S[i] - exact[i, got.tokens_S[i]]) < 1e-5
        assert got.top_tokens_SN[i].tolist() == want.top_tokens_SN[i].tolist()
        assert (got.top_tokens_SN[i] == -1).sum() == 20 - max(n, 0)
        torch.testing.assert_close(
            got.top_logprobs_SN[i], want.top_logprobs_SN[i], atol=1e-5, rtol=1e-5
        )
        for j in range(max(n, 0)):
            assert abs(got.top_logprobs_SN[i, j] - exact[i, got.top_tokens_SN[i, j]]) < 1e-5


@pytest.mark.parametrize("vocabulary", [90, 1500])
def test_logprobs_of_equal_logits_come_in_order_of_token(device, vocabulary):
    logits = torch.zeros(1, vocabulary, device=device)
    got = sampling.sample_(logits, pack([SampleRow(num_logprobs=3)], device))
    assert got.top_tokens_SN.tolist() == [[0, 1, 2]] and got.tokens_S.tolist() == [0]
    assert float(got.logprobs_S[0]) == pytest.approx(-math.log(vocabulary), abs=1e-5)


def test_bias_of_infinity_draws_its_token_with_the_bits_of_any_draw(device, half):
    """So the log probability of a given token is that of a generated one."""
    logits = logits_of(3, 2100, half, device)
    rows = [SampleRow(temperature=2.0, seed=i, num_logprobs=2) for i in range(3)]
    drawn = sampling.sample_(logits, pack(rows, device))
    biases = [((token, math.inf),) for token in drawn.tokens_S.tolist()]
    forced = [SampleRow(num_logprobs=2, bias=each) for each in biases]
    again = sampling.sample_(logits, pack(forced, device))
    assert all(map(torch.equal, drawn, again)), (drawn, again)
    other = sampling.sample_(logits, pack([SampleRow(bias=((9, math.inf),))] * 3, device))
    assert other.tokens_S.tolist() == [9] * 3


@pytest.mark.parametrize("place", [0, 4500])
def test_nan_row_is_flagged_and_not_counted(device, place):
    logits = logits_of(3, 4501, torch.float32, device)
    logits[1, place] = math.nan
    for name in ("greedy", "top_k"):
        history = torch.zeros(3, 4501, dtype=torch.int32, device=device)
        rows = [replace(ROWS[name], history_row=i, num_logprobs=2) for i in range(3)]
        settings = pack(rows, device)
        tokens = sampling.sample_(logits, settings, history).tokens_S
        assert tokens[1] == INVALID_TOKEN and (tokens[[0, 2]] >= 0).all()
        assert history.sum(1).tolist() == [2, 0, 2]
        settings = replace(pack([ROWS[name]] * 3, device), invalid_token=7)
        for sample_ in (sampling.sample_, reference_sampling.sample_):
            assert sample_(logits, settings).tokens_S[1] == 7


def test_infinite_logits(device):
    """+inf wins, -inf never does, and a row of -inf alone gives its first token."""
    logits = torch.full((3, 100), -math.inf, device=device)
    logits[0, 50] = math.inf
    logits[1, 70] = -3.0
    for name in ("greedy", "temperature", "top_k", "top_p", "min_p"):
        tokens = sampling.sample_(logits, pack([ROWS[name]] * 3, device)).tokens_S
        assert tokens[:2].tolist() == [50, 70], name
        assert 0 <= tokens[2] < 100


def test_row_draw_is_independent_of_batch(device):
    names = ROWS if ON_GPU else ("greedy", "top_k", "temperature")
    rows = [replace(ROWS[name], seed=7, position=9) for name in names]
    logits = logits_of(len(rows), 4500, torch.float16, device)
    together = sampling.sample_(logits, pack(rows, device)).tokens_S
    again = sampling.sample_(logits, pack(rows, device)).tokens_S
    assert torch.equal(together, again)
    for i, row in enumerate(rows):
        alone = sampling.sample_(logits[i : i + 1], pack([row], device)).tokens_S
        assert alone[0] == together[i]


def test_blocks_of_several_chunks_give_the_same_bits(device, half, monkeypatch):
    """How many rows there are decides how many chunks a block reads, and nothing else."""
    names = ["greedy", "temperature", "top_k, top_p", "top_p"]
    rows = [replace(ROWS[name], seed=3, num_logprobs=4) for name in names]
    logits = logits_of(len(rows), 5001, half, device)
    # equal, and read by the same thread of a block of three chunks
    logits[0, [3966, 4990]] = logits[0].max() + 1
    alone = sampling.sample_(logits, pack(rows, device))
    monkeypatch.setattr(sampling, "FEW_CHUNKS", 0)
    monkeypatch.setattr(sampling, "CHUNKS_OF_BLOCK", 3)
    for a, b in zip(alone, sampling.sample_(logits, pack(rows, device)), strict=True):
        assert torch.equal(a, b)
    assert alone.tokens_S[0] == 3966


def test_nan_in_a_blocks_last_chunk(device, monkeypatch):
    monkeypatch.setattr(sampling, "FEW_CHUNKS", 0)
    logits = torch.zeros(1, 3000, device=device)
    logits[0, 2999] = math.nan
    assert sampling.sample_(logits, pack([SampleRow()], device)).tokens_S.tolist() == [-1]


def test_rows_of_a_wider_tensor(device):
    logits = logits_of(3, 700, torch.float16, device)
    rows = [replace(ROWS["top_k, top_p"], seed=i, num_logprobs=3) for i in range(3)]
    settings = pack(rows, device)
    want = reference_sampling.sample_(logits[:, 100:600], settings)
    got = sampling.sample_(logits[:, 100:600], settings)
    assert got.tokens_S.tolist() == want.tokens_S.tolist()
    assert got.top_tokens_SN.tolist() == want.top_tokens_SN.tolist()


def test_no_rows(device):
    settings = pack([], device)
    assert sampling.sample_(torch.zeros(0, 50, device=device), settings).tokens_S.shape == (0,)


def with_masks(rows, allowed, device):
    """Settings of rows of which those with a set of tokens may draw no other."""
    settings = SampleSettings.of(rows)
    words, parts, start = settings.words_SP.clone(), [settings.bias_E], len(settings.bias_E)
    for row, tokens in enumerate(allowed):
        if tokens is None:
            continue
        mask = torch.zeros(tokens.vocabulary // MASK_BITS + 1, MASK_BITS, dtype=torch.bool)
        mask.view(-1)[list(tokens)] = True
        weights = 1 << torch.arange(MASK_BITS)  # bit 63 is the sign
        words[row, MASK_START] = start
        parts.append((mask * weights).sum(-1))
        start += len(parts[-1])
    return replace(settings, words_SP=words, bias_E=torch.cat(parts)).to(device)


class Tokens(list):
    """Some tokens of a vocabulary."""

    def __init__(self, tokens, vocabulary):
        super().__init__(tokens)
        self.vocabulary = vocabulary


@pytest.mark.parametrize("vocabulary", SIZES)
def test_masked_rows_draw_allowed_tokens(device, half, poison, vocabulary):
    """Every kind of row, with a mask and without, and a bias for some."""
    kinds = list(ROWS.values())[:: 1 if ON_GPU else 3]
    rows, allowed = [], []
    for number, kind in enumerate(kinds):
        bias = ((1, 30.0), (vocabulary - 1, 2.0)) if number % 2 else ()
        rows += [replace(kind, seed=number, bias=bias)] * 2
        few_tokens = [0, 31, 32, vocabulary - 1][number % 3 :]
        allowed += [None, Tokens(few_tokens, vocabulary)]
    logits = logits_of(len(rows), vocabulary, half, device)
    settings = with_masks(rows, allowed, device)
    got = sampling.sample_(logits, settings).tokens_S.cpu()
    want = reference_sampling.sample_(logits, settings).tokens_S.cpu()
    assert torch.equal(got, want)
    for token, tokens in zip(got.tolist(), allowed, strict=True):
        assert tokens is None or token in tokens
    unmasked = sampling.sample_(logits, pack(rows, device)).tokens_S.cpu()
    assert torch.equal(got[::2], unmasked[::2]), "a mask is of its own row alone"


def test_log_probabilities_are_of_logits_without_masks(device, half):
    rows = [SampleRow(num_logprobs=2)] * 2
    logits = logits_of(2, 1000, half, device)
    settings = with_masks(rows, [Tokens([3], 1000), None], device)
    got = sampling.sample_(logits, settings)
    free = sampling.sample_(logits, pack(rows, device))
    assert got.tokens_S.tolist() == [3, int(free.tokens_S[1])]
    assert torch.equal(got.top_tokens_SN, free.top_tokens_SN)
    assert got.logprobs_S[0] < free.logprobs_S[0]
