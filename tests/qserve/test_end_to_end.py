"""The product as its users meet it: `qserve serve` in a process, the official openai client."""

import concurrent.futures
import re
import socket
import subprocess
import sys
import urllib.request
from functools import partial

import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from formats.errors import InputError
from qserve import LLM, SamplingParams
from qserve.training import WeightBroadcast, send_weights
from tests.qserve.engine.control.new_weights import changed

STOP_SECONDS = 30
MESSAGES = [{"role": "user", "content": "What is a trait?"}]


@pytest.fixture(scope="module")
def server(quantized_5m, start_server):
    running = start_server(quantized_5m, "--served-model-name", "docs", "--max-num-seqs", "16")
    yield running
    assert running.stop() == 0, running.log_path.read_text()
    assert "leaked" not in running.log_path.read_text(), "libraries complain at the exit"


def test_models_lists_the_served_name(server):
    client = server.client()
    (model,) = client.models.list().data
    assert model.id == "docs" and client.models.retrieve("docs").id == "docs"
    with urllib.request.urlopen(f"{server.url}/health") as response:
        assert response.status == 200


@pytest.mark.parametrize("temperature", [0, 1])
def test_streamed_chat_equals_whole_chat(server, temperature):
    request = {
        "model": "docs",
        "messages": MESSAGES,
        "max_tokens": 24,
        "temperature": temperature,
        "seed": 3,
    }
    client = server.client()
    whole = client.chat.completions.create(**request)
    chunks = list(
        client.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content and len(text) > 10
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == whole.choices[0].finish_reason and set(reasons[:-1]) == {None}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage
    assert len(chunks) > 5, "tokens must come as they are made"


def test_streamed_completion_equals_greedy_text(server, quantized_5m):
    prompt = "The standard library"
    llm = LLM(quantized_5m, device="cpu")
    params = SamplingParams(temperature=0, max_tokens=20)
    expected = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text
    stream = server.client().completions.create(
        model="docs", prompt=prompt, max_tokens=20, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_stop_string_and_usage(server):
    client = server.client()
    full = client.completions.create(model="docs", prompt="A", max_tokens=30, temperature=0)
    text = full.choices[0].text
    stop = text[15:18]
    cut = client.completions.create(
        model="docs", prompt="A", max_tokens=30, temperature=0, stop=[stop]
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert full.usage.total_tokens == full.usage.prompt_tokens + full.usage.completion_tokens


def test_concurrent_requests_equal_single_request(server):
    def ask(number):
        client = server.client()
        return (
            client.completions.create(
                model="docs", prompt=f"Item {number}:", max_tokens=12, temperature=0
            )
            .choices[0]
            .text
        )

    alone = [ask(number) for number in range(3)]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        together = list(pool.map(ask, [n % 3 for n in range(24)]))
    assert together == alone * 8


def samples(server) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.url}/metrics") as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    return {
        sample.name.removeprefix("qserve:"): sample.value
        for family in families
        for sample in family.samples
        if set(sample.labels) <= {"model_name"}
    }


def test_metrics_equal_request_totals(server):
    client = server.client()
    # An earlier output that ended at its end token leaves one more step in flight. Steps are
    # reported in order, so that step is counted before this request's, which ends at its length.
    client.completions.create(model="docs", prompt=[7], max_tokens=1)
    before = samples(server)
    usages = [
        client.completions.create(
            model="docs", prompt=[5] * length, max_tokens=8, n=2, extra_body={"ignore_eos": True}
        ).usage
        for length in (3, 40)
    ]
    after = samples(server)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["generation_tokens_total"] == sum(u.completion_tokens for u in usages) == 32
    assert grown["prompt_tokens_total"] == 2 * 43
    assert grown["time_to_first_token_seconds_count"] == 4
    assert grown["inter_token_latency_seconds_count"] == 32 - 4
    assert grown["e2e_request_latency_seconds_count"] == 4
    assert grown["request_queue_time_seconds_count"] == 4
    # The last token of each output is never computed, nor what the second output of 40 tokens
    # finds: two pages of 16.
    assert (grown["prefix_cache_queries_total"], grown["prefix_cache_hits_total"]) == (2 * 43, 32)
    assert grown["iteration_tokens_total_sum"] == 2 * 43 - 32 + 32 - 4
    again = client.completions.create(model="docs", prompt=[5] * 40, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens == 32
    assert usages[1].prompt_tokens_details.cached_tokens == 0
    assert grown["iteration_tokens_total_count"] >= 2 * 8
    assert after["kv_cache_pages"] > 0
    held = ("num_requests_running", "num_requests_waiting", "num_tokens_waiting")
    for name in (*held, "kv_cache_pages_used", "num_requests_admitted"):
        assert after[name] == 0, name


def test_disconnect_does_not_disturb_others(server):
    client, before = server.client(), samples(server)["generation_tokens_total"]
    for _ in range(20):
        stream = client.completions.create(
            model="docs",
            prompt="Once",
            max_tokens=1500,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        stream.close()
    client.completions.create(model="docs", prompt="Hi", max_tokens=2)
    # of the 20 x 1500 tokens only those were made that came before the reader was seen to leave
    assert samples(server)["generation_tokens_total"] - before < 20 * 1500 / 4


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model": "gpt-5"}, openai.NotFoundError, "gpt-5"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"prompt": "word " * 3000}, openai.BadRequestError, "maximum context length is 2048"),
        ({"prompt": []}, openai.BadRequestError, "prompt"),
    ],
)
def test_invalid_requests_get_openai_errors(server, change, error, words):
    with pytest.raises(error) as raised:
        server.client().completions.create(**{"model": "docs", "prompt": "a", **change})
    assert words in str(raised.value)


@pytest.mark.exhaustive
def test_api_key_guards_and_sigterm_ends(quantized_5m, start_server):
    server = start_server(quantized_5m, "--api-key", "secret")
    with pytest.raises(openai.AuthenticationError):
        server.client("wrong").models.list()
    assert server.client("secret").models.list().data
    assert server.stop() == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("part_bytes", [None, 500_000])
def test_server_runs_the_weights_that_a_trainer_shares(docs_5m, start_server, part_bytes):
    flags = ("--enable-admin-routes", "--quantization", "w4a16-sym", "--api-key", "secret")
    server, new = start_server(docs_5m, *flags), changed(docs_5m)
    asked = {"prompt": "The engine", "max_tokens": 9, "temperature": 0}
    model = server.client("secret").models.list().data[0].id

    def text():
        return server.client("secret").completions.create(model=model, **asked).choices[0].text

    before = text()
    send = partial(send_weights, server.url, part_bytes=part_bytes, version=4)
    with pytest.raises(InputError, match="answered 401"):
        send(new, api_key="wrong")
    surplus = {**new, "surplus": torch.zeros(1)}
    with pytest.raises(InputError, match="answered 400: .*surplus"):
        send(surplus, api_key="secret")
    assert text() == before
    if part_bytes is None:
        assert send(new, api_key="secret") == "4"
    else:  # the same in parts through a group, from a generator
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        given = {"api_key": "secret", "port": port, "backend": "gloo", "timeout": 60.0}
        with WeightBroadcast(server.url, **given) as group:
            with pytest.raises(InputError, match="answered 400: .*surplus"):
                group.send(surplus, part_bytes=part_bytes)
            assert group.send(iter(new.items()), version=5, part_bytes=part_bytes) == "5"
        assert send(new, api_key="secret") == "4"
    llm = LLM(docs_5m, quantization="w4a16-sym", device="cpu")
    llm.update_weights(new)
    params = SamplingParams(max_tokens=9, temperature=0)
    (output,) = llm.generate(["The engine"], params, use_tqdm=False)
    assert text() == output.outputs[0].text != before


@pytest.mark.exhaustive
def test_failed_start_prints_one_line(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "qserve.cli", "serve", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 1
    assert re.fullmatch(r"qserve serve: .*config\.json: not found.*\n", run.stderr)


@pytest.mark.exhaustive
def test_engine_death_ends_server(quantized_5m, start_server):
    server = start_server(quantized_5m)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(server.process.pid)], capture_output=True, text=True
    ).stdout.split()
    subprocess.run(["kill", "-9", *children], check=False)
    assert server.process.wait(STOP_SECONDS) != 0


def test_prompt_scoring_equals_lm_eval(server, quantized_5m, transformers_model):
    """echo, logprobs and no tokens: transformers' log-softmax of each token of two prompts."""
    prompts = [list(range(40, 75)), [9, 300, 12, 7, 7, 2000]]
    reply = server.client().completions.create(
        model="docs", prompt=prompts, max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    model = transformers_model(quantized_5m)
    for prompt, choice in zip(prompts, reply.choices, strict=True):
        with torch.no_grad():
            values_SV = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        want = values_SV[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        found = choice.logprobs
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        assert found.token_logprobs[1:] == pytest.approx(want.tolist(), abs=1e-3)
        best = [max(top.values()) for top in found.top_logprobs[1:]]
        assert best == pytest.approx(values_SV[:-1].max(-1).values.tolist(), abs=1e-3)
        assert choice.finish_reason == "length"
    assert reply.usage.completion_tokens == 0
