"""Replicas on the real Ray Serve, on a CPU: prompts that begin alike, a kill under load, a drain.

Minutes, and a gigabyte: exhaustive. Parts without Ray have tests in this folder.
"""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
import yaml

from qserve.config import EngineConfig, ServerConfig
from qserve.deploy.settings import DeploySettings

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]
ROOT = Path(__file__).resolve().parents[3]
GUARD = 600.0  # seconds, against hanging
LONG = {"max_tokens": 500, "ignore_eos": True, "temperature": 0, "stream": True}
LONG |= {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def cluster():
    """The address of Ray's HTTP proxy."""
    import ray
    from ray import serve

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    # Not the machine's cores: each replica asks for one, and shares them here.
    ray.init(
        address="local",  # another worker of the tests may have one
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def deploy(cluster, docs_5m):
    """(name, replicas, ...) -> an httpx client of that application."""
    from ray import serve

    from qserve.deploy.ray_app import application

    clients = []

    def run(name, replicas=2, **settings):
        app = application(
            EngineConfig(model=str(docs_5m), device="cpu", max_num_seqs=16),
            ServerConfig(served_model_name=["docs"]),
            DeploySettings(backend="ray", replicas=replicas, drain_timeout=GUARD, **settings),
        )
        serve.run(app, name=name, route_prefix=f"/{name}")
        clients.append(httpx.Client(base_url=f"{cluster}/{name}", timeout=GUARD))
        return clients[-1]

    yield run
    for client in clients:
        client.close()


@pytest.fixture(scope="module")
def pair(deploy):
    return deploy("pair")


def metric(client, name):
    """Process of each replica -> a metric of it."""
    page = client.get("/metrics").text
    found = re.findall(rf'^qserve:{name}{{replica="(\d+)/.*}} ([\d.e+-]+)$', page, re.M)
    return {int(pid): float(value) for pid, value in found}


def until(holds, what):
    deadline = time.monotonic() + GUARD
    while not (found := holds()):
        assert time.monotonic() < deadline, f"waited too long: {what}"
        time.sleep(0.1)
    return found


class Stream(threading.Thread):
    """A long answer, read to its end."""

    def __init__(self, client, number):
        super().__init__(daemon=True)
        self.client, self.body = client, {"prompt": f"{number} trait is", **LONG}
        self.events, self.begun, self.failure = [], threading.Event(), None

    def run(self):
        try:
            with self.client.stream("POST", "/v1/completions", json=self.body) as reply:
                rest = b""  # not by lines: a text may hold signs that some take for their ends
                for piece in reply.iter_raw():
                    *events, rest = (rest + piece).split(b"\n\n")
                    self.events += [event.decode().removeprefix("data: ") for event in events]
                    self.begun.set()
        except httpx.HTTPError as error:
            self.failure = error
        self.begun.set()

    @property
    def error(self):
        found = [e for e in self.events if e.startswith('{"error"')]
        return json.loads(found[0])["error"] if found else None

    @property
    def is_whole(self):
        *_, last, done = self.events
        usage = json.loads(last).get("usage") or {}
        return done == "[DONE]" and usage.get("completion_tokens") == LONG["max_tokens"]


def start_streams(client, count):
    streams = [Stream(client, number) for number in range(count)]
    for stream in streams:
        stream.start()
    for stream in streams:
        assert stream.begun.wait(GUARD)
    return streams


def end_of(streams):
    for stream in streams:
        stream.join(GUARD)
        assert not stream.is_alive() and stream.failure is None, stream.failure


def test_replies_equal_single_server(pair):
    body = {"prompt": "A trait is", "max_tokens": 8, "temperature": 0}
    replies = [pair.post("/v1/completions", json=body).json() for _ in range(6)]
    assert len({reply["choices"][0]["text"] for reply in replies}) == 1
    assert replies[0]["usage"]["completion_tokens"] == 8
    assert pair.get("/v1/models").json()["data"][0]["id"] == "docs"
    assert pair.get("/health").status_code == 200
    assert (
        pair.post(
            "/v1/completions", content=b"{", headers={"Content-Type": "application/json"}
        ).status_code
        == 400
    )
    assert pair.get("/nothing").json()["error"]["code"] == 404
    named = pair.post("/v1/completions", json=body, headers={"x-request-id": "abc"})
    assert named.headers.get_list("x-request-id") == ["abc"]
    assert named.json()["id"] == "cmpl-abc"


def test_disconnect_frees_replica(pair):
    with pair.stream("POST", "/v1/completions", json={"prompt": "One", **LONG}) as reply:
        next(reply.iter_lines())
    until(lambda: not any(metric(pair, "num_requests_running").values()), "the abort")
    page = pair.get("/metrics").text
    aborted = re.findall(r'request_success_total{.*finished_reason="abort".*} ([\d.]+)', page)
    assert sum(map(float, aborted)) == 1, "it was aborted, not computed to its end"


def shared_prefix_trace():
    """Requests of 8 long beginnings, each many times, in a random order."""
    rng = random.Random(3)
    text = "a trait is the type of a value that can stand in one place of this module"
    words = text.split()
    beginnings = [" ".join(rng.choice(words) for _ in range(250)) for _ in range(8)]
    prompts = [f"{each} {rng.randrange(10**6)}" for each in beginnings for _ in range(6)]
    rng.shuffle(prompts)
    return prompts


def hit_rate(client):
    for prompt in shared_prefix_trace():
        reply = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
        assert reply.status_code == 200
    hits = metric(client, "prefix_cache_hits_total")
    queries = metric(client, "prefix_cache_queries_total")
    assert len(queries) == 2 and all(queries.values()), "both replicas took part"
    return sum(hits.values()) / sum(queries.values())


def test_prefix_routing_hits_more_than_round_robin(deploy, capsys):
    from ray import serve

    by_turns = hit_rate(deploy("turns", router="round-robin"))
    by_prefix = hit_rate(deploy("prefixes", router="prefix"))
    with capsys.disabled():
        print(f"\nprefix cache hit rate: by prefix {by_prefix:.3f}, by turns {by_turns:.3f}")
    # Of 6 requests of a beginning all but the first find it at one replica, all but two at two.
    assert by_prefix > 0.75 and by_prefix - by_turns > 0.1
    for name in ("turns", "prefixes"):
        serve.delete(name)


def test_killed_replica_ends_only_its_streams(pair):
    streams = start_streams(pair, 8)
    running = metric(pair, "num_requests_running")
    assert len(running) == 2 and all(running.values()), "both have streams"
    victim = next(iter(running))
    os.kill(victim, signal.SIGKILL)
    end_of(streams)
    lost = [stream for stream in streams if stream.error is not None]
    assert len(lost) == running[victim]
    for stream in streams:
        assert stream in lost or stream.is_whole
        assert stream.events[-1] == "[DONE]"
        if stream in lost:
            assert stream.error["code"] == 503 and "died" in stream.error["message"]
    body = {"prompt": "A trait is", "max_tokens": 2}
    assert pair.post("/v1/completions", json=body).status_code == 200, "the other goes on"
    until(lambda: len(metric(pair, "num_requests_running").keys() - {victim}) == 2, "a new one")
    end_of(again := start_streams(pair, 8))
    assert all(stream.is_whole for stream in again)


def test_dead_engine_replaces_replica(pair):
    """The actor lives, its engine does not: Ray learns of it by check_health."""
    before = metric(pair, "num_requests_running").keys()
    victim = next(iter(before))
    (engine,) = [
        int(child)
        for path in Path(f"/proc/{victim}/task").glob("*/children")  # of any of its threads
        for child in path.read_text().split()
        if b"qserve.engine.ipc.process" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    os.kill(engine, signal.SIGKILL)

    def is_replaced():
        now = metric(pair, "num_requests_running").keys()
        return victim not in now and len(now) == 2

    until(is_replaced, "a new replica")


def test_scaling_down_drains(deploy, pair):
    streams = start_streams(pair, 8)
    assert all(metric(pair, "num_requests_running").values())
    deploy("pair", replicas=1)
    end_of(streams)
    assert all(stream.is_whole for stream in streams)
    until(lambda: len(metric(pair, "num_requests_running")) == 1, "one replica")


def test_load_scales_up(deploy):
    """Ray waits for half a minute of load before it believes in it."""
    from ray import serve

    client = deploy("scaling", replicas=1, max_replicas=2, target_ongoing_requests=1)
    is_over = threading.Event()

    def load(number):
        while not is_over.is_set():
            body = {"prompt": f"{number}", "max_tokens": 50, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).status_code == 200

    threads = [threading.Thread(target=load, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(metric(client, "num_requests_running")) == 2, "another replica")
    finally:
        is_over.set()
        for thread in threads:
            thread.join(GUARD)
    serve.delete("scaling")


def test_example_builds_valid_serve_config(tmp_path):
    from ray.serve.schema import ServeDeploySchema

    path = tmp_path / "serve.yaml"
    command = ["-m", "ray.serve.scripts", "build", "examples.ray_serve:app", "-o", str(path)]
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    for text in (path.read_text(), (ROOT / "examples/deploy/ray/serve.yaml").read_text()):
        schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
        assert len(schema.applications) == 1
    built = yaml.safe_load(path.read_text())["applications"][0]["deployments"]
    assert {each["name"]: each.get("num_replicas") for each in built} == {
        "gateway": 1,
        "replica": 2,
    }


def test_models_are_multiplexed(deploy, docs_5m, tmp_path):
    from ray import serve

    other = tmp_path / "other"
    shutil.copytree(docs_5m, other)
    client = deploy("models", replicas=1, multiplexed_model=[f"other={other}"])
    names = [card["id"] for card in client.get("/v1/models").json()["data"]]
    assert names == ["docs", "other"]
    for name in ("other", "docs", "other"):
        body = {"model": name, "prompt": "A trait is", "max_tokens": 2}
        reply = client.post("/v1/completions", json=body)
        assert reply.status_code == 200 and reply.json()["model"] == name
        assert f'/{name}"' in client.get("/metrics").text
    unknown = client.post("/v1/completions", json=body | {"model": "third"})
    assert unknown.status_code == 404
    serve.delete("models")


def test_command_serves_and_exits(start_server, docs_5m):
    """With a cluster of its own, which ends with it."""
    server = start_server(docs_5m, "--backend", "ray", "--max-num-seqs", "4")
    client = httpx.Client(base_url=server.url, timeout=GUARD)
    body = {"prompt": "A trait is", "max_tokens": 2}
    assert client.post("/v1/completions", json=body).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(GUARD) == 0
