"""TRL's client of vLLM's server, against this one. It sends no API key."""

import pytest

from qserve.config import ServerConfig

client_module = pytest.importorskip("trl.generation.vllm_client")

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def connected(make_server, run_live, monkeypatch):
    """The scripted server and TRL's client of it."""
    # it asks for the package, of which it uses nothing here
    monkeypatch.setattr(client_module, "is_vllm_available", lambda *_, **__: True)
    server = make_server(ServerConfig(served_model_name=["tiny"], enable_cache_reset=True))
    client = client_module.VLLMClient(base_url=f"http://127.0.0.1:{run_live(server)}")
    return server, client


def test_prompts_and_completions_equal_engine(connected):
    server, client = connected
    assert client.model == "tiny"
    script = [*server.tokenizer.encode(server.client.text), 2]
    prompts = [server.tokenizer.encode("A trait is"), server.tokenizer.encode("Hello")]
    for given in (prompts, ["A trait is", "Hello"]):
        found = client.generate(given, n=2, max_tokens=99)
        assert found["prompt_ids"] == prompts and found["completion_ids"] == [script] * 4
        for ids in found["logprob_token_ids"]:
            assert [position[0] for position in ids] == script
    assert client.generate(prompts, logprobs=None, max_tokens=99)["logprobs"] is None


def test_chat_prompts_are_returned(connected):
    server, client = connected
    script = [*server.tokenizer.encode(server.client.text), 2]
    found = client.chat([HI, HI], n=2, max_tokens=99, logprobs=1)
    assert found["completion_ids"] == [script] * 4
    assert found["prompt_ids"] == [server.client.requests[0][1]] * 2
    assert [len(each) for each in found["logprobs"]] == [len(script)] * 4
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert client.chat([HI], max_tokens=99, tools=[tool])["completion_ids"] == [script]


def test_prefix_cache_is_emptied(connected, monkeypatch):
    server, client = connected
    client.reset_prefix_cache()
    monkeypatch.setattr(client_module, "_HAS_RESET_PREFIX_CACHE_SUCCESS", True)
    client.reset_prefix_cache()  # newer servers answer {"success": true}
    assert server.client.num_resets == 2


def test_weight_transfer_is_refused_clearly(connected):
    """It needs operators' routes, which need a key; and vLLM's own code on the trainer's side."""
    _, client = connected
    with pytest.raises(RuntimeError, match="does not expose its development endpoints"):
        client.init_communicator("cpu")
