"""`--config`: flags from a YAML, TOML or JSON file."""

import json

import pytest

from qserve.cli import main
from tests.qserve.command_line import fails_with

YAML = """
model: from-file
max_num_seqs: 7
served-model-name: [a, b]
enforce_eager: true
allow-credentials: false
api_key: null
port: 1234
"""
TOML = """
model = "from-file"
max_num_seqs = 7
served-model-name = ["a", "b"]
enforce_eager = true
allow-credentials = false
port = 1234
"""
SAME_AS_JSON = {
    "model": "from-file",
    **{"max_num_seqs": 7, "served-model-name": ["a", "b"], "enforce_eager": True, "port": 1234},
}


@pytest.mark.parametrize(
    ("name", "text"),
    [("c.yaml", YAML), ("c.yml", YAML), ("c.toml", TOML), ("c.json", json.dumps(SAME_AS_JSON))],
)
def test_config_file_sets_flags(served, tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    assert main(["serve", "--config", str(path)]) == 0
    assert main(["serve", "other", f"--config={path}", "--max-num-seqs", "9", "--port=5"]) == 0
    (model, engine, server, _), (other, other_engine, other_server, _) = served
    assert (model, engine.max_num_seqs, engine.enforce_eager) == ("from-file", 7, True)
    assert (server.served_model_name, server.port) == (["a", "b"], 1234)
    assert server.allow_credentials is False and server.api_key == []
    assert (other, other_engine.max_num_seqs, other_server.port) == ("other", 9, 5)
    assert other_engine.enforce_eager


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "model: Modell-ü"),
        ("c.toml", 'model = "Modell-ü"'),
        ("c.json", '{"model": "Modell-ü"}'),
    ],
)
def test_config_file_may_begin_with_a_byte_order_mark(served, tmp_path, name, text):
    path = tmp_path / name
    for encoding in ("utf-8", "utf-8-sig"):
        path.write_text(text, encoding=encoding)
        assert main(["serve", "--config", str(path)]) == 0
    assert [model for model, *_ in served] == ["Modell-ü"] * 2


def test_mapping_in_config_file_is_the_json_of_a_flag(served, tmp_path):
    """As in vLLM's files; a person does not write JSON into YAML."""
    path = tmp_path / "c.yaml"
    path.write_text(
        "speculative-config: {method: ngram, num_speculative_tokens: 2}\n"
        "limit_mm_per_prompt:\n  image: 4\n"
        "lora-modules:\n  - {name: sql, path: adapters/sql}\n  - b=adapters/b\n"
        "enable-lora: true\n"
    )
    assert main(["serve", "m", "--config", str(path)]) == 0
    ((_, engine, server, _),) = served
    assert json.loads(engine.speculative_config) == {
        "method": "ngram",
        "num_speculative_tokens": 2,
    }
    assert [json.loads(engine.lora_modules[0])["path"], engine.lora_modules[1]] == [
        "adapters/sql",
        "b=adapters/b",
    ]
    assert json.loads(server.limit_mm_per_prompt) == {"image": 4}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_num_sequences: 5", ["max-num-sequences", "not a setting", "mean max-num-seqs?"]),
        ("enforce_eager: 1", ["enforce-eager", "true or false"]),
        ("port: {a: 1}", ["port", "a string or a number"]),
        ("port: yes", ["port", "a string or a number"]),
        ("dtype: on", ["dtype: expected a string", "put a string in quotes"]),
        ("served-model-name: [a, no]", ["expected a string", "put a string in quotes"]),
        ("speculative-config: {a: 2026-11-30}", ["speculative-config", "date", "JSON's types"]),
        ("port: [80, 81]", ["port: expected one value, found [80, 81]"]),
        ("port: [", ["cannot be read"]),
        ("- port", ["a mapping of flags"]),
        ("max_num_seqs: 0", ["--max-num-seqs", "1 or more"]),
    ],
)
def test_invalid_config_file_gives_one_line_error(capsys, served, tmp_path, text, words):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    fails_with(capsys, ["serve", "m", "--config", str(path)], *words)
    assert not served


def test_config_file_of_vllm(served, tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text("model: m\ntrust-remote-code: true\nswap_space: 4\nhf-overrides: {}\n")
    assert main(["serve", "--config", str(path)]) == 0
    assert served[0][0] == "m"
    path.write_text("model: m\nenable-chunked-prefill: false\n")
    with pytest.raises(SystemExit):
        main(["serve", "--config", str(path)])
    assert "long prompts are always computed in chunks" in capsys.readouterr().err


def test_missing_config_file_is_refused(capsys, served):
    fails_with(capsys, ["serve", "m", "--config", "/nowhere.yaml"], "/nowhere.yaml", "cannot be")
    fails_with(capsys, ["serve", "m", "--config"], "--config", "expected a file")
