"""A request accepts one sampled token or several."""

from hypothesis import given
from hypothesis import strategies as st

from qserve.engine.request import Request
from qserve.engine.token_event import TokenLogprobs
from qserve.params.sampling_params import SamplingParams

STOP, EOS = 5, 7


def make_request(max_tokens, min_tokens):
    request = Request(
        request_id="r",
        token_ids=[1, 1, 1],
        num_prompt_tokens=3,
        max_tokens=max_tokens,
        params=SamplingParams(min_tokens=min_tokens, max_tokens=max_tokens),
        seed=0,
        stop_token_ids=frozenset({STOP}),
        eos_token_ids=frozenset({EOS}),
    )
    request.num_pending = 8
    return request


@given(
    tokens=st.lists(st.sampled_from([1, 2, STOP, EOS]), min_size=8, max_size=8),
    max_tokens=st.integers(1, 9),
    data=st.data(),
)
def test_batched_tokens_equal_single_tokens(tokens, max_tokens, data):
    min_tokens = data.draw(st.integers(0, max_tokens))
    logprobs = [TokenLogprobs(-token / 2, (token,), (-token / 2,)) for token in tokens]
    at_once, in_turn = (make_request(max_tokens, min_tokens) for _ in range(2))
    events = []
    for token, each in zip(tokens, logprobs, strict=True):
        events.append(in_turn.extend([token], [each]))
        if events[-1].finish_reason:
            break
    event = at_once.extend(tokens, logprobs)
    assert event.token_ids == tuple(token for each in events for token in each.token_ids)
    assert event.logprobs == tuple(found for each in events for found in each.logprobs)
    assert len(event.logprobs) == len(event.token_ids) == len(events)
    assert at_once.token_ids == in_turn.token_ids == [1, 1, 1, *event.token_ids]
    last = events[-1]
    assert (event.finish_reason, event.stop_token) == (last.finish_reason, last.stop_token)
    assert event.ended_by_token == last.ended_by_token
    assert at_once.num_pending == 0, "what was drawn behind the end is dropped"
    ends = [i for i, token in enumerate(tokens) if token in (STOP, EOS) and i >= min_tokens]
    assert len(event.token_ids) == min([i + 1 for i in ends] + [max_tokens, 8])
