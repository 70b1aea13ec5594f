"""allowed_token_ids and bad_words: their masks, and what an engine draws under them."""

import numpy as np
import pytest

from formats.errors import InputError
from qserve import LLM, SamplingParams
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.engine.token_filter import TokenFilter, without
from tests.qserve.structured.schemas import CALL

DIGITS = tuple(range(20, 30))  # of no meaning here
END = 2


def allowed_of(mask, vocab_size):
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any(), "bits behind the vocabulary"
    return set(np.flatnonzero(bits).tolist())


@pytest.mark.parametrize("vocab_size", [63, 64, 65, 1000])
def test_bad_word_boundaries(vocab_size):
    ids = {0, 62, vocab_size - 1}
    made = TokenFilter(vocab_size, tuple(ids), ())
    assert allowed_of(made.mask([1], 1), vocab_size) == ids
    assert allowed_of(without(made.mask([1], 1), (0, vocab_size - 1)), vocab_size) == (
        ids - {0, vocab_size - 1}
    )
    assert allowed_of(made.mask([1], 1), vocab_size) == ids, "the mask itself was changed"


def test_last_token_of_a_bad_word_is_forbidden_after_the_others():
    made = TokenFilter(100, None, [(5,), (1, 2, 3), (2, 4), (2, 2, 6)])
    everything = set(range(100)) - {5}
    for output, forbidden in (
        ([], set()),
        ([1], set()),
        ([2], {4}),
        ([1, 2], {3, 4}),
        ([2, 2], {4, 6}),
        ([1, 2, 9], set()),
    ):
        # The prompt's tokens are no output.
        mask = made.mask([1, 2, *output], 2)
        assert allowed_of(mask, 100) == everything - forbidden, output
    assert made.follows_output and not TokenFilter(100, (1,), [(5,)]).follows_output


@pytest.fixture(scope="module")
def llm(docs_5m):
    return LLM(str(docs_5m), max_model_len=256, max_num_seqs=16, cpu_kv_cache_memory=0.2)


def generate(llm, prompt="A trait is", **params):
    params = {"max_tokens": 24, "temperature": 1.0, "seed": 1} | params
    (found,) = llm.generate([prompt], SamplingParams(**params), False)
    return found.outputs[0]


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_only_allowed_tokens_are_sampled(llm, temperature):
    found = generate(llm, allowed_token_ids=DIGITS, temperature=temperature)
    assert len(found.token_ids) == 24 and set(found.token_ids) <= set(DIGITS)
    assert temperature == 0 or len(set(found.token_ids)) > 1


def test_output_ends_where_an_end_token_is_allowed(llm):
    found = generate(llm, allowed_token_ids=[END], max_tokens=9)
    assert (found.finish_reason, list(found.token_ids)) == ("stop", [END])
    found = generate(llm, allowed_token_ids=[END, 20], min_tokens=3, logit_bias={END: 100.0})
    assert list(found.token_ids) == [20, 20, 20, END]


def test_bad_word_is_not_sampled(llm):
    free = generate(llm, temperature=0)
    words = sorted({word for word in free.text.split() if len(word) > 1})
    assert len(words) > 3
    for word in words[:4]:
        found = generate(llm, temperature=0, bad_words=[word])
        assert word in free.text and found.text != free.text
        assert word not in found.text.split()


def test_bad_word_of_several_tokens_is_not_completed(llm):
    free = generate(llm, temperature=0).token_ids
    sequence = tuple(free[3:6])
    found = generate(llm, temperature=0, bad_words_token_ids=[sequence]).token_ids
    assert list(found[:5]) == list(free[:5]) and found[5] != free[5]
    assert all(tuple(found[i : i + 3]) != sequence for i in range(len(found)))


def test_token_filter_with_grammar(llm):
    form, tokens = {"regex": "[a-z]{3,8}"}, llm.get_tokenizer()
    allowed = tokens.encode("abcabc", False) + [tokens.encode(x, False)[0] for x in "abc"]
    found = generate(llm, structured_outputs=form, allowed_token_ids=[*allowed, END])
    assert found.finish_reason == "stop" and 3 <= len(found.text) <= 8
    assert set(found.text) <= set("abc")


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"structured_outputs": {"json": CALL}}, "allowed_token_ids, structured_outputs"),
        ({"bad_words_token_ids": [(20, 20)]}, "allowed_token_ids, bad_words"),
    ],
)
def test_request_without_allowed_token_ends_with_reason(llm, params, names):
    with pytest.raises(InputError, match=f"{names}: after [01] tokens of output") as caught:
        generate(llm, allowed_token_ids=[20], **params)
    assert "qserve inspect" not in str(caught.value)
    assert generate(llm, max_tokens=2).token_ids, "others go on"


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [END], "min_tokens": 2},
        {"allowed_token_ids": [20], "bad_words_token_ids": [(20,)]},
        {"allowed_token_ids": [8192]},
        {"bad_words_token_ids": [(3, 8192)]},
    ],
)
def test_request_without_first_token_is_refused(llm, params):
    with pytest.raises(InputError, match=next(iter(params)).replace("_words_token_ids", "_words")):
        generate(llm, **params)


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": []},
        {"allowed_token_ids": [-1]},
        {"allowed_token_ids": range(2**14 + 1)},
        {"bad_words": ["a", " "]},
        {"bad_words": ["a" * 257]},
        {"bad_words": ["a"] * 257},
        {"bad_words_token_ids": [()]},
    ],
)
def test_out_of_range_parameters_are_refused(params):
    with pytest.raises(InputError, match=next(iter(params))):
        SamplingParams(**params)


def test_bad_words_without_their_tokens_are_refused(llm):
    with pytest.raises(InputError, match="bad_words"):
        llm.engine.add_request("x", [1], SamplingParams(bad_words=["a"]))


def run(docs_5m, depth, **params):
    """The tokens of a request, and the steps that it took."""
    config = EngineConfig(
        model=str(docs_5m), max_model_len=64, num_gpu_blocks_override=16, admission="fits"
    )
    engine = Engine(config, steps_in_flight=depth)
    params = SamplingParams(temperature=1, seed=3, max_tokens=12, **params)
    engine.add_request("r", [7] * 5, params)
    tokens, num_steps = [], 0
    while engine.has_work():
        for event in engine.step():
            tokens += event.token_ids
        num_steps += 1
    return tokens, num_steps


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": range(20, 60)},
        {"allowed_token_ids": range(20, 60), "bad_words_token_ids": [(21,)]},
        {"allowed_token_ids": range(20, 24), "bad_words_token_ids": [(20, 21), (21, 22)]},
    ],
)
def test_token_filter_does_not_delay_rows(docs_5m, params):
    alone, _ = run(docs_5m, 0, **params)
    found, num_steps = run(docs_5m, 1, **params)
    assert found == alone and len(found) == 12
    # One step for each token, and one that takes the last result.
    assert num_steps == 13
