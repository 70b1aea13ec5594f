"""Flags of every command: their names, help, and configuration files."""

import argparse
import dataclasses
import logging
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from formats.checkpoint import DEFAULT_MAX_SHARD_BYTES
from formats.table import parse_size
from qserve.cli import COMMANDS, build_parser, main
from qserve.command_line.vllm_settings import ENGINE_SETTINGS, SERVER_SETTINGS
from qserve.config import EngineConfig


def test_shards_have_the_same_size_in_every_command():
    """A folder that one command wrote and another converts or merges keeps its number of files."""
    fields = [
        field
        for command in COMMANDS.values()
        for cls in command.settings
        for field in dataclasses.fields(cls)
        if field.name == "max_shard_size"
    ]
    assert len(fields) == 4  # quantize, convert, merge, distill
    assert {parse_size(field.default) for field in fields} == {DEFAULT_MAX_SHARD_BYTES}


HUB_FLAGS = {"--revision", "--subfolder", "--download-dir"}


ENGINE_FLAGS = {
    *HUB_FLAGS,
    "--admission",
    "--tokenizer",
    *("-tp", "-pp", "-dp", "-q"),
    "--async-scheduling",
    "--spec-acceptance",
    "--speculative-config",
    "--no-async-scheduling",
    "--compile-processes",
    "--kv-cache-memory",
    "--max-seq-len-to-capture",
    "--block-size",
    "--config",
    "--cpu-kv-cache-memory",
    "--cpu-threads",
    "--device",
    "--model-impl",
    "--dtype",
    "--batch-invariant",
    "--enforce-eager",
    "--language-model-only",
    "--mm-encoder-quantization",
    "--lm-head-quantization",
    "--kernel",
    "--plain-kernel-launch",
    "--activation-bits",
    "--quantization",
    "--quantization-config",
    "--gpu-memory-utilization",
    "--kv-cache-dtype",
    "--load-format",
    "--max-model-len",
    "--max-num-batched-tokens",
    "--max-num-seqs",
    "--num-gpu-blocks-override",
    "--num-state-snapshots",
    "--seed",
    "--enable-prefix-caching",
    "--no-enable-prefix-caching",
    "--kv-offload-gb",
    "--enable-lora",
    *("--lora-modules", "--max-loras", "--max-lora-rank", "--max-cpu-loras", "--lora-experts"),
    "--kv-transfer-config",
    "--scheduling-policy",
    "--prefill-batch-size",
    "--target-itl-ms",
    "--tensor-parallel-size",
    "--data-parallel-size",
    "--data-parallel-rank",
    "--data-parallel-address",
    "--prefill-engines",
    "--prefill-tensor-parallel-size",
    "--prefill-engine-min-tokens",
    "--gpu-offset",
    "--pipeline-parallel-size",
    "--distributed-executor-backend",
    "--all-reduce",
    "--prefill-context-parallel-size",
    "--prefill-context-parallel-min-tokens",
    "--enable-expert-parallel",
    "--expert-placement-strategy",
    "--record-expert-loads",
}


TALK_FLAGS = {
    *("-q", "--quick", "--url", "--model-name", "--api-key", "--max-tokens"),
    *("--temperature", "--top-p", "--seed", "--stats"),
}


# Adding a flag means adding it here; renaming one breaks its users.
FLAGS = {
    "quantize": {
        *HUB_FLAGS,
        "-o",
        "--output",
        "--scheme",
        "--format",
        "--recipe",
        "--calibration",
        "--samples",
        "--sequence-length",
        "--seed",
        "--eval-text",
        *("--bos", "--no-bos", "--quality-windows"),
        "--kv-cache-scheme",
        "--kv-per-head",
        "--act-order",
        "--spill",
        *("--quantize-head", "--quantize-embedding"),
        "--target",
        "--group-size",
        "--device",
        "--ignore",
        "--override",
        "--pad",
        *("--act-order", "--target", "--adapter"),
        "--max-shard-size",
        "--bits",
        "--config",
        "--moe-calibrate-all-experts",
    },
    "serve": ENGINE_FLAGS
    | {"--model"}
    | {
        *("--check", "--no-check"),
        *("--host", "--port", "--served-model-name", "--api-key"),
        *("--max-num-queued-reqs", "--max-num-queued-tokens"),
        *("--max-body-bytes", "--max-connections", "--chat-special-tokens"),
        *("--cache-salt-by-key", "--enable-cache-reset"),
        *("--enable-admin-routes", "--admin-api-key-file"),
        "--paused-requests",
        "--model-settings",
        "--memory-sharing",
        "--model-turn-seconds",
        *("--engine-timeout", "--engine-step-timeout", "--restart-engine"),
        *("--uds", "--root-path", "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs"),
        "--allowed-hosts",
        *("--allowed-origins", "--allow-credentials", "--api-key-file", "--api-key-env"),
        *("--max-requests-per-minute", "--request-timeout", "--shutdown-timeout"),
        *(
            "--log-level",
            "--log-format",
            "--metrics-prefix",
            "--otlp-traces-endpoint",
            "--profiler-config",
        ),
        *("--lora-folder", "--structured-output-strict"),
        *("--response-store", "--response-store-bytes", "--response-store-days"),
        *("--allowed-media-domains", "--allowed-local-media-path", "--limit-mm-per-prompt"),
        *("--max-media-bytes", "--max-image-pixels", "--media-fetch-timeout"),
        *("--max-video-bytes", "--max-video-frames", "--max-video-pixels"),
        "--video-decode-timeout",
        "--num-media-workers",
        *("--enable-auto-tool-choice", "--no-enable-auto-tool-choice"),
        *("--tool-call-parser", "--reasoning-parser"),
        *("--backend", "--replicas", "--max-replicas", "--target-ongoing-requests", "--router"),
        *("--drain-timeout", "--gpus-per-replica", "--ray-address"),
        *("--multiplexed-model", "--models-per-replica"),
    },
    "chat": {*TALK_FLAGS, "--system-prompt"},
    "complete": TALK_FLAGS,
    "run-batch": ENGINE_FLAGS
    | {"--model", "-i", "--input", "-o", "--output", "--served-model-name"},
    "generate": ENGINE_FLAGS
    | {"--prompt", "--chat", "--max-tokens", "--temperature", "--top-p", "--top-k"},
    "convert": HUB_FLAGS | {"-o", "--output", "--format", "--dtype", "--max-shard-size"},
    "merge": HUB_FLAGS | {"-o", "--output", "--max-shard-size"},
    "distill": HUB_FLAGS
    | {"-o", "--output", "--against", "--calibration", "--samples", "--sequence-length", "--seed"}
    | {"--steps", "--tokens", "--rate", "--norm-rate", "--code-rate", "--bos", "--no-bos"}
    | {"--eval-text", "--quality-windows", "--device", "--max-shard-size"},
    "inspect": HUB_FLAGS | {"--json", "--deep"},
    "families": {"--json"},
    "eval": ENGINE_FLAGS
    | {"--text", "--sequence-length", "--windows", "--json", "--bos", "--no-bos", "--against"},
    "profile": ENGINE_FLAGS
    | {
        *("--model", "--case", "--iters", "--with-stack", "--profile-dir", "--profiler"),
        *("--trace", "--with-trace"),
    },
    "check-invariance": ENGINE_FLAGS
    | {
        *("--num-requests", "--max-input-len", "--output-len", "--default-kernels"),
        *("--long-every", "--chunk-tokens", "--structured-output", "--comparison"),
    },
    "agent-check": {
        *("--forced", "--api", "--task", "--model-name", "--api-key", "--max-tokens"),
        *("--server-args", "--json"),
    },
    "bench": set(),  # its commands' flags: tests/qserve/bench/test_commands.py
}


def subparsers():
    (action,) = (a for a in build_parser()._actions if a.dest == "command")
    return action.choices


def test_options_are_frozen():
    found = {
        name: {flag for action in parser._actions for flag in action.option_strings}
        - {"-h", "--help"}
        for name, parser in subparsers().items()
    }
    assert found == FLAGS


@pytest.mark.exhaustive
def test_package_is_a_command():
    command = [sys.executable, "-m", "qserve"]
    done = subprocess.run([*command, "inspect", "nowhere"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("qserve inspect: nowhere: ")
    assert subprocess.run([*command, "--version"], capture_output=True).returncode == 0


def all_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from all_parsers(each)


def test_help_of_every_command_names_every_option():
    """A % in a help text would make argparse fail when it prints the help."""
    for parser in all_parsers(build_parser()):
        text = parser.format_help()
        for action in parser._actions:
            assert len(action.help) > 8 and all(flag in text for flag in action.option_strings)
            if isinstance(action, argparse.BooleanOptionalAction):
                assert action.default and action.help.endswith(" (default: on)"), action.dest
        assert "(default: )" not in text


def cpu_seconds(*arguments: str) -> tuple[float, str]:
    """Processor time and output of a Python process; the least of three."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run.returncode == 0, run.stderr
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times), run.stdout


@pytest.mark.exhaustive
def test_help_is_quick():
    """It takes a few times as long as a small standard module; torch alone would take 30 times."""
    help_time, text = cpu_seconds("-m", "qserve.cli", "--help")
    assert "quantize" in text
    assert help_time < 6 * cpu_seconds("-c", "import asyncio")[0]


def test_underscores_in_flags_are_accepted(monkeypatch):
    seen = []
    command = dataclasses.replace(
        COMMANDS["eval"], run=lambda *settings: seen.append(settings) or 0
    )
    monkeypatch.setitem(COMMANDS, "eval", command)
    assert main(["eval", "a_b", "--max_model_len", "64", "--text=c_d", "--sequence_length=9"]) == 0
    model, engine, settings = seen[0]
    assert (model, engine.model, engine.max_model_len) == ("a_b", "a_b", 64)
    assert (settings.text, settings.sequence_length) == ("c_d", 9)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("serve m --prot 80", "qserve serve: --prot: unknown flag; did you mean --port?"),
        ("serve m --zzz=4", "qserve serve: --zzz: unknown flag (see"),
        ("serve m --cpu_offload_gb 4", "--cpu-offload-gb: is not supported (weights stay on"),
        ("serve m --chat-template=x", "--chat-template=x: is not supported (the template is"),
        ("serve m --structured-outputs-config.backend=xgrammar", "llguidance is the only backend"),
        ("serve m --compilation-config.mode 3", "there is no torch.compile"),
        ("serve m -O3", "-O3: is not supported (there is no torch.compile"),
        ("serve m --middleware a.b", "--middleware: is not supported (put a proxy before"),
        ("serve m --cuda-graph-sizes 1 2", "sizes of CUDA graphs follow from --max-num-seqs"),
        ("generate m --no-enable-chunked-prefill", "long prompts are always computed in chunks"),
        ("generate m --prompt p --api-server-count 1", "--api-server-count: unknown flag"),
        ("serve m --max-model-len 1.5", "--max-model-len: invalid int value: '1.5'"),
        ("bench latency m --modle x", "qserve bench latency: --modle: unknown flag; did you mean"),
        ("convert a b c --format gptq", "qserve convert: unexpected argument 'c' (see"),
    ],
)
def test_unknown_flag_is_named_with_its_command(capsys, arguments, text):
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    lines = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and len(lines) == 1 and text in lines[0]


VLLM_COMMAND = (
    "serve --trust-remote-code --swap-space 4 m --disable-log-requests --enable-chunked-prefill"
    " --task=generate --uvicorn-log-level info --hf-overrides {} -tp 1 --dtype half"
    " --max-model-len 4K --max-num-batched-tokens 2k --load-format safetensors -q fp8"
    " --structured-outputs-config.backend auto --enable-server-load-tracking --max-log-len 100"
    " --max-num-partial-prefills 1 --calculate-kv-scales --enable-reasoning --nnodes=1"
)


def test_flags_of_vllm_for_mistrals_format_are_accepted(served):
    flags = ("--load-format mistral", "--config-format mistral", "--tokenizer-mode mistral")
    assert main(f"serve {' '.join(flags)} m".split()) == 0
    assert served[0][1].load_format == "auto"


def test_no_op_vllm_flags_are_accepted(served, caplog):
    caplog.set_level(logging.INFO)
    assert main(VLLM_COMMAND.split()) == 0
    model, engine, _, _ = served[0]
    assert (model, engine.dtype, engine.load_format) == ("m", "float16", "auto")
    assert (engine.max_model_len, engine.max_num_batched_tokens) == (4096, 2000)
    assert (engine.tensor_parallel_size, engine.quantization) == (1, "fp8")
    assert "--trust-remote-code has no effect: code in model folders is never run" in caplog.text


@pytest.mark.parametrize("length", ["auto", "-1"])
def test_vllm_max_model_len_auto(served, length):
    assert main(["serve", "m", "--max-model-len", length]) == 0
    assert served[0][1].max_model_len is None
    assert EngineConfig(model="m", max_model_len=-1).max_model_len is None


@pytest.mark.parametrize("line", ["serve --model m --port 9", "serve --port 9 --model=m"])
def test_model_can_be_given_as_flag(served, line):
    assert main(line.split()) == 0
    model, _, server, _ = served[0]
    assert (model, server.port, server.more_models) == ("m", 9, [])


def test_several_models_are_arguments(served):
    assert main(["serve", "a", "b", "c", "--port", "9"]) == 0
    assert (served[0][0], served[0][2].more_models) == ("a", ["b", "c"])


def test_vllm_parser_names_are_accepted(served):
    line = "serve m --tool-call-parser openai --reasoning-parser openai_gptoss"
    assert main(line.split()) == 0
    server = served[0][2]
    assert (server.tool_call_parser, server.reasoning_parser) == ("gpt_oss", "gpt_oss")


def test_vllm_settings_do_not_collide_with_own():
    names = {name for each in COMMANDS["serve"].settings for name in each.__dataclass_fields__}
    assert not (ENGINE_SETTINGS.keys() | SERVER_SETTINGS.keys()) & names


def test_several_names_and_keys_at_once(served):
    arguments = ["--served-model-name", "a", "b", "--api-key", "k1", "--api-key", "k2", "k3"]
    assert main(["serve", "m", *arguments]) == 0
    server = served[0][2]
    assert (server.served_model_name, server.api_key) == (["a", "b"], ["k1", "k2", "k3"])


@pytest.mark.parametrize("prompt", ["--- my_doc", "---\nmy_key: a_b=c_d"])
def test_underscores_of_a_prompt_that_begins_with_dashes(monkeypatch, prompt):
    seen = []
    command = dataclasses.replace(
        COMMANDS["generate"], run=lambda *settings: seen.append(settings) or 0
    )
    monkeypatch.setitem(COMMANDS, "generate", command)
    assert main(["generate", "model", "--prompt", prompt]) == 0
    assert seen[0][-1].prompt == [prompt]
