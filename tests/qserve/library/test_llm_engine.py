"""LLMEngine: the loop is the caller's. Outputs grow, end, are dropped, and say when."""

import gc
import weakref

import pytest

from formats.errors import InputError
from qserve import EngineConfig, LLMEngine, SamplingParams
from qserve.hub.local import local_adapter
from qserve.library.outputs import EngineDeadError
from qserve.llm import LLM

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(docs_5m):
    config = EngineConfig(model=str(docs_5m), device="cpu", max_num_seqs=8)
    return LLMEngine.from_engine_args(config)


def run_out(engine):
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    return found


def test_engine_is_freed_with_its_last_reference(docs_5m):
    """Without the garbage collector: ranks and device memory would stay until it runs."""
    llm = LLM(str(docs_5m), device="cpu")
    llm.generate("Hello", GREEDY, use_tqdm=False)
    found = [weakref.ref(each) for each in (llm.llm_engine, llm.engine, llm.engine.runner)]
    gc.disable()
    try:
        del llm
        assert [each() for each in found] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.exhaustive
def test_outputs_are_cumulative_and_final_equals_llm(engine, docs_5m):
    engine.add_request("a", "A process is", GREEDY)
    engine.add_request("b", {"prompt_token_ids": [5, 6, 7]}, GREEDY)
    engine.add_request("c", {"prompt": "The"}, SamplingParams(temperature=0, max_tokens=2, n=2))
    assert engine.get_num_unfinished_requests() == 3
    found = run_out(engine)
    counts = [len(output.outputs[0].token_ids) for output in found["a"]]
    assert counts == [1, 2, 3, 4, 5, 6], "a snapshot does not change with later steps"
    assert [output.finished for output in found["a"]] == [False] * 5 + [True]
    for name, prompt in (("a", "A process is"), ("b", [5, 6, 7])):
        (want,) = LLM(docs_5m, device="cpu").generate(prompt, GREEDY, use_tqdm=False)
        assert found[name][-1].outputs == want.outputs
        assert found[name][-1].prompt == want.prompt
    assert len(found["c"][-1].outputs) == 2
    times = found["a"][-1].metrics
    assert times.arrival_time <= times.first_token_time <= times.finished_time
    assert found["a"][0].metrics.finished_time is None


def test_aborted_request_ends_and_frees_pages(engine):
    for name in ("a", "b", "c"):
        engine.add_request(name, [5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True, n=2))
    engine.step()
    engine.abort_request(["a", "c", "unknown"])
    engine.abort_request("unknown")
    assert set(run_out(engine)) == {"b"}
    pool = engine.engine.scheduler.pool
    assert pool.num_free == pool.num_pages and not engine.engine.has_work()


def test_stop_string_ends_one_of_two_choices(engine):
    engine.add_request("x", "A process is", GREEDY)
    text = run_out(engine)["x"][-1].outputs[0].text
    params = SamplingParams(temperature=0, max_tokens=500, stop=(text[4:7],), ignore_eos=True)
    engine.add_request("y", "A process is", params)
    last = run_out(engine)["y"][-1]
    assert last.finished and last.outputs[0].stop_reason == text[4:7]
    assert last.outputs[0].text == text[:4]
    assert not engine.engine.has_work()


def test_cumulative_logprob_is_the_sum(engine):
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=0, ignore_eos=True)
    engine.add_request("a", [5, 6, 7], params)
    (completion,) = run_out(engine)["a"][-1].outputs
    logprobs = [each.logprob for found in completion.logprobs for each in found.values()]
    assert len(logprobs) == 3 and completion.cumulative_logprob == sum(logprobs) < 0
    engine.add_request("b", [5, 6, 7], GREEDY)
    assert run_out(engine)["b"][-1].outputs[0].cumulative_logprob is None


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ({"prompt": None}, "expected a dict with prompt or prompt_token_ids"),
        ({"prompt": "a", "encoder_prompt": "b"}, "encoder_prompt, prompt"),
        ([], "expected a prompt of 1 to"),
    ],
)
def test_invalid_prompt_is_refused_without_state(engine, prompt, problem):
    with pytest.raises(InputError, match=problem):
        engine.add_request("a", prompt, GREEDY)
    assert not engine.has_unfinished_requests() and not engine.engine.has_work()


def test_duplicate_request_id_is_refused(engine):
    engine.add_request("a", [5], GREEDY)
    with pytest.raises(InputError, match="request a: is running already"):
        engine.add_request("a", [5], GREEDY)
    assert len(run_out(engine)["a"][-1].outputs[0].token_ids) == 6
    engine.add_request("a", [5], GREEDY)
    run_out(engine)


def test_failed_step_ends_engine(docs_5m, monkeypatch):
    config = EngineConfig(model=str(docs_5m), device="cpu")
    engine = LLMEngine(config)
    engine.check_health()
    engine.add_request("a", [5], GREEDY)
    monkeypatch.setattr(engine.engine.workers, "launch", lambda step: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    for call in (engine.check_health, engine.step, lambda: engine.add_request("b", [5], GREEDY)):
        with pytest.raises(EngineDeadError, match="a step failed: ZeroDivisionError"):
            call()


def test_progress_bar_shows_tokens_per_second(docs_5m, capsys):
    LLM(docs_5m, device="cpu").generate(["The", "A"], GREEDY)
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown
    assert "output 0 tokens/s" not in shown.split("\r")[-1] and "tokens/s" in shown.split("\r")[-1]


def test_priorities_and_salts_reach_the_engine(docs_5m):
    llm = LLM(docs_5m, device="cpu", max_num_seqs=1, scheduling_policy="priority", block_size=4)
    order = []
    add = llm.engine.add_request

    def watched(*arguments, **settings):
        order.append(settings["options"])
        add(*arguments, **settings)

    llm.engine.add_request = watched
    prompt = list(range(5, 30))
    prompts = [{"prompt_token_ids": prompt, "cache_salt": salt} for salt in ("a", "b", "a")]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, priority=[3, 2, 1])
    assert [(each.priority, each.cache_salt) for each in order] == [(3, "a"), (2, "b"), (1, "a")]
    ends = [output.metrics.finished_time for output in outputs]
    assert ends[2] < ends[1] < ends[0]
    assert [output.num_cached_tokens > 0 for output in outputs] == [True, False, False]
    with pytest.raises(InputError, match="priority: expected 2, found 1"):
        llm.generate([[5], [6]], GREEDY, priority=[1])


def test_adapter_that_is_no_request_is_refused():
    with pytest.raises(InputError, match=r"lora_request: expected a LoRARequest, found str .*sql"):
        local_adapter("./sql-lora", EngineConfig(model="m"))
