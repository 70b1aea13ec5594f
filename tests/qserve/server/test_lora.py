"""Adapters of a server: selection by model name, loading and unloading by clients, metrics."""

from threading import Thread
from types import SimpleNamespace

import httpx
import openai
import pytest

from formats.errors import InputError
from qserve.config import EngineConfig, ServerConfig
from qserve.engine.control.commands import EngineState, Outcome
from qserve.engine.ipc import process
from qserve.engine.ipc.adapter_loads import AdapterLoads
from qserve.engine.ipc.messages import Done, LoadAdapter, UnloadAdapter
from qserve.engine.report import EngineReport
from qserve.lora.request import LoRARequest, parse_modules
from qserve.server.adapters import ServedAdapters
from qserve.server.admin.adapters import LoadAdapterRequest
from qserve.server.observability.metrics import Metrics
from tests.adapters import write_adapter

KEY = "secret"
HEADERS = {"Authorization": f"Bearer {KEY}"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def adapters(docs_5m, tmp_path_factory):
    """A folder with adapters of the bundled model, among them a broken one."""
    folder = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate(("sql", "poems", "late")):
        write_adapter(docs_5m, folder / name, seed=number, size=2.0)
    write_adapter(docs_5m, folder / "too-large", rank=17)
    write_adapter(docs_5m, folder / "outside" / "adapter")
    (folder / "outside" / "served").mkdir()
    (folder / "outside" / "served" / "link").symlink_to(folder / "outside" / "adapter")
    return folder


class Engine:
    """A scripted client's calls for adapters: it records them and refuses one name."""

    def __init__(self) -> None:
        self.loaded: dict[str, str] = {}

    async def load_adapter(self, lora: LoRARequest) -> str:
        if lora.lora_path.endswith("late"):
            return f"{lora.lora_path}: expected something else"
        self.loaded[lora.lora_name] = lora.lora_path
        return ""

    def unload_adapter(self, name: str) -> None:
        del self.loaded[name]


@pytest.fixture
def scripted(make_server, adapters):
    """A server whose engine is a script."""
    config = ServerConfig(served_model_name=["tiny"], lora_folder=str(adapters), api_key=[KEY])
    loras = [LoRARequest(name, n, f"/at/{name}") for n, name in enumerate(("a", "b"), start=1)]
    server = make_server(config, loras=loras)
    server.engine = Engine()
    server.client.load_adapter = server.engine.load_adapter
    server.client.unload_adapter = server.engine.unload_adapter
    server.ask = lambda path, **body: server.post(path, body, headers=HEADERS)
    return server


def test_model_name_selects_adapter(scripted, error):
    for name in ("tiny", "a", "b"):
        for path, more in (
            ("/v1/completions", {"prompt": "Once"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
            ("/v1/responses", {"input": "Hi"}),
            ("/pooling", {"input": "Hi"}),
        ):
            scripted.ask(path, model=name, **more)
            lora = scripted.client.request_options[-1].lora
            assert (lora and lora.lora_name) == (None if name == "tiny" else name), path
        assert scripted.ask("/v1/completions", model=name, prompt="x").json()["model"] == name
    assert scripted.client.request_options[-1].lora.lora_path == "/at/b"
    reply = scripted.ask("/v1/completions", model="c", prompt="x")
    assert "this server serves 'tiny', 'a', 'b'" in error(reply, 404)["message"]
    assert scripted.ask("/tokenize", model="a", prompt="x").status_code == 200


def test_fingerprint_includes_adapter_weights(scripted):
    def fingerprint(name, **digests):
        scripted.client.state = EngineState(fingerprint="qs_base", adapters=digests)
        return scripted.ask("/v1/completions", model=name, prompt="x").json()["system_fingerprint"]

    first = fingerprint("a", a="1", b="2")
    assert fingerprint("tiny", a="1", b="2") == "qs_base"
    assert len({first, fingerprint("b", a="1", b="2"), fingerprint("a", a="3"), "qs_base"}) == 4
    assert fingerprint("b", b="1") == first, "equal weights under another name"


def test_models_are_listed_with_their_parent(scripted):
    cards = {c["id"]: c for c in scripted.get("/v1/models", headers=HEADERS).json()["data"]}
    assert list(cards) == ["tiny", "a", "b"]
    assert (cards["a"]["parent"], cards["a"]["root"]) == ("tiny", "a")
    assert "parent" not in cards["tiny"]
    assert scripted.get("/v1/models/b", headers=HEADERS).json()["parent"] == "tiny"


def test_load_and_unload(scripted, adapters, error):
    assert scripted.ask(LOAD, lora_name="x", lora_path="sql").status_code == 200
    assert scripted.engine.loaded == {"x": str(adapters / "sql")}
    scripted.ask("/v1/completions", model="x", prompt="x")
    first = scripted.client.request_options[-1].lora
    reply = scripted.ask(LOAD, lora_name="x", lora_path="poems")
    assert "is loaded already" in error(reply, 400)["message"]
    in_place = {"lora_name": "x", "lora_path": "poems", "load_inplace": True}
    assert scripted.ask(LOAD, **in_place).status_code == 200
    scripted.ask("/v1/completions", model="x", prompt="x")
    second = scripted.client.request_options[-1].lora
    assert second.lora_path == str(adapters / "poems") and second.lora_int_id != first.lora_int_id
    assert scripted.ask(UNLOAD, lora_name="x").status_code == 200
    assert scripted.engine.loaded == {}
    assert "is not loaded" in error(scripted.ask(UNLOAD, lora_name="x"), 404)["message"]
    error(scripted.ask("/v1/completions", model="x", prompt="x"), 404)


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("../sql", 400, "expected the name of a folder in --lora-folder"),
        ("/srv/adapters/sql", 400, "(give its name alone: 'sql')"),
        ("/etc", 400, "expected the name of a folder"),
        ("..", 400, "expected the name of a folder"),
        ("a\0b", 400, "expected the name of a folder"),
        ("missing", 404, "no such adapter"),
        ("outside", 400, "expected adapter_config.json"),
        ("late", 400, "late: expected something else"),
    ],
)
def test_invalid_adapters_are_refused(scripted, adapters, error, path, status, says):
    found = error(scripted.ask(LOAD, lora_name="y", lora_path=path), status)
    assert says in found["message"] and str(adapters) not in found["message"]
    assert not found["message"].startswith("/")
    assert "y" not in scripted.engine.loaded


def test_links_outside_the_folder_are_refused(adapters):
    served = ServedAdapters(folder=str(adapters / "outside" / "served"))
    with pytest.raises(InputError, match="no such adapter"):
        served.path_of("link")
    assert ServedAdapters(folder=str(adapters)).path_of("sql") == str(adapters / "sql")


def test_routes_need_the_key_and_the_flag(scripted, make_server, error, tmp_path):
    body = LoadAdapterRequest(lora_name="z", lora_path="sql").model_dump()
    error(scripted.post(LOAD, body), 401)
    closed = make_server(ServerConfig(served_model_name=["tiny"]))
    assert "without --lora-folder" in error(closed.post(LOAD, body), 404)["message"]
    error(scripted.ask(LOAD, lora_name="tiny", lora_path="sql"), 400)
    scripted.client.is_alive = False
    error(scripted.ask(LOAD, lora_name="z", lora_path="sql"), 503)
    with pytest.raises(InputError, match="--lora-folder: requires an API key"):
        make_server(ServerConfig(lora_folder=str(tmp_path), api_key_env="NOT_SET"))


def test_engine_process_reads_an_adapter_while_steps_go_on():
    """A thread reads; what it found, or why it found nothing, comes back through the inbox."""
    table = {}

    def read(path, is_wanted):
        if path == "bad":
            raise InputError("bad", "is no adapter")
        return f"read {path}"

    adapters = SimpleNamespace(
        read=read,
        put=lambda name, path, packed, number: table.update({name: packed}),
        unload=table.pop,
        digests={"a": "1"},
    )
    engine = SimpleNamespace(
        adapters=adapters,
        is_paused=False,
        operations=SimpleNamespace(is_sleeping=False, version="0", fingerprint="qs_base"),
        use_idle_time=lambda: False,
        has_work=lambda: len(sent) == 2 and not table,
    )
    sent, inbox = [], process.Inbox()

    def send(message):
        sent.append(message)
        if len(sent) == 1:
            inbox.put(LoadAdapter(number=8, lora=LoRARequest("x", 2, "bad")))
        else:
            inbox.put(UnloadAdapter(name="a"))

    inbox.put(LoadAdapter(number=7, lora=LoRARequest("a", 1, "good")))
    loads = AdapterLoads(lambda work: Thread(target=work, daemon=True).start(), inbox.put)
    process._take_messages(engine, SimpleNamespace(send=send, busy_since=None), inbox, loads)
    state = EngineState(fingerprint="qs_base", adapters={"a": "1"})
    answer = Done(number=7, outcome=Outcome(state=state))
    assert sent == [answer, Done(number=8, problem="bad: is no adapter")]


def test_metrics_labels_of_adapters_are_bounded():
    metrics = Metrics("tiny")
    metrics.describe_adapters(4)
    for name in ("a", "b", "c"):
        metrics.take_report(EngineReport(running_adapters=(name, "z"), waiting_adapters=("w",)))
        lines = [
            line for line in metrics.page().decode().splitlines() if "lora_requests_info{" in line
        ]
        assert len(lines) == 1
        labels = f'max_lora="4",running_lora_adapters="{name},z",waiting_lora_adapters="w"'
        assert labels in lines[0]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: EngineConfig(model="m", lora_modules=["a=b"]), "requires --enable-lora"),
        (lambda: parse_modules(["a"]), "expected NAME=FOLDER"),
        (lambda: parse_modules(["a=b", "a=c"]), "lists 'a' twice"),
        (lambda: parse_modules(['{"name": "a"}']), "expected NAME=FOLDER"),
        (lambda: parse_modules(["{"]), "is not valid JSON"),
        (lambda: EngineConfig(model="m", max_loras=4, max_cpu_loras=3), "at least --max-loras"),
        (lambda: ServedAdapters.of([LoRARequest("m", 1, "p")], ["m"]), "this name is the model's"),
        (lambda: LoRARequest("", 1), "printable"),
        (lambda: LoRARequest("a", 0), "expected 1 or more"),
    ],
)
def test_settings_are_checked(make, says):
    with pytest.raises(InputError, match=says):
        make()


def test_json_names_an_adapter_too():
    (lora,) = parse_modules(['{"name": "a=b", "path": "p", "base_model_name": "m"}'])
    assert (lora.lora_name, lora.lora_path, lora.lora_int_id) == ("a=b", "p", 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "ranks", [(), ("--tensor-parallel-size", "2"), ("--pipeline-parallel-size", "2")]
)
def test_lora_server_with_processes(ranks, docs_5m, adapters, start_server):
    """Model, worker and engine process: names choose, adapters come and go."""
    server = start_server(
        docs_5m,
        *("--served-model-name", "docs", "--api-key", KEY, "--max-model-len", "128", *ranks),
        *("--enable-lora", "--max-loras", "2", "--lora-folder", str(adapters)),
        *("--lora-modules", f"sql={adapters / 'sql'}", f"poems={adapters / 'poems'}"),
    )

    def complete(model, **fields):
        fields = {"prompt": "The server", "max_tokens": 8, "temperature": 0, **fields}
        return server.client(KEY).completions.create(model=model, **fields)

    def post(path, **body):
        return httpx.post(f"{server.url}{path}", json=body, headers=HEADERS, timeout=60)

    texts = {name: complete(name).choices[0].text for name in ("docs", "sql", "poems")}
    assert len(set(texts.values())) == 3
    prints = {name: complete(name).system_fingerprint for name in texts}
    assert len(set(prints.values())) == 3
    with pytest.raises(openai.NotFoundError):
        complete("x")
    assert post(LOAD, lora_name="x", lora_path="late").status_code == 200
    late = complete("x").choices[0].text
    assert late not in texts.values()
    in_place = {"lora_name": "x", "lora_path": "poems", "load_inplace": True}
    assert post(LOAD, **in_place).status_code == 200
    again = complete("x")
    assert again.choices[0].text == texts["poems"]
    assert again.system_fingerprint == prints["poems"]
    reply = post(LOAD, lora_name="y", lora_path="too-large")
    assert reply.status_code == 400 and "raise --max-lora-rank" in reply.text
    assert str(adapters) not in reply.text
    # prepared in another process, which receives the present list of adapters
    cut = {"prompt": "word " * 7000, "extra_body": {"truncate_prompt_tokens": 9}}
    assert complete("x", **cut).choices[0].text == complete("poems", **cut).choices[0].text
    chunks = list(complete("poems", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == texts["poems"]
    assert post(UNLOAD, lora_name="x").status_code == 200
    with pytest.raises(openai.NotFoundError):
        complete("x")
    assert complete("sql").choices[0].text == texts["sql"]
    page = httpx.get(f"{server.url}/metrics", headers=HEADERS).text
    assert page.count("\nqserve:lora_requests_info{") == 1
