"""The command line as a user meets it: options, exit codes, one clear line for a mistake."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from calibrate.results.model_card import RECIPE_FILE
from formats import names
from formats.errors import InputError
from qserve import cli, config
from qserve.cli import COMMANDS, main
from tests.qserve.command_line import fails_with

DATA = ["--samples", "4", "--sequence-length", "256"]


def test_choices_equal_tables():
    from calibrate.recipe import RECIPES
    from formats.layouts import LAYOUTS
    from formats.quant_config import METHODS
    from qserve.model.kv_format import CODE_DTYPES

    assert tuple(RECIPES) == names.RECIPES
    assert tuple(LAYOUTS) == tuple(METHODS) == names.FORMATS
    assert tuple(CODE_DTYPES) == tuple(names.KV_CACHES)


def test_invalid_prompts_are_refused_before_loading(docs_5m, tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in docs_5m.iterdir():
        if path.suffix == ".json":  # not the weights, so that loading would fail
            (folder / path.name).write_bytes(path.read_bytes())
    command = ["generate", str(folder), "--prompt", "a", "--chat"]
    fails_with(capsys, command, "chat template: the model has none")
    command = ["generate", str(folder), "--prompt", ""]
    fails_with(capsys, command, "--prompt: has no tokens (give a text to complete)")
    command = ["generate", str(folder), "--prompt", "a", "--prompt", ""]
    fails_with(capsys, command, "--prompt: has no tokens (give a text to complete)")


@pytest.mark.parametrize("flags", [[], ["--chat"]])
def test_generate_answers_every_prompt_in_order(docs_5m, capsys, flags):
    command = ["generate", str(docs_5m), "--max-tokens", "8", "--dtype", "float32", *flags]
    alone = []
    for prompt in ("Rust", "A borrow"):
        assert main([*command, "--prompt", prompt]) == 0
        alone.append(capsys.readouterr().out)
    assert main([*command, "--prompt", "Rust", "--prompt", "A borrow"]) == 0
    assert capsys.readouterr().out == f"[1/2] 'Rust'\n{alone[0]}[2/2] 'A borrow'\n{alone[1]}"


def test_quantize_inspect_generate_eval(docs_5m, tmp_path, capsys):
    folder = tmp_path / "w4"
    assert main(["quantize", str(docs_5m), "-o", str(folder), "--group-size", "64", *DATA]) == 0
    printed = capsys.readouterr().out
    assert "model.layers.3.mlp.down_proj" in printed and "w4a16-sym-g64" in printed
    lines = printed.splitlines()
    assert lines[-1] == f"To serve it: qserve serve {folder}"
    assert Path(lines[-2].removeprefix("Plots of the errors: ")).is_file()
    assert main(["inspect", str(folder), "--json"]) == 0
    inspection = json.loads(capsys.readouterr().out)
    assert inspection["problems"] == []
    assert main(["generate", str(folder), "--prompt", "Rust", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out.strip()
    text = tmp_path / "text.jsonl"
    text.write_text(
        "\n".join(json.dumps({"text": "Ownership is a set of rules. " * 40}) for _ in "ab")
    )
    arguments = ["--text", str(text), "--sequence-length", "128", "--windows", "2", "--json"]
    assert main(["eval", str(folder), *arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["windows"] == 2 and 1 < result["value"] < 200


def test_eval_against_the_float_model(docs_5m, quantized_5m, transformers_model, tmp_path, capsys):
    """Judged by transformers' models of both folders."""
    from transformers import AutoTokenizer

    text = tmp_path / "text.txt"
    text.write_text("A borrow is a reference to a value that someone else owns. " * 60)
    arguments = ["--text", str(text), "--sequence-length", "64", "--windows", "3"]
    command = ["eval", str(quantized_5m), "--against", str(docs_5m), *arguments, "--device", "cpu"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tokenizer = AutoTokenizer.from_pretrained(docs_5m)
    ids = [tokenizer.bos_token_id, *tokenizer.encode(text.read_text(), add_special_tokens=False)]
    ids_WS = torch.tensor(ids[: 3 * 64]).view(3, 64)
    with torch.no_grad():
        p, q = (
            transformers_model(folder)(ids_WS).logits[:, :-1].double().log_softmax(-1)
            for folder in (docs_5m, quantized_5m)
        )
    assert found["divergence"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert found["same_top_token"] == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    for name, logs in (("reference_perplexity", p), ("perplexity", q)):
        nll = -float(logs.gather(-1, ids_WS[:, 1:, None]).mean())
        assert found[name] == pytest.approx(math.exp(nll), rel=1e-4)
    assert main(command) == 0
    assert f"{found['divergence']:.5f}" in capsys.readouterr().out


def test_eval_against_a_model_of_another_tokenizer(docs_5m, quantized_5m, tmp_path, capsys):
    text, other = tmp_path / "text.txt", tmp_path / "other"
    text.write_text("a few words " * 40)
    other.mkdir()
    for path in docs_5m.iterdir():
        (other / path.name).symlink_to(path)
    (other / "tokenizer.json").unlink()
    tokenizer = json.loads((docs_5m / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:100]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    command = ["eval", str(quantized_5m), "--against", str(other), "--text", str(text)]
    fails_with(capsys, [*command, "--sequence-length", "16"], "gives other token ids than that of")


def test_missing_folder(capsys, tmp_path):
    fails_with(capsys, ["inspect", str(tmp_path / "none")], "no such folder")


@pytest.mark.exhaustive
def test_unencodable_output_is_escaped(quantized_5m, tmp_path):
    folder = tmp_path / "mod\u00e8le"
    folder.symlink_to(quantized_5m)
    command = [sys.executable, "-m", "qserve.cli", "inspect", str(folder)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "mod\\xe8le: LlamaForCausalLM" in done.stdout


def test_nonempty_output_is_refused(capsys, docs_5m, tmp_path):
    keep = tmp_path / "keep.txt"
    keep.write_text("mine")
    fails_with(capsys, ["quantize", str(docs_5m), "-o", str(tmp_path)], "not empty")
    assert keep.read_text() == "mine" and os.listdir(tmp_path) == ["keep.txt"]


def test_folder_named_like_gguf_is_refused(capsys, docs_5m, quantized_5m, tmp_path):
    file = str(tmp_path / "model.gguf")
    fails_with(capsys, ["quantize", str(docs_5m), "-o", file], "--format gguf")
    arguments = ["convert", str(quantized_5m), file, "--format", "compressed-tensors"]
    fails_with(capsys, arguments, "model.gguf: ends in .gguf", "--format gguf")
    assert os.listdir(tmp_path) == []


def test_incompatible_scheme_error_names_layer(capsys, docs_5m, tmp_path):
    arguments = ["quantize", str(docs_5m), "-o", str(tmp_path / "x"), "--group-size", "512"]
    fails_with(capsys, arguments, "model.layers.0.self_attn", "256", "512")
    assert os.listdir(tmp_path) == []


def test_group_size_shrinks_if_default_fits_no_linear(tiny_model, tmp_path, capsys):
    arguments = ["quantize", str(tiny_model("llama")), "-o", str(tmp_path / "x")]
    assert main([*arguments, "--recipe", "rtn", "--quality-windows", "0"]) == 0
    assert "linears to w4a16-sym-g32 by rtn, as gptq" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_auto_group_size(docs_5m, tmp_path, capsys):
    arguments = ["quantize", str(docs_5m), "-o", str(tmp_path / "x"), "--group-size", "auto"]
    assert main([*arguments, "--recipe", "rtn"]) == 0
    assert "linears to w4a16-sym by rtn" in capsys.readouterr().out
    assert "group_size: auto" in (tmp_path / "x" / RECIPE_FILE).read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--group-size", "big"], "--group-size: expected a number or auto, found 'big'"),
        (["--group-size", "auto", "--scheme", "w8a8"], "its scales are fixed (leave --group-size"),
        (["--group-size", "auto", "--scheme", "w4a16-sym-g64"], "already sets it"),
        (["--group-size", "7"], "expected -1 or a multiple of 8, found 7"),
    ],
)
def test_invalid_group_sizes_are_refused(capsys, docs_5m, tmp_path, flags, words):
    fails_with(capsys, ["quantize", str(docs_5m), "-o", str(tmp_path / "x"), *flags], words)


@pytest.mark.parametrize(
    ("argument", "flag"),
    [
        ("group_size", "--group-size"),
        ("kv_cache", "--kv-cache-scheme"),
        ("output_format", "--format"),
        ("of_nothing", "`of_nothing`"),
    ],
)
def test_errors_name_the_flag_of_an_argument(argument, flag):
    assert cli._message(InputError("x", f"give `{argument}` 64")) == f"x: give {flag} 64"


def test_unknown_scheme_lists_the_known_ones(capsys, docs_5m, tmp_path):
    arguments = ["quantize", str(docs_5m), "-o", str(tmp_path / "x"), "--scheme", "w5a16"]
    fails_with(capsys, arguments, "w5a16", "w4a16-sym")


@pytest.mark.parametrize(
    ("scheme", "remedy"), [("Q4_K_M", "use q4_k_m"), ("IQ2_XS", "known: q4_0, q4_1, ")]
)
def test_llama_cpp_type_names_are_recognized(capsys, docs_5m, tmp_path, scheme, remedy):
    arguments = ["quantize", str(docs_5m), "-o", str(tmp_path / "x.gguf"), "--scheme", scheme]
    fails_with(capsys, arguments, f"--scheme {scheme}: is no type of GGUF files", remedy)


def test_truncated_weights(capsys, docs_5m, tmp_path):
    (tmp_path / "config.json").write_bytes((docs_5m / "config.json").read_bytes())
    data = (docs_5m / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    arguments = ["quantize", str(tmp_path), "-o", str(tmp_path / "x")]
    fails_with(capsys, arguments, "model.safetensors", "truncated")


def test_unknown_architecture(capsys, docs_5m, tmp_path):
    config = json.loads((docs_5m / "config.json").read_text())
    config["architectures"] = ["RwkvForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((docs_5m / name).read_bytes())
    for command in (["quantize", "-o", str(tmp_path / "x")], ["generate", "--prompt", "a"]):
        fails_with(capsys, [command[0], str(tmp_path), *command[1:]], "RwkvForCausalLM")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--block-size", "0"),
        ("--max-num-seqs", "0"),
        ("--max-num-seqs", "-1"),
        ("--max-num-batched-tokens", "0"),
        ("--num-gpu-blocks-override", "0"),
        ("--cpu-kv-cache-memory", "nan"),
        ("--cpu-kv-cache-memory", "inf"),
        ("--cpu-kv-cache-memory", "1e-09"),
        ("--gpu-memory-utilization", "7"),
        ("--max-model-len", "0"),
        ("--seed", str(2**63)),
    ],
)
def test_engine_setting_out_of_range_is_named(capsys, docs_5m, flag, value):
    fails_with(capsys, ["generate", str(docs_5m), "--prompt", "a", flag, value], flag, value)


@pytest.mark.parametrize(("flag", "value"), [("--max-tokens", "0"), ("--temperature", "-5")])
def test_invalid_sampling_is_refused_before_loading(capsys, docs_5m, flag, value):
    arguments = ["generate", str(docs_5m), "--prompt", "a", flag, value]
    captured = fails_with(capsys, arguments, flag[2:].replace("-", "_"), value)
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("port", ["-1", "65536", "70000"])
def test_port_out_of_range_is_not_wrapped(capsys, monkeypatch, docs_5m, port):
    """The system's look-up of addresses takes any number, modulo 65536."""
    command = dataclasses.replace(COMMANDS["serve"], run=lambda *settings: 0)
    monkeypatch.setitem(COMMANDS, "serve", command)
    fails_with(capsys, ["serve", str(docs_5m), "--port", port], "--port", "0 to 65535", port)


@pytest.mark.parametrize("name", ["dtype", "device", "load_format", "kv_cache_dtype"])
def test_choices_are_checked_in_python(docs_5m, name):
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')}: expected one of auto, "):
        config.EngineConfig(model=str(docs_5m), **{name: "x"})


def test_unknown_kernel_error_lists_known_kernels(capsys):
    fails_with(capsys, ["bench", "kernels", "--op", "w3a16"], "--op", "w3a16", "paged_attention")


@pytest.mark.exhaustive
def test_convert_and_inspect_deep(capsys, docs_5m, tmp_path, quantized_5m):
    converted = tmp_path / "awq"
    assert main(["convert", str(quantized_5m), str(converted), "--format", "awq"]) == 0
    assert "from gptq to awq" in capsys.readouterr().out
    assert main(["inspect", str(converted), "--json", "--deep", str(docs_5m)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "awq" and 0 < found["deep"]["divergence"] < 1
    # codes shifted by two steps in every linear
    from safetensors.torch import load_file, save_file

    state = load_file(converted / "model.safetensors")
    for name in [name for name in state if name.endswith("qzeros")]:
        state[name] = state[name] ^ 0x22222222
    save_file(state, converted / "model.safetensors", metadata={"format": "pt"})
    assert main(["inspect", str(converted), "--deep", str(docs_5m)]) == 1
    assert "a broken one" in capsys.readouterr().out


def test_inspect_deep_skips_broken_folder(capsys, docs_5m, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert main(["inspect", str(tmp_path), "--deep", str(docs_5m)]) == 1
    assert f"Not compared with {docs_5m}" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_quantize_with_ignore_override_and_size(capsys, docs_5m, tmp_path):
    arguments = ["quantize", str(docs_5m), "-o", str(tmp_path / "x"), "--ignore", "layers.0.mlp"]
    arguments += ["--override", "*.o_proj=w8a16-sym", "--max-shard-size", "1MB", *DATA]
    assert main([*arguments, "--ignore", "layers.3.mlp"]) == 0
    assert "left in float: model.layers.0.mlp" in capsys.readouterr().out
    config = json.loads((tmp_path / "x" / "config.json").read_text())["quantization_config"]
    groups = config["config_groups"].values()
    assert {group["weights"]["num_bits"] for group in groups} == {4, 8}
    assert len(list((tmp_path / "x").glob("*.safetensors"))) > 2
    fails_with(capsys, [*arguments, "--max-shard-size", "many"], "size 'many'", "500MB")


@pytest.mark.exhaustive
def test_quantize_with_a_recipe_file(capsys, docs_5m, tmp_path):
    """The settings file that a run writes reproduces the folder; a flag has precedence over it."""
    arguments = ["quantize", str(docs_5m), "--recipe", "rtn", "--seed", "3"]
    assert main([*arguments, "-o", str(tmp_path / "a"), "--ignore", "layers.0"]) == 0
    recipe = str(tmp_path / "a" / "quantization_recipe.yaml")
    command = ["quantize", str(docs_5m), "--config", recipe, "-o"]
    assert main([*command, str(tmp_path / "b")]) == 0
    name = "model.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert main([*command, str(tmp_path / "c"), "--scheme", "w8a16-sym"]) == 0
    card = (tmp_path / "c" / "README.md").read_text()
    assert "A w8a16-sym model" in card and "`vllm serve c`" in card
    for text, message in (
        ("scheme: [", "not valid YAML"),
        ("schema: x", "'schema'"),
        ("samples: many", "samples.*int"),
        ("- scheme", "expected a mapping"),
    ):
        (tmp_path / "wrong.yaml").write_text(text)
        wrong = ["quantize", str(docs_5m), "--config", str(tmp_path / "wrong.yaml"), "-o", "x"]
        assert main(wrong) == 1
        assert re.search(message, capsys.readouterr().err)


def test_closed_output_pipe_is_not_an_error():
    """`qserve families | head -1`."""
    command = [sys.executable, "-m", "qserve", "families"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    with process.stderr as stream:
        errors = stream.read()
    assert (process.wait(timeout=120), errors) == (141, b"")
