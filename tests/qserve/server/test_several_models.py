"""One server of several models: which model answers, and what each is set to."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading

import httpx
import pytest

from formats.errors import InputError
from qserve import LLM, SamplingParams
from qserve.config import EngineConfig, ServerConfig
from qserve.server.app import app_of, make_service
from qserve.server.models.configs import model_configs
from qserve.server.models.turns import ModelTurns
from tests.qserve.server.conftest import ScriptedClient, Server

GUARD = 120  # seconds, against hanging


class Models(Server):
    """Two scripted models, "a" and "b"."""

    def __init__(self, tokenizer, *, turns=False, **settings):
        self.tokenizer, self.clients, services = tokenizer, {}, []
        self.log = []
        for name in ("a", "b"):
            client = self.clients[name] = ScriptedClient(tokenizer)
            client.text = f"This is {name}."
            client.operate = self._operate(name)
            config = ServerConfig(served_model_name=[name, f"{name}-2"], **settings)
            services.append(make_service(client, tokenizer, config, max_num_seqs=8))
        self.turns = ModelTurns([*self.clients.values()], 0.0) if turns else None
        self.app = app_of(services, config, turns=self.turns)

    def _operate(self, name):
        async def operate(command):
            self.log.append((type(command).__name__, name))
            return None, ""

        return operate


@pytest.fixture
def models(tokenizer):
    return Models(tokenizer)


def text_of(reply):
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


def test_model_field_selects_engine(models):
    for name, model in (("a", "a"), ("b", "b"), ("b", "b-2")):
        assert text_of(models.complete(model=model)) == f"This is {name}."
    chat = models.chat(model="b").json()
    assert chat["model"] == "b" and chat["choices"][0]["message"]["content"] == "This is b."
    body = {"model": "b", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    reply = models.post("/v1/messages", body).json()
    assert (reply["model"], reply["content"][0]["text"]) == ("b", "This is b.")
    assert models.post("/tokenize", {"model": "a", "prompt": "Hi"}).status_code == 200
    assert [len(client.requests) for client in models.clients.values()] == [1, 4]


def test_unknown_model_is_refused(models, error):
    found = error(models.complete(), 400)
    assert found["message"] == "model: expected one of 'a', 'b', found none. Add the field."
    found = error(models.complete(model="c"), 404)
    assert found["message"].endswith(
        "this server serves 'a', 'a-2', 'b', 'b-2'. Use one of these names."
    )
    error(models.complete(model=7), 400)
    headers = {"Content-Type": "application/json"}
    error(models.request("POST", "/v1/completions", content="{", headers=headers), 400)
    error(models.request("POST", "/v1/completions", content='{"model": "b"', headers=headers), 400)
    error(models.request("POST", "/v1/completions", data={"model": "b"}), 415)
    assert models.post("/v1/messages", {"model": "c"}).json()["type"] == "error"
    assert not any(client.requests for client in models.clients.values())


def test_bodies_are_bounded_before_a_model_is_known(tokenizer, error):
    models = Models(tokenizer, max_body_bytes=1000)
    error(models.complete(model="b", stop="x" * 2000), 413)
    error(models.complete(model="b", stop=[[]] * 400), 413)
    deep = json.dumps({"model": "b", "prompt": "x"})[:-1] + ', "x": ' + "[" * 40000
    wide = Models(tokenizer)
    assert (
        "lists and objects"
        in error(wide.request("POST", "/v1/completions", content=deep), 400)["message"]
    )


def test_admin_requests_select_model_by_query(models, tokenizer, error):
    found = error(models.request("POST", "/reset_prefix_cache"), 400)
    expected = "This server has several models. Add ?model=a or ?model=b to the URL."
    assert found["message"] == expected
    models = Models(tokenizer, enable_cache_reset=True)
    assert models.request("POST", "/reset_prefix_cache?model=b-2").status_code == 200
    assert [client.num_resets for client in models.clients.values()] == [0, 1]
    error(models.request("POST", "/reset_prefix_cache?model=c"), 404)


def test_reports_cover_all_models(models):
    names = [card["id"] for card in models.get("/v1/models").json()["data"]]
    assert names == ["a", "a-2", "b", "b-2"]
    assert models.get("/v1/models/b-2").json()["id"] == "b-2"
    assert models.get("/v1/models/c").status_code == 404
    models.complete(model="b")
    models.complete(model="b", temperature=-1)
    lines = models.get("/metrics").text.splitlines()
    requests = [line for line in lines if line.startswith("qserve:http_requests_total{")]
    assert any('model_name="b"' in line and 'status="400"' in line for line in requests)
    assert not any('model_name="a"' in line and "completions" in line for line in requests)
    assert models.get("/health").status_code == models.get("/ready").status_code == 200
    models.clients["b"].is_alive = False
    assert models.get("/health").status_code == models.get("/ready").status_code == 503
    assert text_of(models.complete(model="a")) == "This is a."
    assert models.complete(model="b").status_code == 503


def test_keys_are_checked_first(tokenizer, error):
    models = Models(tokenizer, api_key=["secret"])
    error(models.complete(model="b"), 401)
    headers = {"Authorization": "Bearer secret"}
    body = {"prompt": "x", "model": "b"}
    assert text_of(models.post("/v1/completions", body, headers=headers)) == "This is b."


def test_request_wakes_its_model(tokenizer):
    models = Models(tokenizer, turns=True, enable_cache_reset=True)
    assert [text_of(models.complete(model=name)) for name in "aab"] == [
        *("This is a.", "This is a.", "This is b.")
    ]
    assert models.log == [("Sleep", "a"), ("WakeUp", "b")]
    assert models.post("/tokenize", {"model": "a", "prompt": "Hi"}).status_code == 200
    counted = models.post("/v1/responses/input_tokens", {"model": "a", "input": "Hi"})
    assert counted.json()["input_tokens"] > 1
    assert len(models.log) == 2, "the text of a sleeping model is counted without its engine"
    assert models.request("POST", "/reset_prefix_cache?model=a").status_code == 200
    assert len(models.log) == 2 and models.clients["a"].num_resets == 1, "it has no pages"
    stream = models.complete(model="a", stream=True)
    assert "This" in stream.text and stream.text.endswith("data: [DONE]\n\n")
    assert models.turns._num_running == 0


def test_disconnect_while_waiting_for_model(tokenizer, run_live):
    models = Models(tokenizer, turns=True)
    models.clients["a"].gate = threading.Semaphore(0)
    url = f"http://127.0.0.1:{run_live(models)}/v1/completions"

    async def scenario():
        async with httpx.AsyncClient(timeout=GUARD) as http:
            first = asyncio.create_task(http.post(url, json={"model": "a", "prompt": "x"}))
            while not models.clients["a"].running:
                await asyncio.sleep(0.01)
            with pytest.raises(httpx.ReadTimeout):
                await http.post(url, json={"model": "b", "prompt": "x"}, timeout=0.5)
            while models.turns._waiting:
                await asyncio.sleep(0.01)
            models.clients["a"].gate.release(1000)
            assert text_of(await first) == "This is a."

    asyncio.run(asyncio.wait_for(scenario(), GUARD))
    assert models.log == [] and not models.clients["b"].requests


def configs(tmp_path, text=None, models=("x", "y", "z"), utilization=0.9, **settings):
    if text is not None:
        (tmp_path / "models.yaml").write_text(text)
        settings["model_settings"] = str(tmp_path / "models.yaml")
    engine = EngineConfig(model=models[0], gpu_memory_utilization=utilization, max_num_seqs=7)
    return model_configs(engine, ServerConfig(more_models=list(models[1:]), **settings))


def test_each_model_has_its_own_settings(tmp_path):
    text = "y:\n  max-model-len: 99\n  enforce_eager: true\n  served_model_name: [why, Y]\nz:\n"
    found = configs(tmp_path, text)
    assert [each.engine.model for each in found] == ["x", "y", "z"]
    assert [each.engine.max_model_len for each in found] == [None, 99, None]
    assert [each.engine.enforce_eager for each in found] == [False, True, False]
    assert {each.engine.max_num_seqs for each in found} == {7}
    assert [each.server.served_model_name for each in found] == [["x"], ["why", "Y"], ["z"]]


def test_memory_fraction_is_split_over_engines(tmp_path):
    """An engine counts the memory of those before it as used, so its limit includes theirs."""
    shares = [each.engine.gpu_memory_utilization for each in configs(tmp_path)]
    assert shares == pytest.approx([0.3, 0.6, 0.9])
    found = configs(tmp_path, "y: {gpu_memory_utilization: 0.5}")
    assert [each.engine.gpu_memory_utilization for each in found] == pytest.approx([0.2, 0.7, 0.9])
    found = configs(tmp_path, memory_sharing="sleep")
    assert {each.engine.gpu_memory_utilization for each in found} == {0.9}
    (alone,) = configs(tmp_path, models=["x"])
    assert alone.engine.gpu_memory_utilization == 0.9


@pytest.mark.parametrize(
    ("text", "settings", "words"),
    [
        ("w: {}", {}, "w is none of the models x, y, z"),
        ("y: 3", {}, "y: expected a mapping"),
        ("y: {max_model_length: 3}", {}, "max-model-length is not a setting"),
        ("y: {max_model_len: many}", {}, "models.yaml: y.*max-model-len.*many"),
        ("y: {max_num_seqs: 0}", {}, "--max-num-seqs: expected 1 or more"),
        ("y: {port: 3}", {}, "port is not a setting"),
        ("y: {served_model_name: x}", {}, "model name x: is used for both x and y"),
        ("y: {gpu_memory_utilization: 0.95}", {}, "own shares are 0.95 of 0.9"),
        (None, {"models": ["x", "x"]}, "a model is given twice"),
        (None, {"served_model_name": ["n"]}, "--served-model-name: does not work with several"),
        (None, {"memory_sharing": "sleep", "restart_engine": 1}, "--restart-engine: does not"),
        (None, {"memory_sharing": "sleep", "paused_requests": "refuse"}, "--paused-requests"),
        (None, {"memory_sharing": "sleep", "enable_admin_routes": True}, "--enable-admin-routes"),
        ("y: {gpu_memory_utilization: 0.4}", {"memory_sharing": "sleep"}, "the same for all"),
    ],
)
def test_invalid_settings_are_refused(tmp_path, text, settings, words):
    with pytest.raises(InputError, match=words):
        configs(tmp_path, text, **settings)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sharing", ["sleep", "split"])
def test_command_serves_two_models(docs_5m, quantized_5m, sharing, tmp_path):
    """Interleaved requests get the texts of engines that serve each model alone."""
    folders = [str(docs_5m), str(quantized_5m)]
    command = [sys.executable, "-m", "qserve", "serve", *folders, "--memory-sharing", sharing]
    command += ["--port", "0", "--device", "cpu", "--num-gpu-blocks-override", "64"]
    command += ["--max-model-len", "128", "--model-turn-seconds", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        line = next(line for line in process.stdout if line.startswith("Serving"))
        assert line.startswith(f"Serving {folders[0]}, {folders[1]} on http")
        asked = [(folder, prompt) for prompt in ("The", "A model", "Use") for folder in folders]

        async def ask():
            async with httpx.AsyncClient(base_url=line.split()[-1], timeout=GUARD) as http:
                bodies = [
                    {"model": folder, "prompt": prompt, "max_tokens": 12, "temperature": 0}
                    for folder, prompt in asked
                ]
                calls = (http.post("/v1/completions", json=body) for body in bodies)
                return [text_of(reply) for reply in await asyncio.gather(*calls)]

        found = asyncio.run(ask())
        process.send_signal(signal.SIGTERM)
        assert process.wait(GUARD) == 0
    finally:
        process.kill()
        process.communicate()
    greedy = SamplingParams(temperature=0, max_tokens=12)
    llms = {folder: LLM(folder, device="cpu", max_model_len=128) for folder in folders}
    want = [llms[folder].generate(prompt, greedy, use_tqdm=False) for folder, prompt in asked]
    assert found == [outputs[0].outputs[0].text for outputs in want]
    assert len(set(found)) > 3, "or it tests less than it says"
