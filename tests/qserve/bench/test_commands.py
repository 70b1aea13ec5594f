"""The commands of `qserve bench` that run a model, with the small one on a CPU."""

import contextlib
import json

import pytest

from formats.errors import InputError
from qserve.bench.commands import BENCH_COMMANDS
from qserve.bench.offline import startup, throughput
from qserve.bench.steps import forward
from qserve.bench.steps.step_case import CaseRequests, StepCase
from qserve.cli import build_parser, main
from qserve.llm import LLM
from qserve.text.tokenizer import Tokenizer

MODEL = "examples/models/docs-5m"
ENGINE = ["--device", "cpu", "--cpu-kv-cache-memory", "0.02", "--max-num-seqs", "8"]


def test_every_command_has_help():
    (action,) = (a for a in build_parser()._actions if a.dest == "command")
    (inner,) = (a for a in action.choices["bench"]._actions if a.dest == "bench command")
    assert inner.choices.keys() == BENCH_COMMANDS.keys()
    for parser in inner.choices.values():
        assert all(len(each.help) > 8 for each in parser._actions)


def run(capsys, *arguments):
    assert main(["bench", *arguments]) == 0
    return capsys.readouterr().out


def test_latency(tmp_path, capsys):
    out = tmp_path / "latency.json"
    flags = ["--batch-size", "2", "--input-len", "6", "--output-len", "3", "--num-iters", "2"]
    flags += ["--num-iters-warmup", "1", "--output-json", str(out)]
    flags += ["--profile", "--profile-dir", str(tmp_path)]
    shown = run(capsys, "latency", "--model", MODEL, *ENGINE, *flags)
    assert "Avg latency: " in shown and "99% percentile latency: " in shown
    assert "3 steps, span" in shown  # one prompt step, two decodes
    found = json.loads(out.read_text())
    assert {"model_id", "avg_latency", "latencies", "percentiles"} <= found.keys()
    assert found["percentiles"].keys() == {"10", "25", "50", "75", "90", "99"}
    assert len(found["latencies"]) == 2
    assert 0 < found["avg_first_token_latency"] < found["avg_latency"]
    names = {each["name"] for each in _events(tmp_path / "latency.trace.json.gz")}
    assert "layer 0" in names and "step 0 decode=0 chunk=12" in names


def test_throughput_does_not_measure_the_tokenizers_import(capsys, monkeypatch):
    loaded, init = [], Tokenizer.__init__
    monkeypatch.setattr(Tokenizer, "__init__", lambda *a: loaded.append(a) or init(*a))
    before = []

    def watched(llm, *arguments, **named):
        before.append(len(loaded))
        return measure(llm, *arguments, **named)

    measure = throughput.run
    monkeypatch.setattr(throughput, "run", watched)
    sizes = ["--input-len", "5", "--output-len", "2", "--num-prompts", "2"]
    run(capsys, "throughput", MODEL, *ENGINE, *sizes)
    assert before == [1] and len(loaded) == 1


def test_latency_with_too_long_input_is_refused_before_loading(capsys, monkeypatch):
    monkeypatch.setattr(LLM, "__init__", lambda *_, **__: pytest.fail("it was loaded"))
    flags = ["--input-len", "90", "--output-len", "11", "--max-model-len", "100"]
    assert main(["bench", "latency", MODEL, *ENGINE, *flags]) == 1
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0 and "--input-len 90: expected at most 89 tokens" in said


def _events(path):
    from qserve.profile.chrome_trace import read_trace

    return read_trace(path)


def test_throughput(tmp_path, capsys):
    out = tmp_path / "throughput.json"
    flags = ["--num-prompts", "5", "--input-len", "7", "--output-len", "3", "--disable-tqdm"]
    shown = run(capsys, "throughput", MODEL, *ENGINE, *flags, "--output-json", str(out))
    assert "Throughput: " in shown and "Total num output tokens:  15" in shown
    found = json.loads(out.read_text())
    keys = {"elapsed_time", "num_requests", "total_num_tokens", "requests_per_second"}
    assert keys | {"tokens_per_second"} <= found.keys()
    assert found["total_num_tokens"] >= 5 * (7 - 2) + 15 and found["num_steps"] == 3


@pytest.mark.exhaustive
def test_warm_starts_reuse_compiled_kernels(tmp_path, monkeypatch, capsys):
    caches = []

    def start(engine, input_len, cache):
        caches.append(cache)
        times = {"started": 0.0, "imported": 1.0, "ready": float(len(caches)), "first_token": 9.0}
        return times | {"phases": {}}

    monkeypatch.setattr(startup, "start", start)
    flags = ["--num-iters-cold", "2", "--num-iters-warmup", "1", "--num-iters-warm", "2"]
    shown = run(capsys, "startup", MODEL, *ENGINE, *flags)
    first, *others = caches
    assert len(caches) == 5 and first not in others and len(set(others)) == 1
    ready = [line.split()[4] for line in shown.splitlines() if " start: ready after" in line]
    assert ready == ["1.00", "2.00", "4.00", "5.00"], (
        "each is reported as it ends, except the uncounted one"
    )


@pytest.mark.exhaustive
def test_startup(tmp_path, capsys):
    out = tmp_path / "startup.json"
    flags = ["--num-iters-cold", "1", "--num-iters-warmup", "0", "--num-iters-warm", "1"]
    flags += ["--input-len", "4", "--output-json", str(out)]
    shown = run(capsys, "startup", MODEL, *ENGINE, *flags)
    assert "Loading the model" in shown
    found = json.loads(out.read_text())
    for name in ("cold_startup", "warm_startup", "cold_compilation", "warm_compilation"):
        assert {f"avg_{name}_time", f"{name}_times", f"{name}_percentiles"} <= found.keys()
    assert found["avg_cold_first_token_time"] > found["avg_cold_startup_time"] > 0


def test_forward_and_simulate_with_its_times(tmp_path, capsys):
    out = tmp_path / "forward.json"
    cases = ["mix=8,2*1@9", "verify=2*3@8:2", "part=8@8c"]
    flags = ["--case", *cases, "--decode-batches", "1,4", "--decode-contexts", "8,32"]
    flags += ["--prefill-tokens", "8,24", "--iters", "1", "--samples", "2"]
    shown = run(capsys, "forward", MODEL, *ENGINE, *flags, "--output-json", str(out))
    assert "[forward] verify: 2 reqs, 6 tokens, median " in shown
    found = json.loads(out.read_text())
    assert [each["case"] for each in found["cases"]][:4] == ["mix", "verify", "part", "decode-1x8"]
    assert len(found["cases"]) == 3 + 4 + 2
    assert all(each["median_us"] > 0 and each["graph"] == "none" for each in found["cases"])
    shown = run(capsys, "simulate", "--steps", str(out), "--num-prompts", "4")
    assert (
        "Simulated Serving Result" in shown
        and "Successful requests:                     4" in shown
    )
    shown = run(capsys, "compare", str(out), str(out))
    assert "mix.median_us" in shown and "within the spread" in shown


def test_profile_of_a_case(tmp_path, capsys):
    flags = ["--case", "decode=2*1@8", "--iters", "2", "--profile-dir", str(tmp_path)]
    assert main(["profile", MODEL, *ENGINE, *flags]) == 0
    shown = capsys.readouterr().out
    assert "2 steps" in shown and "products" in shown and "attention" in shown


def test_case_texts_parse():
    case = StepCase.parse("mix=2048,32*1@4096,3*4@7:3,5@6c")
    assert case.requests == (
        CaseRequests(count=32, query_len=1, kv_len=4096),
        CaseRequests(count=3, query_len=4, kv_len=7, num_draft_tokens=3),
        CaseRequests(query_len=2048),
        CaseRequests(query_len=5, kv_len=6, chunked=True),
    )
    assert [each.num_sampled for each in case.requests] == [1, 4, 1, 0]
    assert case.num_tokens == 2048 + 32 + 12 + 5 and case.longest == 4097
    for wrong in ("decode", "x=", "x=0*1", "x=2@3:4", "x=1@2d"):
        with pytest.raises(InputError, match="--case"):
            StepCase.parse(wrong)


def test_invalid_case_is_refused_before_measuring(capsys):
    assert main(["bench", "forward", MODEL, *ENGINE, "--case", "a=1@3", "d=9*1@3"]) == 1
    shown = capsys.readouterr()
    assert "case d: needs 9 requests, but --max-num-seqs is 8" in shown.err
    assert "[forward]" not in shown.out


def test_interrupt_writes_results_so_far(tmp_path, monkeypatch):
    measure = forward.measure

    def interrupted(timer, case, settings):
        if case.name == "b":
            raise KeyboardInterrupt
        return measure(timer, case, settings)

    monkeypatch.setattr(forward, "measure", interrupted)
    out, flags = tmp_path / "out.json", ["--case", "a=1@3", "b=2@3", "--iters", "1"]
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        main(["bench", "forward", MODEL, *ENGINE, *flags, "--output-json", str(out)])
    assert [each["case"] for each in json.loads(out.read_text())["cases"]] == ["a"]


def test_more_layers_than_the_measured_model_has_are_refused(capsys):
    assert main(["bench", "quantize", "--layers", "33"]) == 1
    assert "--layers 33: llama-3-8b has 32 layers (use at most 32)" in capsys.readouterr().err
