"""Stored responses and conversations: what is kept, for whom, how long, and what can fail."""

import contextlib
import json
import sqlite3
import stat

import openai
import pytest

from formats.errors import InputError
from qserve.config import ServerConfig
from qserve.server.app import open_store
from qserve.server.store.database import Bounds, Database
from tests.qserve.server.test_response_tools import CALL, TOOL

ALICE, BOB = ({"Authorization": f"Bearer {name}"} for name in ("alice", "bob"))
RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"


@pytest.fixture
def stored(make_server, tmp_path):
    """stored(**settings) -> a server with a store, closed when the test ends."""
    stores = []

    def make(**settings):
        parser = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
        path = str(tmp_path / "store.db")
        config = ServerConfig(
            served_model_name=["tiny"], **{"response_store": path} | parser | settings
        )
        stores.append(open_store(config))
        return make_server(config, store=stores[-1])

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def server(stored):
    return stored()


def create(server, given="Hi", headers=None, **fields):
    reply = server.post(RESPONSES, {"input": given, **fields}, headers=headers)
    assert reply.status_code == 200, reply.text
    if reply.headers["content-type"].startswith("text/event-stream"):
        return json.loads(reply.text.rstrip().rpartition("data: ")[2])["response"]
    return reply.json()


def prompt(server):
    """The conversation that the engine got last."""
    return server.tokenizer.decode(server.client.requests[-1][1], False)


def chat_of(server, *texts):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return server.tokenizer.render_chat(messages)


@pytest.mark.parametrize("stream", [False, True])
def test_previous_response_is_continued(server, stream):
    text = server.client.text
    first = create(server, "one", stream=stream, instructions="Not carried over.")
    second = create(server, "two", stream=stream, previous_response_id=first["id"])
    assert prompt(server) == chat_of(server, "one", text, "two")
    create(server, "three", stream=stream, previous_response_id=second["id"])
    assert prompt(server) == chat_of(server, "one", text, "two", text, "three")
    assert first["store"] and second["previous_response_id"] == first["id"]
    assert server.get(f"{RESPONSES}/{second['id']}").json() == second
    create(server, "other", previous_response_id=first["id"])  # a second branch
    assert prompt(server) == chat_of(server, "one", text, "other")


def test_calls_and_their_outputs_are_kept(server):
    server.client.text = f"Let me look.\n{CALL}"
    first = create(server, "Oslo?", tools=[TOOL])
    call = first["output"][1]
    server.client.text = "It snows."
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "snow"}
    create(server, [output], tools=[TOOL], previous_response_id=first["id"])
    assert "snow" in prompt(server) and "Let me look." in prompt(server)


def test_items_of_the_input(server):
    first = create(server, "one")
    given = [{"role": "user", "content": [{"type": "input_text", "text": "two"}]}]
    second = create(server, given, previous_response_id=first["id"])
    path = f"{RESPONSES}/{second['id']}/input_items"
    page = server.get(path, params={"order": "asc"}).json()
    texts = [item["content"][0]["text"] for item in page["data"]]
    assert texts == ["one", server.client.text, "two"] and not page["has_more"]
    assert all(item["id"].startswith("msg_") and item["status"] for item in page["data"])
    newest = server.get(path, params={"limit": 1}).json()
    assert newest["data"] == page["data"][2:] and newest["has_more"]
    rest = server.get(path, params={"after": newest["last_id"]}).json()
    assert rest["data"] == page["data"][1::-1]


def test_references_to_items(server):
    """The Vercel AI SDK sends them, as it expects that responses are stored."""
    first = create(server, "one")
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    given = [{"role": "user", "content": "one"}, reference, {"role": "user", "content": "two"}]
    create(server, given)
    assert prompt(server) == chat_of(server, "one", server.client.text, "two")
    reply = server.post(RESPONSES, {"input": [reference]}, headers=BOB)
    assert reply.status_code == 404 and reply.json()["error"]["param"] == "input.0"


def test_conversations(server):
    made = server.post(
        CONVERSATIONS,
        {"items": [{"role": "user", "content": "one"}], "metadata": {"topic": "x"}},
    ).json()
    name, path = made["id"], f"{CONVERSATIONS}/{made['id']}"
    assert made["object"] == "conversation" and made["metadata"] == {"topic": "x"}
    first = create(server, "two", conversation=name, store=False)
    assert first["conversation"] == {"id": name} and not first["store"]
    assert server.get(f"{RESPONSES}/{first['id']}").status_code == 404
    create(server, "three", conversation={"id": name}, stream=True)
    assert prompt(server).count("<|im_start|>") == 5 and "one" in prompt(server)
    items = server.get(f"{path}/items", params={"order": "asc"}).json()["data"]
    texts = [item["content"][0]["text"] for item in items]
    assert texts == ["one", "two", server.client.text, "three", server.client.text]
    added = server.post(f"{path}/items", {"items": [{"role": "user", "content": "four"}]}).json()
    assert added["object"] == "list" and len(added["data"]) == 1
    assert server.get(f"{path}/items/{items[1]['id']}").json() == items[1]
    assert server.request("DELETE", f"{path}/items/{items[0]['id']}").json()["id"] == name
    assert server.get(f"{path}/items/{items[0]['id']}").status_code == 404
    assert len(server.get(f"{path}/items").json()["data"]) == 5
    updated = server.post(path, {"metadata": {"topic": "y"}}).json()
    assert updated == server.get(path).json() == made | {"metadata": {"topic": "y"}}
    gone = server.request("DELETE", path).json()
    assert gone == {"id": name, "object": "conversation.deleted", "deleted": True}
    assert server.get(path).status_code == server.get(f"{path}/items").status_code == 404


def test_deleted_item_frees_its_bytes(stored, tmp_path):
    server = stored()
    path = f"{CONVERSATIONS}/{server.post(CONVERSATIONS, {}).json()['id']}"

    def num_bytes():
        with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as database:
            return database.execute("SELECT num_bytes FROM records").fetchone()[0]

    before = num_bytes()
    added = server.post(f"{path}/items", {"items": [{"role": "user", "content": "one"}]}).json()
    assert num_bytes() > before
    server.request("DELETE", f"{path}/items/{added['data'][0]['id']}")
    assert num_bytes() == before


def test_client_reads_only_its_own_responses(server):
    first = create(server, "secret", headers=ALICE)
    made = server.post(CONVERSATIONS, {}, headers=ALICE).json()
    for path in (f"{RESPONSES}/{first['id']}", f"{CONVERSATIONS}/{made['id']}"):
        assert server.get(path, headers=ALICE).status_code == 200
        for headers in (BOB, None):
            assert server.get(path, headers=headers).status_code == 404
            assert server.request("DELETE", path, headers=headers).status_code == 404
    for fields in ({"previous_response_id": first["id"]}, {"conversation": made["id"]}):
        reply = server.post(RESPONSES, {"input": "Hi", **fields}, headers=BOB)
        assert reply.status_code == 404 and "secret" not in reply.text
    assert len(server.client.requests) == 1


def test_unstored_responses(server):
    first = create(server, "one", store=False)
    assert not first["store"]
    assert server.get(f"{RESPONSES}/{first['id']}").status_code == 404
    second = create(server, "two")
    third = create(server, "three", previous_response_id=second["id"])
    deleted = server.request("DELETE", f"{RESPONSES}/{second['id']}").json()
    assert deleted == {"id": second["id"], "object": "response", "deleted": True}
    reply = server.post(RESPONSES, {"input": "x", "previous_response_id": third["id"]})
    assert reply.status_code == 404 and second["id"] in reply.json()["error"]["message"]


def test_store_survives_a_restart(stored):
    first = create(stored(), "one")
    again = stored()
    assert again.get(f"{RESPONSES}/{first['id']}").json() == first


def test_only_the_owner_can_read_the_file(stored, tmp_path):
    (tmp_path / "store.db").touch(mode=0o644)
    create(stored())
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_eviction_takes_lru_of_largest_client(stored):
    server = stored(response_store_bytes=21_000)
    kept = create(server, "bob's", headers=BOB)
    first = create(server, "a" * 100, headers=ALICE)
    others = [create(server, "b" * 100, headers=ALICE) for _ in range(5)]
    create(server, "used again", previous_response_id=first["id"], store=False, headers=ALICE)
    others += [create(server, "c" * 100, headers=ALICE) for _ in range(8)]

    def is_there(response, headers=ALICE):
        return server.get(f"{RESPONSES}/{response['id']}", headers=headers).status_code == 200

    assert is_there(kept, BOB) and is_there(first) and is_there(others[-1])
    assert not is_there(others[0])
    found = [is_there(each) for each in others]
    assert found == sorted(found)  # in order of their last use


def test_records_expire(stored, monkeypatch):
    server = stored(response_store_days=1)
    first = create(server, "one")
    second = create(server, "two")
    now = server.app.state.service.store._database.cutoff + 86400
    monkeypatch.setattr("time.time", lambda: now + 50_000)
    create(server, "three", previous_response_id=first["id"], store=False)
    monkeypatch.setattr("time.time", lambda: now + 100_000)
    assert server.get(f"{RESPONSES}/{first['id']}").status_code == 200  # used since
    assert server.get(f"{RESPONSES}/{second['id']}").status_code == 404
    create(server, "four")
    rows = server.app.state.service.store._database.rows("SELECT id FROM records")
    assert (second["id"],) not in rows and (first["id"],) in rows


def test_response_larger_than_store_is_not_kept(stored):
    server = stored(response_store_bytes=2**12)
    reply = server.post(RESPONSES, {"input": "Hi", "metadata": {"a": "b" * 5000}})
    assert reply.status_code == 200 and reply.json()["store"] is False
    assert "not stored" in reply.headers["x-warnings"] and "4096" in reply.headers["x-warnings"]


@pytest.mark.parametrize("stream", [False, True])
def test_full_disk_does_not_fail_responses(stored, stream):
    server = stored()
    database = server.app.state.service.store._database
    (pages,) = database.row("PRAGMA page_count")
    database.row(f"PRAGMA max_page_count = {pages}")
    found = create(server, "word " * 30, stream=stream)
    while found["store"]:  # until the free space within the file is used
        found = create(server, "word " * 30, stream=stream)
    assert found["status"] == "completed" and found["output"]
    reply = server.post(CONVERSATIONS, {"metadata": {"a": "b" * 9000}})
    assert reply.status_code == 507 and "no space left" in reply.json()["error"]["message"]
    database.row("PRAGMA max_page_count = 100000")
    assert create(server, "again")["store"]


def test_conversation_continues_if_store_is_unwritable(stored):
    server = stored()
    first = create(server, "one")
    server.app.state.service.store._database.row("PRAGMA query_only = ON")
    second = create(server, "two", previous_response_id=first["id"])
    assert "one" in prompt(server) and second["store"] is False


def test_damaged_store_file_while_running(stored, tmp_path):
    server = stored()
    first = create(server, "one")
    path = tmp_path / "store.db"
    content = bytearray(path.read_bytes())
    content[100:] = b"\xff" * (len(content) - 100)
    content[24:28] = b"\0\0\0\xff"  # the change counter: SQLite drops its cached pages
    path.write_bytes(content)
    reply = server.post(RESPONSES, {"input": "x", "previous_response_id": first["id"]})
    assert reply.status_code == 500 and "damaged" in reply.json()["error"]["message"]
    assert str(tmp_path) not in reply.text
    reply = server.post(RESPONSES, {"input": "x"})
    assert reply.status_code == 200 and reply.json()["store"] is False
    assert "damaged" in reply.headers["x-warnings"]


def test_unusable_store_files_are_refused(tmp_path):
    bounds = Bounds(num_bytes=2**20, seconds=100.0)
    garbage, foreign = tmp_path / "garbage", tmp_path / "foreign.db"
    garbage.write_bytes(b"no database" * 1000)
    connection = sqlite3.connect(foreign)
    connection.execute("CREATE TABLE t (x)")
    connection.close()
    for path, word in (
        (garbage, "not a database"),
        (foreign, "another program"),
        (tmp_path, "cannot be opened"),
        (tmp_path / "no" / "folder", "cannot be opened"),
    ):
        with pytest.raises(InputError, match=word) as found:
            Database(str(path), bounds)
        assert "--response-store" in str(found.value) and "move the file" in str(found.value)


def test_without_a_store_nothing_is_kept(make_server, error):
    server = make_server(ServerConfig())
    found = create(server, "one", store=True)
    assert found["store"] is False
    assert "--response-store" in error(server.get(f"{RESPONSES}/{found['id']}"), 404)["message"]
    error(server.post(CONVERSATIONS, {}), 404)
    reply = server.post(RESPONSES, {"input": "x", "previous_response_id": found["id"]})
    assert "--response-store" in error(reply, 400)["message"]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"previous_response_id": "resp_x"}, 404, "previous_response_id"),
        ({"previous_response_id": 3}, 400, "previous_response_id"),
        ({"conversation": "conv_x"}, 404, None),
        ({"conversation": {}, "previous_response_id": "a"}, 404, "previous_response_id"),
        ({"conversation": "conv_x", "previous_response_id": "a"}, 400, "conversation"),
        ({"store": 1}, 400, "store"),
        ({"input": 5}, 400, "input"),
        ({"input": [{"role": "user"}]}, 400, "input.0.content"),
    ],
)
def test_invalid_store_requests_are_refused(server, error, fields, status, param):
    reply = server.post(RESPONSES, {"input": "x", **fields})
    assert error(reply, status)["param"] == param


def test_errors_name_the_items_of_the_body(server, error):
    """Not those of the whole conversation, which the client did not send."""
    first = create(server, "one")
    fields = {"input": [{"role": "user"}], "previous_response_id": first["id"]}
    body = error(server.post(RESPONSES, fields), 400)
    assert body["param"] == "input.0.content" and body["message"].startswith("input.0.content")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CONVERSATIONS, {"items": [{"role": "user", "content": "x"}] * 21}),
        (CONVERSATIONS, {"metadata": {"a": 1}}),
        (f"{CONVERSATIONS}/conv_x/items", {}),
        (f"{CONVERSATIONS}/conv_x", {"metadata": 1}),
    ],
)
def test_invalid_conversation_bodies_are_refused(server, error, path, body):
    error(server.post(path, body), 400)


def test_openai_client_stores_and_reads(server, run_live):
    base = f"http://127.0.0.1:{run_live(server)}/v1"
    with openai.OpenAI(base_url=base, api_key="-", max_retries=0) as client:
        first = client.responses.create(model="tiny", input="one")
        with client.responses.stream(
            model="tiny", input="two", previous_response_id=first.id
        ) as stream:
            second = stream.get_final_response()
        counted = client.responses.input_tokens.count(
            model="tiny", input="two", previous_response_id=first.id
        )
        assert counted.input_tokens == second.usage.input_tokens > first.usage.input_tokens
        assert client.responses.retrieve(second.id).output_text == server.client.text
        items = list(client.responses.input_items.list(second.id, order="asc", limit=1))
        assert [item.content[0].text for item in items] == ["one", server.client.text, "two"]
        client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(second.id)
        conversation = client.conversations.create(metadata={"a": "b"})
        client.responses.create(model="tiny", input="x", conversation=conversation.id)
        listed = list(client.conversations.items.list(conversation.id))
        assert len(listed) == 2
        client.conversations.items.create(
            conversation.id, items=[{"type": "message", "role": "user", "content": "y"}]
        )
        client.conversations.update(conversation.id, metadata={})
        assert client.conversations.delete(conversation.id).deleted
