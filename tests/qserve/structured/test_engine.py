"""Output under a constraint has its form, and other requests are unaffected."""

import json
import re

import jsonschema
import pytest

from formats.errors import InputError
from qserve import LLM, SamplingParams
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from tests.qserve.structured.schemas import CALL, all_schemas

SCHEMAS = list(all_schemas())
# A date of the year 0, which RFC 3339 has, is none to Python.
FORMATS = jsonschema.FormatChecker(["uuid", "ipv4"])


@pytest.fixture(scope="module")
def llm(docs_5m):
    return LLM(str(docs_5m), max_model_len=512, max_num_seqs=64, cpu_kv_cache_memory=0.2)


def generate(llm, form, prompt="Answer: ", **params):
    params = {"max_tokens": 300, "temperature": 1.0, "seed": 1} | params
    (found,) = llm.generate([prompt], SamplingParams(structured_outputs=form, **params), False)
    return found.outputs[0]


def check(found, schema, name):
    """A finished text is valid; returns whether it was finished."""
    if found.finish_reason == "length":
        return False
    value = json.loads(found.text)
    jsonschema.validate(value, schema, jsonschema.Draft202012Validator, format_checker=FORMATS)
    return True


def check_all(llm, schemas, temperature):
    params = [
        SamplingParams(
            structured_outputs={"json": schema},
            temperature=temperature,
            seed=number,
            max_tokens=160,
        )
        for number, (_, schema) in enumerate(schemas)
    ]
    outputs = llm.generate(["Answer in JSON: "] * len(schemas), params, False)
    finished = [
        check(output.outputs[0], schema, name)
        for output, (name, schema) in zip(outputs, schemas, strict=True)
    ]
    assert sum(finished) > 0.9 * len(schemas)


@pytest.mark.exhaustive
def test_sample_of_schemas(llm):
    check_all(llm, SCHEMAS[::8], 1.0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("temperature", [0, 1.0, 1.5])
def test_two_hundred_schemas_give_valid_json(llm, temperature):
    assert len(SCHEMAS) == 200
    check_all(llm, SCHEMAS, temperature)


def test_regular_expression_constraint(llm):
    for seed in range(3):
        text = generate(llm, {"regex": r"^[a-c]{3}-\d{2,4}$"}, seed=seed).text
        assert re.fullmatch(r"[a-c]{3}-\d{2,4}", text)


def test_choice_constraint(llm):
    choices = ("red", "green apple", "grün")
    texts = {generate(llm, {"choice": choices}, seed=seed).text for seed in range(12)}
    assert len(texts) > 1 and texts <= set(choices)


@pytest.mark.parametrize(
    "grammar",
    ['start: "<" /[0-9]+/ ">"', 'root ::= "<" [0-9]+ ">"'],
    ids=["lark", "gbnf"],
)
def test_grammar_constraint(llm, grammar):
    text = generate(llm, {"grammar": grammar}, logit_bias={}, seed=5, max_tokens=60).text
    assert re.fullmatch(r"<[0-9]+>?", text)


def test_json_object_constraint(llm):
    found = generate(llm, {"json_object": True}, max_tokens=400, temperature=0.7)
    if found.finish_reason == "stop":
        assert isinstance(json.loads(found.text), dict)
    assert found.text.startswith("{")


def test_unconstrained_rows_are_unchanged_in_mixed_batch(llm):
    """A step mixes rows with masks, biases, penalties, filters and none of them."""
    others = [
        SamplingParams(temperature=1, seed=3, max_tokens=24),
        SamplingParams(temperature=0, max_tokens=24, logit_bias={5: 4.0, 9: -3.0}),
        SamplingParams(temperature=1, top_p=0.8, top_k=20, seed=4, max_tokens=24),
        SamplingParams(temperature=1, seed=5, max_tokens=24, repetition_penalty=1.3, logprobs=2),
    ]
    form = SamplingParams(structured_outputs={"json": CALL}, temperature=1, seed=6, max_tokens=60)
    prompts = ["Once upon a time", "The function", "import", "A list of"]
    alone = llm.generate(prompts, others, False)
    mixed = [form, others[0], form, others[1], others[2], form, others[3]]
    beside = llm.generate(["x", prompts[0], "y", *prompts[1:3], "z", prompts[3]], mixed, False)
    texts = [output.outputs[0].text for output in beside]
    assert [texts[i] for i in (1, 3, 4, 6)] == [output.outputs[0].text for output in alone]
    assert texts[0] == llm.generate(["x"], form, False)[0].outputs[0].text


def test_logprobs_are_unmasked(llm):
    """As without a constraint: of logits that no mask has touched."""
    found = generate(llm, {"choice": ["zebra"]}, temperature=0, logprobs=1)
    free = llm.generate(
        ["Answer: "], SamplingParams(temperature=0, max_tokens=1, logprobs=1), False
    )
    (token, forced), (likeliest, top) = found.logprobs[0].items()
    (want,) = free[0].outputs[0].logprobs[0].items()
    assert (likeliest, top) == want
    assert token == found.token_ids[0] and forced.logprob < top.logprob


def test_each_output_of_a_prompt_has_its_own_state(llm):
    form = {"regex": "[ab]{2,9}!"}
    params = SamplingParams(structured_outputs=form, n=4, temperature=1.5, seed=1, max_tokens=40)
    texts = [each.text for each in llm.generate(["x"], params, False)[0].outputs]
    assert len(set(texts)) > 1 and all(re.fullmatch("[ab]{2,9}!", text) for text in texts)


def test_min_tokens_and_stop_strings(llm):
    form = {"regex": "(ab)+"}
    found = generate(llm, form, min_tokens=12, max_tokens=30)
    assert len(found.token_ids) >= 12
    assert generate(llm, {"regex": "x{3}END[a-z]{3}"}, stop=["END"]).text == "xxx"


def test_invalid_constraints_are_refused(llm):
    for form in ({"regex": "(["}, {"grammar": "start: nowhere"}, {"json": {"$ref": "#/nowhere"}}):
        with pytest.raises(InputError, match="structured_outputs"):
            generate(llm, form)


@pytest.mark.parametrize("depth", [0, 1])
def test_steps_in_flight_preemption_and_aborts(docs_5m, depth):
    """Few pages: requests are preempted and computed again, under the same constraint."""
    config = EngineConfig(
        model=str(docs_5m),
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=14,
        admission="fits",
        block_size=8,
    )
    engine = Engine(config, steps_in_flight=depth)
    form = {"regex": "([a-f]{4} ){5}[0-9]{2}"}
    for number in range(6):
        params = SamplingParams(structured_outputs=form, temperature=1, seed=number, max_tokens=60)
        engine.add_request(f"r{number}", [7] * (9 + number), params)
    engine.add_request("gone", [7] * 9, SamplingParams(structured_outputs={"regex": "[a-z]{90}"}))
    engine.abort("gone")
    tokens, reasons = {}, {}
    while engine.has_work():
        for event in engine.step():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
            reasons[event.request_id] = event.finish_reason or reasons.get(event.request_id)
    assert set(reasons.values()) == {"stop"} and len(reasons) == 6
    engine.scheduler.check_integrity()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(docs_5m)
    for found in tokens.values():
        text = tokenizer.decode(found, skip_special_tokens=True)
        assert re.fullmatch("([a-f]{4} ){5}[0-9]{2}", text)
