"""Comparison of greedy texts that kernels with other orders of sums compute."""

from collections.abc import Iterable

from qserve import CompletionOutput

TIE = 0.02  # between two log probabilities: ranks add in another order than one GPU


def assert_same_up_to_ties(
    ours: Iterable[CompletionOutput], theirs: Iterable[CompletionOutput], tie: float = TIE
) -> None:
    """Compare texts up to the first token whose two best ones differ by less than `tie`."""
    for one, two in zip(ours, theirs, strict=True):
        pairs = zip(one.token_ids, two.token_ids, strict=True)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if place is not None:
            first, second = sorted(
                (each.logprob for each in one.logprobs[place].values()), reverse=True
            )[:2]
            assert first - second < tie, (place, one.token_ids, two.token_ids)
