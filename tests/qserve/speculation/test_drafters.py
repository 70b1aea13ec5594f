"""Drafts of n-gram and suffix drafters, and requirements on a draft model's tokenizer."""

import json
import shutil

import pytest

from formats.errors import InputError
from qserve.params.sampling_params import SamplingParams
from qserve.speculation.config import SpeculativeConfig
from qserve.speculation.ngram import NgramDrafter
from qserve.speculation.suffix import MAX_OCCURRENCES, SuffixDrafter
from tests.qserve.speculation.traces import make_engine


def ngram(low, high):
    return NgramDrafter(
        SpeculativeConfig(method="ngram", prompt_lookup_min=low, prompt_lookup_max=high)
    )


def test_ngram_uses_longest_suffix_and_earliest_match():
    drafter = ngram(1, 3)
    tokens = [1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3, 70, 8, 1, 2, 3]
    assert drafter.propose("a", tokens, 2) == [50, 9]
    assert ngram(2, 2).propose("a", [9, 2, 3, 60, 1, 2, 3, 70, 2, 3], 1) == [60]
    # a shorter one if the longer one does not occur elsewhere
    assert drafter.propose("b", [5, 3, 7, 7, 8, 2, 3], 2) == [7, 7]
    assert drafter.propose("c", [1, 2, 3, 4], 2) == []


def test_ngram_index_follows_growing_sequence():
    drafter, tokens = ngram(2, 4), [4, 5, 6, 7]
    assert drafter.propose("a", tokens, 3) == []
    tokens += [9, 5, 6]
    assert drafter.propose("a", tokens, 3) == [7, 9, 5]
    drafter.finish("a", tokens, 2)
    assert drafter.propose("a", [5, 6], 3) == [], "another sequence of the same name"


def suffix(**settings):
    return SuffixDrafter(SpeculativeConfig(method="suffix", **settings))


def test_most_frequent_continuation_is_followed():
    drafter = suffix()
    tokens = [1, 2, 3, 7, 9, 9, 1, 2, 3, 8, 6, 9, 1, 2, 3, 8, 6, 5, 1, 2, 3]
    assert drafter.propose("a", tokens, 3) == [8, 6, 9]


def test_low_confidence_drafts_are_dropped():
    tokens = [1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3]
    assert suffix().propose("a", tokens, 3)
    assert suffix(suffix_decoding_min_token_prob=0.8).propose("a", tokens, 3) == []


def test_past_outputs_are_cached_with_limit():
    drafter = suffix(suffix_decoding_max_cached_requests=2)
    drafter.finish("a", [1, 2, 30, 31, 32, 33, 34], 2)
    assert drafter.propose("b", [5, 30, 31, 32], 2) == [33, 34]
    for name in "cdef":
        drafter.finish(name, [1, *range(40, 60)], 1)
    assert drafter.propose("b", [5, 30, 31, 32], 2) == []


def test_frequent_token_lookup_cost_is_bounded():
    drafter = suffix()
    tokens = [7] * 5000
    drafter.propose("a", tokens, 4)
    places = drafter._live["a"][0]._occurrences
    assert max(map(len, places.values())) == MAX_OCCURRENCES


def test_drafter_with_another_tokenizer_is_refused(docs_5m, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(docs_5m, folder)
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    vocabulary = values["model"]["vocab"]
    one, other = list(vocabulary)[300:302]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(values))
    config = json.dumps({"method": "draft_model", "model": str(folder)})
    with pytest.raises(InputError, match="2 tokens differ .use a drafter of the same"):
        make_engine(docs_5m, speculative_config=config)
    path.unlink()
    with pytest.raises(InputError, match="has no tokenizer.json"):
        make_engine(docs_5m, speculative_config=config)


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps_in_flight", [0, 1])
def test_drafts_after_prompt_ending_at_page_boundary(docs_5m, steps_in_flight):
    """The model drafts for itself, so that all drafts are accepted if it sees all keys."""
    count, page_size = 5, 16
    config = {"method": "draft_model", "model": str(docs_5m), "adaptive": False}
    engine = make_engine(
        docs_5m,
        steps_in_flight=steps_in_flight,
        block_size=page_size,
        max_num_batched_tokens=64,
        speculative_config=json.dumps(config | {"num_speculative_tokens": count}),
    )
    found = {}
    for length in range(2 * page_size - count, 2 * page_size + 2):
        params = SamplingParams(max_tokens=1 + 1 + count, temperature=0, ignore_eos=True)
        prompt = [(37 * place + length) % 900 + 5 for place in range(length)]
        engine.add_request(str(length), prompt, params)
        (request,) = engine._requests.values()
        while engine.has_work():
            engine.step()
        found[length] = request.facts.num_accepted, request.facts.num_rejected
    assert found == dict.fromkeys(found, (count, 0))
