"""Errors of wrong command lines; the first lines of --help; Ctrl-C."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from qserve.cli import build_parser, main
from qserve.text.tokenizer import Tokenizer
from tests.qserve.command_line import fails_with


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quantize", "m"], "required: -o/--output"),
        (["generate", "m", "--prompt", "a", "--max-tokens", "x"], "invalid int value: 'x'"),
        (["serve", "m", "--dtype", "int3"], "invalid choice: 'int3'"),
        (["bench", "serve", "--port", "x"], "invalid int value"),
    ],
)
def test_usage_error_is_one_line(capsys, arguments, words):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    name = "bench serve" if arguments[0] == "bench" else arguments[0]
    assert line.startswith(f"qserve {name}: ") and words in line
    assert line.endswith(f"(see qserve {name} --help)")


@pytest.mark.parametrize(
    "arguments",
    [
        ["m", "out", "--format", "awq"],
        ["m", "-o", "out", "--format", "awq"],
        ["--format", "awq", "--output", "out", "m"],
        ["--format=awq", "m", "out"],
        ["m", "--format", "awq", "out"],
    ],
)
def test_convert_takes_its_output_as_argument_or_flag(arguments):
    parsed = build_parser().parse_args(["convert", *arguments])
    assert (parsed.model, parsed.output, parsed.format) == ("m", "out", "awq")


def test_convert_without_output_names_the_flag(capsys):
    arguments = ["convert", "m", "--format", "awq"]
    fails_with(capsys, arguments, "OUTPUT: is missing", "add it, or -o/--output")


def test_usage_lists_required_arguments(capsys):
    for arguments, usage in (
        (["quantize"], "qserve quantize MODEL -o OUTPUT [options]"),
        (["convert"], "qserve convert MODEL [OUTPUT] --format FORMAT [options]"),
        (["profile"], "qserve profile [MODEL] [options]"),
    ):
        with pytest.raises(SystemExit):
            main([*arguments, "--help"])
        assert capsys.readouterr().out.splitlines()[0] == f"usage: {usage}"


def test_help_has_the_commands_own_flags_first(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    shown = capsys.readouterr().out
    assert shown.index("--prompt") < shown.index("the engine:") < shown.index("--max-num-seqs")
    with pytest.raises(SystemExit):
        main(["merge", "--help"])
    assert "Add a LoRA adapter" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kv-per-head", "--recipe", "rtn"], "--kv-per-head: requires --kv-cache-scheme"),
        (["--bits", "99"], "--bits: expected 2 to 9, found 99"),
        (["--samples", "0"], "--samples: expected 1 or more, found 0"),
        (["--eval-text", "/nowhere"], "/nowhere: No such file"),
        (["--config", "/nowhere"], "/nowhere: No such file"),
        (["-o", "pyproject.toml"], "pyproject.toml: is not a folder"),
        (["-o", "tests"], "tests: already exists and is not empty"),
    ],
)
def test_invalid_settings_are_refused_before_reading_texts(
    capsys, docs_5m, tmp_path, monkeypatch, flags, words
):
    monkeypatch.setattr("calibrate.run.settings.read_for_model", lambda *_: pytest.fail("too late"))
    command = ["quantize", str(docs_5m), "-o", str(tmp_path / "out"), *flags]
    captured = fails_with(capsys, command, words)
    assert "[Errno" not in captured.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--windows", "0"], "--windows: expected 1 or more"),
        (["--sequence-length", "999999"], "too few for one window"),
    ],
)
def test_eval_checks_its_windows_before_the_model(
    capsys, docs_5m, tmp_path, monkeypatch, flags, words
):
    monkeypatch.setattr("qserve.llm.LLM.__init__", lambda *_, **__: pytest.fail("too late"))
    text = tmp_path / "text.txt"
    text.write_text("a few words")
    fails_with(capsys, ["eval", str(docs_5m), "--text", str(text), *flags], words)


def test_eval_window_beyond_model_length_is_refused(capsys, docs_5m, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a few words " * 20)
    flags = ["--text", str(text), "--sequence-length", "30", "--max-model-len", "20"]
    assert main(["eval", str(docs_5m), *flags, "--device", "cpu"]) == 1
    assert "--sequence-length: expected at most 20" in capsys.readouterr().err


def test_missing_tokenizer_error_is_short(capsys, docs_5m, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(docs_5m / name)
    text = tmp_path / "text.txt"
    text.write_text("a few words")
    for command in (["eval", "--text", str(text)], ["generate", "--prompt", "a"]):
        words = "has no tokenizer: it contains none of"
        shown = fails_with(capsys, [command[0], str(tmp_path), *command[1:]], words)
        assert shown.err.count("\n") == 1  # loading the model would print more lines


def test_broken_config_error_names_config(capsys, docs_5m, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(docs_5m / name)
    (tmp_path / "config.json").write_text('{"architectures":')
    words = "config.json: is not valid JSON"
    fails_with(capsys, ["generate", str(tmp_path), "--prompt", "a"], words)


def test_inspect_deep_checks_reference_model_first(capsys, quantized_5m):
    fails_with(
        capsys, ["inspect", str(quantized_5m), "--deep", "nowhere"], "nowhere: no such folder"
    )


def test_bench_of_no_requests_does_not_wait_for_them(capsys):
    fails_with(capsys, ["bench", "serve", "--num-prompts", "0"], "--num-prompts", "1 or more")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_during_import_ends_program_and_removes_unfinished_files(tmp_path, number):
    """As torch and numpy do: the program must end all the same."""
    (tmp_path / "swallows.py").write_text(
        "import os, sys\n"
        "try:\n    os.kill(os.getpid(), int(sys.argv[1]))\n"
        "except BaseException:\n    pass\n"
    )
    code = (
        "import os, signal, sys\n"
        "from formats.files import staging\n"
        "from pathlib import Path\n"
        "from qserve.command_line.interrupts import handled\n"
        # a shell that runs the tests in the background has them ignore it
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with handled('qserve quantize'):\n"
        "    try:\n        os.kill(os.getpid(), int(sys.argv[1]))\n"
        "    except KeyboardInterrupt:\n        print('raised', flush=True)\n"
        "    for name in sys.argv[2:]:\n        staging.register(Path(name))\n"
        "    import swallows\n"
        "    print('went on', flush=True)\n"
    )
    folder, file = tmp_path / ".a.partial", tmp_path / ".b.partial"
    folder.mkdir()
    (folder / "shard-00001.safetensors").write_text("half")
    file.write_text("half")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}."}
    command = [sys.executable, "-c", code, str(int(number)), str(folder), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (128 + number, "raised\n"), done.stderr
    name = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}[number]
    assert done.stderr == f"qserve quantize: ended by {name}\n"
    assert not folder.exists() and not file.exists()


@pytest.fixture
def default_sigterm():
    """The default handler: Ray leaves its own in a process that has used it."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("name", ["out", "out.gguf"])
def test_sigterm_ends_quantize_with_one_line_and_no_half_files(
    capsys, docs_5m, tmp_path, default_sigterm, name
):
    over = threading.Event()

    def stop_when_it_writes() -> None:
        while not over.is_set():
            if any(tmp_path.rglob("shard-*")) or any(tmp_path.glob("*.gguf.partial")):
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(0.001)

    watch = threading.Thread(target=stop_when_it_writes)
    watch.start()
    scheme = "q8_0" if name.endswith(".gguf") else "w4a16-sym"
    try:
        code = main(
            ["quantize", str(docs_5m), "-o", str(tmp_path / name), "--scheme", scheme]
            + ["--recipe", "rtn", "--max-shard-size", "1MB"]
        )
    finally:
        over.set()
        watch.join()
    assert code == 143
    assert capsys.readouterr().err.rstrip().endswith("\nqserve quantize: ended by SIGTERM")
    left = [path.name for path in tmp_path.iterdir()]
    assert all(each.endswith(".unfinished") for each in left)  # finished layers, to resume
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "ADAPTER"],
        ["serve", "ADAPTER", "--port", "0"],
        ["generate", "ADAPTER", "--prompt", "a"],
        ["quantize", "ADAPTER", "-o", "OUT", "--scheme", "w4a16-sym"],
        ["convert", "ADAPTER", "-o", "OUT", "--format", "awq"],
    ],
)
def test_adapter_instead_of_model_is_named(capsys, tmp_path, arguments):
    adapter = tmp_path / "sql-lora"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    paths = {"ADAPTER": str(adapter), "OUT": str(tmp_path / "out")}
    words = [paths.get(each, each) for each in arguments]
    remedy = f"--enable-lora --lora-modules NAME={adapter}"
    fails_with(
        capsys, words, "sql-lora: is a LoRA adapter", remedy, f"qserve merge MODEL {adapter}"
    )


def test_tokenizer_of_an_adapter_folder_is_read(docs_5m, tmp_path):
    """PEFT's trainers write the tokenizer next to the adapter."""
    (tmp_path / "adapter_config.json").write_text("{}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(docs_5m / name)
    assert Tokenizer(str(docs_5m), str(tmp_path)).encode("a b")
