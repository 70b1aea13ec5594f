"""Penalties, bias and log probabilities through the whole engine, against the model's logits."""

import pytest

import qkernels.sampling.settings
from formats.errors import InputError
from qserve import LLM, SamplingParams
from qserve.errors import ParameterError
from qserve.params.beam_search_params import BeamSearchParams
from qserve.params.sampling_params import MAX_LOGPROBS
from qserve.pooling.params import PoolingParams
from qserve.structured.params import StructuredOutputsParams

PROMPTS = ["A process is a process is", "The standard library", "the " * 20]
PENALTIES = {
    "frequency": {"frequency_penalty": 0.9},
    "presence": {"presence_penalty": 2.0},
    "repetition": {"repetition_penalty": 1.8},
    "all, and a bias": {
        "frequency_penalty": -0.2,
        "presence_penalty": 1.0,
        "repetition_penalty": 1.3,
        "logit_bias": {11: 3.0, 13: -100.0},
    },
}


@pytest.fixture(scope="module")
def llm(docs_5m):
    return LLM(docs_5m, device="cpu", max_num_batched_tokens=64, max_num_seqs=8)


def run(llm, params, prompts=PROMPTS):
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def greedy(**fields):
    return SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **fields)


def by_hand(llm, prompt, params):
    """Greedy decoding in plain Python, one token after the other."""
    ids = llm.get_tokenizer().encode(prompt)
    output = []
    for _ in range(params.max_tokens):
        logits = llm.logits(ids + output)[-1].tolist()
        for token, value in params.logit_bias:
            logits[token] += value
        for token in {*ids, *output}:
            x, repetition = logits[token], params.repetition_penalty
            x = x / repetition if x > 0 else x * repetition
            count = output.count(token)
            logits[token] = x - params.frequency_penalty * count
            logits[token] -= params.presence_penalty * (count > 0)
        output.append(max(range(len(logits)), key=logits.__getitem__))
    return output


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_equal_definition(llm, name):
    params = greedy(**PENALTIES[name])
    want = [by_hand(llm, prompt, params) for prompt in PROMPTS]
    plain = [completion.token_ids for completion in run(llm, greedy())]
    assert [completion.token_ids for completion in run(llm, params)] == want != plain


def test_penalties_count_step_in_flight(llm):
    """The host gets a token one step late; penalties must include it immediately."""
    params = [greedy(), *(greedy(**fields) for fields in PENALTIES.values())]
    prompts = [PROMPTS[0]] * len(params)
    want = [completion.token_ids for completion in run(llm, params, prompts)]
    llm.engine._max_in_flight = 1
    try:
        assert [completion.token_ids for completion in run(llm, params, prompts)] == want
    finally:
        llm.engine._max_in_flight = 0


@pytest.mark.parametrize("in_flight", [0, 1])
def test_preempted_requests_keep_penalty_counts(llm, docs_5m, in_flight):
    params = greedy(frequency_penalty=0.9)
    want = [completion.token_ids for completion in run(llm, params, PROMPTS * 2)]
    small = LLM(
        docs_5m,
        device="cpu",
        max_num_batched_tokens=64,
        max_num_seqs=6,
        num_gpu_blocks_override=9,
        admission="fits",
    )
    small.engine._max_in_flight = in_flight
    preempted = []
    schedule = small.engine.scheduler.schedule

    def counting():
        plan = schedule()
        preempted.extend(plan.preempted)
        return plan

    small.engine.scheduler.schedule = counting
    assert [completion.token_ids for completion in run(small, params, PROMPTS * 2)] == want
    assert preempted


def test_more_requests_than_history_rows(llm):
    """Rows go from request to request, clean."""
    params = greedy(presence_penalty=2.0)
    want = [completion.token_ids for completion in run(llm, params)]
    assert [completion.token_ids for completion in run(llm, params, PROMPTS * 8)] == want * 8


def test_logprobs_equal_model_logits(llm):
    params = SamplingParams(
        temperature=1.5, seed=3, max_tokens=6, ignore_eos=True, logprobs=3, presence_penalty=1.0
    )
    (completion,) = run(llm, params, PROMPTS[:1])
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    want = llm.logits(ids + completion.token_ids).log_softmax(-1)[len(ids) - 1 :]
    assert len(completion.logprobs) == 6
    for token, found, row in zip(completion.token_ids, completion.logprobs, want, strict=False):
        ranks = {each: place for place, each in enumerate(row.topk(3).indices.tolist(), start=1)}
        assert next(iter(found)) == token
        assert {each: logprob.rank for each, logprob in found.items()} == {token: None} | ranks
        for each, logprob in found.items():
            assert logprob.logprob == pytest.approx(float(row[each]), abs=1e-4)
    texts = [
        found[token].decoded_token
        for token, found in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    assert "".join(texts) == completion.text


def test_logprobs_only_on_request(llm):
    params = [greedy(), greedy(logprobs=0), greedy(logprobs=2)]
    without, none, two = run(llm, params, [PROMPTS[0]] * 3)
    assert without.logprobs is None
    for token, alone, found in zip(none.token_ids, none.logprobs, two.logprobs, strict=True):
        assert [*alone] == [token] and alone[token].logprob == found[token].logprob
        assert [*found][0] == token and [each.rank for each in found.values()] == [1, 2]


def test_seed_minus_one_means_no_seed():
    """As in vLLM: clients send it for other tokens each time."""
    assert SamplingParams(seed=-1) == SamplingParams()
    assert SamplingParams(seed=-1, n=3).choice(2).seed is None
    seeds = [SamplingParams(seed=-2, n=3).choice(index).seed for index in range(3)]
    assert None not in seeds and len(set(seeds)) == 3


def test_forced_token_by_bias(llm):
    (completion,) = run(llm, greedy(logit_bias={77: 100.0}), PROMPTS[:1])
    assert set(completion.token_ids) == {77}


def test_bias_outside_the_vocabulary_is_refused(llm):
    with pytest.raises(InputError, match="logit_bias: token id 8192 is not in 0..8191"):
        run(llm, greedy(logit_bias={8192: 1.0}))
    assert not llm.engine.has_work()


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    "extreme",
    [
        {"repetition_penalty": 100.0},
        {"repetition_penalty": 0.01},
        {"top_k": 2**63 - 1},
        {"top_p": 1e-300, "min_p": 1e-300},
        {"seed": -(2**63)},
    ],
)
def test_range_limits_are_accepted(llm, temperature, extreme):
    params = SamplingParams(temperature=temperature, max_tokens=3, ignore_eos=True, **extreme)
    for completion in run(llm, params):
        assert len(completion.token_ids) == 3


def test_python_accepts_wider_ranges_than_server(llm):
    """More stop strings and hotter than its clients may ask for; 20 alternatives, the kernel's."""
    assert MAX_LOGPROBS == qkernels.sampling.settings.MAX_LOGPROBS
    stops = [f"<{i}>" for i in range(100)]
    params = SamplingParams(
        temperature=50.0, seed=1, stop=stops, logprobs=MAX_LOGPROBS, max_tokens=4, ignore_eos=True
    )
    (completion,) = run(llm, params, PROMPTS[:1])
    assert all(len(found) >= MAX_LOGPROBS for found in completion.logprobs)
    ranks = [each.rank for each in completion.logprobs[0].values() if each.rank is not None]
    assert sorted(ranks) == list(range(1, MAX_LOGPROBS + 1))


@pytest.mark.parametrize("given", [[1], [(1, 2, 3)], "5"])
def test_invalid_logit_bias_is_refused(given):
    with pytest.raises(ParameterError, match="logit_bias: expected an object"):
        SamplingParams(logit_bias=given)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": [""]}, "stop: expected no empty string, found ['']"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids: expected ids of 0 or more, found [3, -1]"),
        ({"allowed_token_ids": []}, "allowed_token_ids: expected one id or more, found []"),
        ({"logit_bias": {5: 1000}}, "values of -100 to 100, found {5: 1000.0}"),
        ({"bad_words_token_ids": [[5, -1]]}, "found [(5, -1)]"),
    ],
)
def test_errors_show_lists_as_given(fields, message):
    with pytest.raises(ParameterError) as error:
        SamplingParams(**fields)
    assert message in str(error.value)


def test_long_lists_in_errors_are_cut():
    with pytest.raises(ParameterError) as error:
        SamplingParams(stop_token_ids=[-1] * 1000)
    assert error.value.problem.endswith("...") and len(str(error.value)) < 180


def test_detokenize_can_be_off(llm):
    with pytest.raises(ParameterError, match="stop: is searched in the text"):
        SamplingParams(stop="a", detokenize=False)
    (completion,) = run(llm, greedy(detokenize=False, logprobs=1), PROMPTS[:1])
    assert completion.text == "" and len(completion.token_ids) == 24
    logprobs = [each for found in completion.logprobs for each in found.values()]
    assert logprobs and all(each.decoded_token is None for each in logprobs)


@pytest.mark.parametrize(
    ("params", "given", "message"),
    [
        (SamplingParams, "max_new_tokens", r"SamplingParams \(did you mean max_tokens\?\)"),
        (SamplingParams, "frobnicate", r"SamplingParams \(its fields: n, temperature, .*"),
        (BeamSearchParams, "beam_widths", r"BeamSearchParams \(did you mean beam_width\?\)"),
        (PoolingParams, "normalise", r"PoolingParams \(did you mean normalize\?\)"),
        (StructuredOutputsParams, "regexp", r"StructuredOutputsParams \(did you mean regex\?\)"),
    ],
)
def test_unknown_fields_are_refused(params, given, message):
    with pytest.raises(ParameterError, match=f"^{given}: is not a field of {message}"):
        params(**{given: 1})
    with pytest.raises(TypeError, match="positional"):
        params(1)
