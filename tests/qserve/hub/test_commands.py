"""The bundled model by its name on a hub: commands, LLM and AsyncLLM, as a user meets them."""

import asyncio
import json
from pathlib import Path

import pytest

import qserve
from calibrate.pipeline import quantize_checkpoint
from formats.scheme import Scheme
from qserve import LLM, AsyncLLM, InputError, LoRARequest, SamplingParams
from qserve.cli import main
from qserve.command_line.tool_config import BatchConfig
from qserve.commands.run_batch import run_batch
from qserve.config import EngineConfig
from qserve.engine.ipc.supervisor import EngineSupervisor
from qserve.hub.local import local_config
from tests import local_hub
from tests.adapters import write_adapter
from tests.local_hub import Repo, files_of
from tests.qserve.command_line import fails_with

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
PROMPT = "The standard library"
PARAMS = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def hub(docs_5m, quantized_5m, tmp_path_factory):
    """org/docs with all files of a hub's repository; the same in parts; its adapter."""
    whole = files_of(docs_5m)
    tokenizer = {name: whole[name] for name in TOKENIZER_FILES}
    bare = {name: each for name, each in whole.items() if name not in tokenizer}
    adapter = write_adapter(docs_5m, tmp_path_factory.mktemp("adapter"))
    repos = {
        "org/docs": Repo(files=whole | {"modeling.py": b"1/0", "pytorch_model.bin": b"pickle"}),
        "org/bare": Repo(files={f"inner/{name}": each for name, each in bare.items()}),
        "org/tokenizer": Repo(files=tokenizer),
        "org/adapter": Repo(files=files_of(adapter)),
        "org/w4a16": Repo(files=files_of(quantized_5m), branches={"v2": whole}),
    }
    with local_hub.in_place_of_the_hub(repos, tmp_path_factory.mktemp("home")) as hub:
        yield hub


def text_of(llm, **settings):
    return llm.generate(PROMPT, PARAMS, use_tqdm=False, **settings)[0].outputs[0].text


@pytest.fixture(scope="module")
def expected(docs_5m):
    return text_of(LLM(docs_5m, device="cpu"))


@pytest.mark.exhaustive
def test_quantize_by_name(hub, docs_5m, tmp_path, capsys):
    local, by_name = tmp_path / "local", tmp_path / "by-name"
    scheme, tool = Scheme.parse("w4a16-sym"), f"qserve-kit:{qserve.__version__}"
    quantize_checkpoint(docs_5m, local, scheme=scheme, quantizer=tool, progress=False)
    command = ["quantize", "org/docs@main", "--recipe", "rtn", "-o", str(by_name)]
    assert main([*command, "--device", "cpu"]) == 0
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
        assert (by_name / name).read_bytes() == (local / name).read_bytes(), name
        assert not (by_name / name).is_symlink()
    card = (by_name / "README.md").read_text()
    assert "| made from | org/docs |" in card and str(tmp_path) not in card
    assert not {"modeling.py", "pytorch_model.bin"} & hub.fetched()
    again = ["quantize", "org/other", "-o", str(by_name)]
    fails_with(capsys, again, "already exists")  # before the network is asked


def test_serve_by_name(hub, expected, start_server):
    """The download is in the parent alone, the client sees the hub's name."""
    hub.requests.clear()
    server = start_server("org/docs@main", "--download-dir", hub_folder("served"))
    client = server.client()
    assert [each.id for each in client.models.list().data] == ["org/docs"]
    found = client.completions.create(model="org/docs", prompt=PROMPT, max_tokens=12, temperature=0)
    assert found.choices[0].text == expected and found.model == "org/docs"
    chat = [{"role": "user", "content": "Hi"}]
    assert client.chat.completions.create(model="org/docs", messages=chat, max_tokens=4).usage
    assert server.stop() == 0
    files = [path.rpartition("/")[2] for method, path in hub.requests if method == "HEAD"]
    assert files.count("model.safetensors") == 1
    log = server.log_path.read_text()
    assert "Fetching" in log and "HTTP Request" not in log


def hub_folder(name: str) -> str:
    from huggingface_hub import constants

    return str(Path(constants.HF_HUB_CACHE).parent / name)


@pytest.mark.exhaustive
def test_llm_by_name_and_without_the_hub(hub, expected, monkeypatch):
    assert text_of(LLM("org/docs", device="cpu")) == expected
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert text_of(LLM("org/docs", device="cpu")) == expected


@pytest.mark.exhaustive
def test_subfolder_tokenizer_adapter_and_drafter_by_name(hub, docs_5m, expected):
    llm = LLM(
        "org/bare",
        subfolder="inner",
        tokenizer="org/tokenizer",
        device="cpu",
        enable_lora=True,
        lora_modules=["a=org/adapter"],
        speculative_config={"model": "org/docs", "num_speculative_tokens": 2},
    )
    config = llm.engine.config
    assert text_of(llm) == expected
    adapter = LoRARequest("b", 2, "org/adapter")
    assert text_of(llm, lora_request=adapter) != expected
    assert text_of(llm, lora_request=LoRARequest("a", 1)) == text_of(llm, lora_request=adapter)
    assert llm.chat([{"role": "user", "content": "Hi"}], PARAMS, use_tqdm=False)
    assert config.speculation.method == "draft_model"
    assert Path(config.speculation.model, "model.safetensors").is_file()
    assert local_config(config) == config


def test_dummy_weights_fetch_no_weight_files(hub):
    with local_hub.in_place_of_the_hub(hub.repos, Path(hub_folder("dummy"))) as fresh:
        config = local_config(EngineConfig(model="org/docs", load_format="dummy"))
        assert not any("safetensors" in path for _, path in fresh.requests)
    assert Path(config.model, "config.json").is_file()


def test_async_llm_and_run_batch_by_name(hub, tmp_path, monkeypatch):
    """The engine's process gets a path. Starts are compared, not made: they take seconds."""
    seen = []

    async def start(config, **settings):
        seen.append(config)
        raise InputError("engine", "stops here")

    monkeypatch.setattr(EngineSupervisor, "start", start)
    with pytest.raises(InputError, match="stops here"):
        asyncio.run(AsyncLLM("org/docs", revision="main", device="cpu").start())
    source = tmp_path / "in.jsonl"
    body = {"model": "org/docs", "prompt": "a"}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    source.write_text(json.dumps(line))
    config = BatchConfig(input=str(source), output=str(tmp_path / "out.jsonl"))
    with pytest.raises(InputError, match="stops here"):
        run_batch(EngineConfig(model="org/docs", tokenizer="org/tokenizer"), config)
    assert len(seen) == 2 and all(Path(each.model, "config.json").is_file() for each in seen)
    assert all(each.revision is None for each in seen)


def test_inspect_convert_and_eval_by_name(hub, tmp_path, capsys):
    assert main(["inspect", "org/w4a16", "--json", "--deep", "org/w4a16@v2"]) == 0
    assert json.loads(capsys.readouterr().out)["deep"]["divergence"] < 1
    target = tmp_path / "gptq"
    assert main(["convert", "org/w4a16", str(target), "--format", "gptq"]) == 0
    assert (target / "tokenizer.json").is_file()
    text = tmp_path / "text.txt"
    text.write_text(f"{PROMPT} is documented. " * 20)
    flags = ["--text", str(text), "--sequence-length", "32", "--windows", "1", "--json"]
    assert main(["eval", "org/docs", *flags, "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["model"] == "org/docs"


@pytest.mark.parametrize("command", ["serve", "inspect", "generate", "eval"])
def test_hub_errors_are_one_line(hub, capsys, tmp_path, command):
    (tmp_path / "text").write_text("a")
    flags = {"generate": ["--prompt", "a"], "eval": ["--text", str(tmp_path / "text")]}
    for name, words in (
        ("org/nothing", "org/nothing: there is no such folder, and no such model on"),
        ("org/docs@v9", "org/docs@v9: has no revision v9"),
        ("./nothing", "./nothing: no such folder"),
    ):
        fails_with(capsys, [command, name, *flags.get(command, [])], words)


def test_part_errors_precede_model_download(hub):
    for settings, words in (
        ({"tokenizer": "org/adapter"}, "org/adapter: has no tokenizer"),
        ({"enable_lora": True, "lora_modules": ["a=org/docs"]}, "has no adapter_config.json"),
        ({"speculative_config": {"model": "org/no", "method": "eagle3"}}, "no such drafter on"),
        ({"revision": "v9"}, "has no revision v9"),
    ):
        hub.requests.clear()
        with pytest.raises(InputError, match=words):
            LLM("org/w4a16", device="cpu", **settings)
        assert "model.safetensors" not in hub.fetched()
