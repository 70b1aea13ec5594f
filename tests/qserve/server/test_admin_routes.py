"""Routes for operators: access, the commands that they become, other requests meanwhile."""

import asyncio
import json
import os
import signal

import msgspec
import pytest

from formats.errors import InputError
from qserve.config import EngineConfig, ServerConfig
from qserve.engine.control import commands
from qserve.engine.control.commands import EngineState, Outcome
from qserve.lora.request import LoRARequest
from qserve.server import serve
from qserve.server.admin import operations, weights
from qserve.server.admin.reload import on_hangup, reload_settings

USER, ADMIN = {"Authorization": "Bearer user"}, {"Authorization": "Bearer admin"}


class RecordedCommands:
    """Records the commands that a scripted client is given."""

    def __init__(self, client) -> None:
        self.client, self.commands = client, []
        self.problem, self.outcome = "", Outcome()
        client.state, client.operate = EngineState(), self._operate

    async def _operate(self, command):
        self.commands.append(command)
        return self.outcome, self.problem


@pytest.fixture
def make(make_server, tmp_path):
    (tmp_path / "admins").write_text("admin\n")

    def started(**settings):
        settings = {"enable_admin_routes": True, "api_key": ["user"], **settings}
        if settings.pop("has_admins", True):
            settings["admin_api_key_file"] = str(tmp_path / "admins")
        server = make_server(ServerConfig(served_model_name=["tiny"], **settings))
        server.operated = RecordedCommands(server.client)
        return server

    return started


ROUTES = [
    (method, route.path)
    for route in (*operations.routes, *weights.routes)
    for method in route.methods
    if method != "HEAD"
]


def test_only_admin_keys_open_the_routes(make, error):
    server = make()
    assert len(ROUTES) > 15
    for method, path in ROUTES:
        error(server.request(method, path), 401)
        error(server.request(method, path, headers=USER), 403)
    assert server.operated.commands == []
    assert server.get("/v1/models", headers=ADMIN).status_code == 200
    open_to_all = make(has_admins=False)
    assert open_to_all.post("/pause", None, headers=USER).status_code == 200


def test_routes_need_their_flag_and_a_key(make, make_server, error):
    closed = make(enable_admin_routes=False)
    for method, path in ROUTES:
        refusal = error(closed.request(method, path, headers=ADMIN), 404)
        assert refusal["message"] == (
            "This server was started without --enable-admin-routes. Restart it with this flag."
        )
    with pytest.raises(InputError, match="--enable-admin-routes: requires an API key"):
        make_server(ServerConfig(enable_admin_routes=True, api_key_env="NOT_SET"))
    with pytest.raises(InputError, match="--admin-api-key-file: .* cannot be read"):
        make_server(ServerConfig(admin_api_key_file="/nowhere"))


@pytest.mark.parametrize("flag", ["enable_admin_routes", "lora_folder"])
def test_missing_key_is_reported_before_a_model_is_loaded(flag, docs_5m, tmp_path, monkeypatch):
    async def start(*_, **__):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(serve.HostedModel, "start", start)
    value = True if flag == "enable_admin_routes" else str(tmp_path)
    config = ServerConfig(port=0, **{flag: value})
    with pytest.raises(InputError, match=r"requires an API key \(add --api-key or"):
        serve.serve(EngineConfig(model=str(docs_5m), device="cpu", enable_lora=True), config)


TENSOR = commands.SharedTensor(name="a", dtype="int8", shape=[4], path="/dev/shm/x", offset=64)
MEMORY = commands.CudaMemory(
    device="GPU-1",
    handle=b"\0\1",
    storage_bytes=8,
    storage_offset=0,
    tensor_offset=4,
    stride=[1],
    counter=b"name",
    counter_offset=3,
    event=b"",
    has_event=False,
)
SHARED, CUDA = (json.loads(msgspec.json.encode(each)) for each in (TENSOR, MEMORY))

GROUP = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2}
JOIN = {
    "name": "weight_update_group",
    "address": "10.0.0.1",
    "port": 29500,
    "rank": 1,
    "world_size": 2,
    "backend": "nccl",
    "timeout": 300.0,
}
PART = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2, 3]]}
# what torch.multiprocessing pickles of an empty list of tensors
SERIALIZED = {"serialized_named_tensors": ["gARdlC4="]}
BROADCAST = commands.BroadcastWeights(group="weight_update_group", **PART)

P, S, W, U = (
    commands.PauseGeneration,
    commands.Sleep,
    commands.WakeUp,
    commands.UpdateWeights,
)


@pytest.mark.parametrize(
    ("path", "body", "command"),
    [
        ("/pause", None, P(mode="abort", clear_cache=True)),
        ("/pause?mode=wait&clear_cache=false", None, P(mode="wait", clear_cache=False)),
        ("/pause?wait_for_inflight_requests=true", None, P(mode="wait")),
        ("/pause?wait_for_inflight_requests=true&mode=keep", None, P(mode="keep")),
        ("/pause?wait_for_inflight_requests=false", None, P(mode="abort")),
        ("/pause_generation", {"mode": "retract"}, P(mode="keep", clear_cache=False)),
        ("/resume", None, commands.ResumeGeneration()),
        ("/continue_generation", {}, commands.ResumeGeneration()),
        ("/abort_requests", None, commands.AbortAll()),
        ("/abort_request", {"abort_all": True}, commands.AbortAll()),
        ("/sleep", None, S(level=1, mode="abort")),
        ("/sleep?level=2&mode=keep", None, S(level=2, mode="keep")),
        ("/wake_up", None, W(tags=None)),
        ("/wake_up?tags=weights&tags=kv_cache", None, W(tags=["weights", "kv_cache"])),
        ("/release_memory_occupation", {}, S(level=1)),
        ("/resume_memory_occupation", {"tags": ["weights"]}, W(tags=["weights"])),
        ("/update_weights_from_disk", {"model_path": "/new"}, U(folder="/new", mode="wait")),
        (
            "/update_weights_from_disk",
            {"model_path": "/new", "weight_version": 3, "abort_all_requests": True},
            U(folder="/new", version="3", mode="abort"),
        ),
        (
            "/update_weights_from_ipc",
            {"tensors": [SHARED], "weight_version": 3, "mode": "keep"},
            U(tensors=[TENSOR], version="3", mode="keep", is_kept=False, digests=True),
        ),
        (
            "/update_weights_from_ipc",
            {"tensors": [SHARED], "is_last": False},
            commands.ReceiveWeights(tensors=[TENSOR]),
        ),
        (
            "/update_weights_from_ipc",
            {"tensors": [{**SHARED, "cuda": CUDA}], "digests": False},
            U(
                tensors=[msgspec.structs.replace(TENSOR, cuda=MEMORY)],
                mode="wait",
                is_kept=False,
                digests=False,
            ),
        ),
        ("/init_weights_update_group", GROUP, commands.JoinWeightGroup(**JOIN)),
        (
            "/destroy_weights_update_group",
            {"group_name": "weight_update_group"},
            commands.LeaveWeightGroup(name="weight_update_group"),
        ),
        (
            "/update_weights_from_distributed",
            {**PART, "flush_cache": True},
            commands.ReceiveWeights(broadcast=BROADCAST),
        ),
        (
            "/update_weights_from_tensor",
            {**SERIALIZED, "is_first": True, "flush_cache": False},
            commands.ReceiveWeights(tensors=[], is_first=True),
        ),
        ("/collective_rpc", {"method": "reload_weights"}, None),
        (
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": "/new"}},
            U(folder="/new", mode="wait"),
        ),
    ],
)
def test_requests_become_commands(path, body, command, make, docs_5m):
    server = make()
    reply = server.request("POST", path, json=body, headers=ADMIN)
    assert reply.status_code == 200, reply.text
    command = command or U(folder=str(docs_5m), mode="wait")
    assert server.operated.commands == [command]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/pause?mode=now", None, 400, "expected one of abort, wait, keep, found 'now'"),
        ("/pause?clear_cache=2", None, 400, "clear_cache: expected true or false"),
        ("/pause_generation", {"mode": "wait"}, 400, "abort, retract, in_place"),
        ("/sleep?level=3", None, 400, "level: expected 0, 1 or 2"),
        ("/abort_request", {"rid": "x"}, 400, "all requests together"),
        ("/release_memory_occupation", {"tags": ["kv_cache"]}, 400, "sleep together"),
        ("/resume_memory_occupation", {"tags": "weights"}, 400, "a list of names"),
        ("/update_weights_from_disk", {}, 400, "model_path: expected"),
        ("/update_weights_from_disk", {"model_path": 3}, 400, "model_path: expected"),
        (
            "/update_weights_from_disk",
            {"model_path": "/new", "flush_cache": False},
            400,
            "always drop",
        ),
        (
            "/update_weights_from_disk",
            {"model_path": "/new", "weight_version": [1]},
            400,
            "weight_version",
        ),
        ("/start_weight_update", {}, 501, "POST /update_weights_from_disk"),
        ("/update_weights_from_tensor", {}, 400, "missing required field `serialized_named_ten"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": []}, 400, "length >= 1"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["&"]}, 400, "not base64"),
        ("/update_weights_from_tensor", {**SERIALIZED, "selector": "draft"}, 400, "selector: a"),
        ("/update_weights_from_tensor", {**SERIALIZED, "mode": "now"}, 400, "found 'now'"),
        ("/init_weight_transfer_engine", {}, 501, "qserve.training.send_weights"),
        ("/init_weights_update_group", {**GROUP, "master_port": 0}, 400, "master_port"),
        ("/init_weights_update_group", {**GROUP, "timeout": 1e9}, 400, "timeout"),
        ("/update_weights_from_distributed", {**PART, "shapes": [3]}, 400, "`$.shapes[0]`"),
        ("/update_weights_from_distributed", {**PART, "mode": "now"}, 400, "found 'now'"),
        ("/update_weights_from_ipc", {}, 400, "missing required field `tensors`"),
        ("/update_weights_from_ipc", [], 400, "does not fit this route"),
        (
            "/update_weights_from_ipc",
            {"tensors": [{**SHARED, "shape": "4"}]},
            400,
            "`$.tensors[0].shape`",
        ),
        (
            "/update_weights_from_ipc",
            {"tensors": [], "mode": "now"},
            400,
            "expected one of abort, wait, keep, found 'now'",
        ),
        (
            "/update_weights_from_ipc",
            {"tensors": [], "mode": "x" * 2**25},
            413,
            "expected a body of at most 33554432 bytes",
        ),
        ("/collective_rpc", {"method": "save"}, 400, "expected reload_weights"),
        ("/sleep", None, 400, "no such level"),
    ],
)
def test_wrong_requests_are_refused(path, body, status, message, make, error):
    server = make()
    server.operated.problem = "no such level"  # what the engine says of a command
    found = error(server.request("POST", path, json=body, headers=ADMIN), status)
    assert message in found["message"]


@pytest.mark.parametrize("is_last", [None, True, False])
@pytest.mark.parametrize("is_complete", [False, True])
def test_last_weight_part_triggers_update(is_last, is_complete, make):
    server = make()
    server.operated.outcome = Outcome(num_tensors=4, is_complete=is_complete)
    body = {**PART, "is_last": is_last, "weight_version": 3, "abort_all_requests": True}
    reply = server.request("POST", "/update_weights_from_distributed", json=body, headers=ADMIN)
    assert reply.json()["success"]
    update = U(tensors=[], version="3", mode="abort", is_kept=False, digests=True)
    ends = is_complete if is_last is None else is_last
    received = commands.ReceiveWeights(broadcast=BROADCAST)
    assert server.operated.commands == [received, *([update] if ends else [])]
    assert ("Received 4 tensors" in reply.json()["message"]) == (not ends)


def test_trainer_routes_of_vllm_and_sglang_exist(make, error):
    """vLLM's and SGLang's routes that TRL and verl call besides those with commands."""
    server = make()
    server.client.state = EngineState(weight_version="7")
    server.client.resets = 0

    def reset():
        server.client.resets += 1

    server.client.reset_prefix_cache = reset
    for method, path in (("POST", "/reset_prefix_cache"), ("GET", "/flush_cache")):
        assert server.request(method, path, headers=ADMIN).status_code == 200
    assert server.post("/reset_prefix_cache", None, headers=ADMIN).json() == {"success": True}
    error(server.post("/reset_prefix_cache", None, headers=USER), 404)
    assert server.client.resets == 3
    assert server.get("/get_world_size", headers=ADMIN).json() == {"world_size": 1}
    info = server.get("/server_info?config_format=json", headers=ADMIN).json()
    assert info["vllm_config"]["weight_transfer_config"] is None and info["weight_version"] == "7"
    server.client.is_alive = False
    error(server.get("/flush_cache", headers=ADMIN), 503)


def test_replies_report_engine_state(make):
    server = make()
    state = EngineState(is_paused=True, is_sleeping=True, weight_version="7")
    server.client.state = state
    server.operated.outcome = Outcome(
        state=state, num_requests=4, total_digest="t", digests={"a": "1"}, schemes={"a": "w8a8"}
    )

    def answer(path, method="GET"):
        return server.request(method, path, headers=ADMIN).json()

    assert answer("/is_paused") == {"is_paused": True}
    assert answer("/is_sleeping") == {"is_sleeping": True}
    assert answer("/weight_info") == answer("/get_weight_version") == {"weight_version": "7"}
    assert answer("/abort_requests", "POST")["num_requests"] == 4
    assert answer("/weights/digest") == {
        "weight_version": "7",
        "total": "t",
        "tensors": {"a": "1"},
        "schemes": {"a": "w8a8"},
    }


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/pause?mod=keep", "mod"),
        ("/pause?clear_cache=false&level=1", "level"),
        ("/sleep?levels=2", "levels"),
        ("/wake_up?tag=weights", "tag"),
    ],
)
def test_misspelt_parameter_is_refused_before_requests_end(path, name, make, error):
    server = make()
    reply = server.request("POST", path, headers=ADMIN)
    assert f"{name}: unknown parameter; expected one of" in error(reply, 400)["message"]
    assert server.operated.commands == []


def test_dead_engine_is_reported(make, error):
    server = make()
    server.client.is_alive = False
    error(server.request("POST", "/sleep", headers=ADMIN), 503)


@pytest.mark.parametrize("state", [EngineState(is_paused=True), EngineState(is_sleeping=True)])
def test_requests_are_refused_while_asleep_if_asked(state, make, error):
    refusing, waiting = make(paused_requests="refuse"), make()
    body = {"prompt": "Once", "max_tokens": 2}
    for server in (refusing, waiting):
        assert server.post("/v1/completions", body, headers=USER).status_code == 200
        server.client.state = state
    reply = refusing.post("/v1/completions", body, headers=USER)
    assert "paused or asleep" in error(reply, 503)["message"] and reply.headers["retry-after"]
    error(refusing.get("/ready"), 503)
    assert refusing.get("/health").status_code == 200
    assert waiting.post("/v1/completions", body, headers=USER).status_code == 200
    assert waiting.get("/ready").status_code == 200


def test_sighup_during_model_load_is_applied_afterwards(make_server, tmp_path, caplog):
    """It must not end the server."""
    caplog.set_level("INFO")
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    server = make_server(ServerConfig(served_model_name=["tiny"], api_key_file=str(keys)))
    keys.write_text("new\nnewer\n")

    async def hang_up():
        with on_hangup() as have_loaded:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGHUP)
                await asyncio.sleep(0.01)
            assert "reloaded once the models are loaded" in caplog.text
            assert "API keys are valid" not in caplog.text
            have_loaded([server.app.state.service])
            while "SIGHUP: 2 API keys are valid" not in caplog.text:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(hang_up(), 30))
    assert caplog.text.count("API keys are valid") == 1
    reply = server.get("/v1/models", headers={"Authorization": "Bearer newer"})
    assert reply.status_code == 200


def test_sighup_reloads_keys_and_adapters(make_server, tmp_path, caplog):
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    config = ServerConfig(served_model_name=["tiny"], api_key_file=str(keys))
    loras = [LoRARequest(name, n, f"/at/{name}") for n, name in enumerate(("good", "bad"), 1)]
    server = make_server(config, loras=loras)
    service, loaded = server.app.state.service, []

    async def load_adapter(lora):
        loaded.append(lora)
        return "cannot be read" if lora.lora_name == "bad" else ""

    service.client.load_adapter = load_adapter

    def status(key):
        return server.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code

    async def hang_up():
        with on_hangup() as have_loaded:
            have_loaded([service])
            os.kill(os.getpid(), signal.SIGHUP)
            while "cannot reload the adapter bad" not in caplog.text:
                await asyncio.sleep(0.01)

    keys.write_text("new\n")
    asyncio.run(asyncio.wait_for(hang_up(), 30))
    assert (status("old"), status("new")) == (401, 200)
    assert [(each.lora_name, each.lora_path) for each in loaded] == [
        ("good", "/at/good"),
        ("bad", "/at/bad"),
    ]
    numbers = {name: lora.lora_int_id for name, lora in service.adapters.of_name.items()}
    assert numbers == {"good": loaded[0].lora_int_id, "bad": 2} and numbers["good"] > 2
    keys.write_text("\n")  # a broken file changes nothing
    asyncio.run(reload_settings(service))
    assert status("new") == 200 and "cannot reload the API keys" in caplog.text
