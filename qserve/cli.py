"""The command line: one table of commands, with flags made from settings classes.

A command's flags are the fields of its settings classes (qserve/config.py). torch is loaded only by
the commands that compute.
"""

import argparse
import dataclasses
import json
import logging
import os
import re
import select
import sys
import typing

import qserve
from formats.errors import InputError, one_line
from formats.names import FLOAT, GGUF
from qserve.agent_check.command import AGENT_CHECK
from qserve.bench.commands import BENCH_COMMANDS, PROFILE
from qserve.command_line import config_file, interrupts
from qserve.command_line.arguments import (
    VLLM_SETTINGS,
    Parser,
    add_commands,
    check_argument,
    with_dashes,
)
from qserve.command_line.command import Command
from qserve.command_line.tool_config import (
    BatchConfig,
    ChatConfig,
    ClientConfig,
    ConvertConfig,
    FamiliesConfig,
    GenerateConfig,
    InspectConfig,
    QuantizeConfig,
)
from qserve.commands.check_invariance import CHECK_INVARIANCE
from qserve.commands.distill import DISTILL
from qserve.commands.evaluate import EVAL
from qserve.commands.quantize import QUANTIZE
from qserve.config import EngineConfig, ServerConfig
from qserve.deploy.settings import DeploySettings
from qserve.lora.command import MERGE
from qserve.processes import logs


def serve(model: str, engine: EngineConfig, server: ServerConfig, replicas: DeploySettings) -> int:
    if replicas.backend == "ray":
        if server.more_models:
            raise InputError(
                "MORE_MODELS", "do not work with --backend ray", "start a server for each model"
            )
        try:
            import ray  # noqa: F401
        except ImportError:
            raise InputError(
                "--backend ray", "requires Ray Serve", "pip install 'qserve-kit[ray]'"
            ) from None
        from qserve.deploy.ray_app import serve_on_ray

        return serve_on_ray(engine, server, replicas)
    from qserve.engine.ipc.waiting import WaitingEngine

    # The engine's process imports torch while this process imports the server.
    waiting = WaitingEngine.of(engine, server)
    try:
        from qserve.server.serve import serve as serve_http

        return serve_http(engine, server, waiting=waiting)
    finally:
        if waiting is not None:
            waiting.close()


def chat(config: ChatConfig) -> int:
    from qserve.commands import talk

    return talk.chat(config)


def complete(config: ClientConfig) -> int:
    from qserve.commands import talk

    return talk.complete(config)


def run_batch(model: str, engine: EngineConfig, config: BatchConfig) -> int:
    from qserve.commands.run_batch import run_batch as run

    return run(engine, config)


def generate(model: str, engine: EngineConfig, config: GenerateConfig) -> int:
    from qserve.hub.local import local_config
    from qserve.llm import LLM
    from qserve.params.sampling_params import SamplingParams
    from qserve.text.tokenizer import Tokenizer

    # Check everything else before the model loads, which can take minutes.
    params = SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_tokens,
    )
    engine = local_config(engine)
    tokenizer = Tokenizer(engine.model, engine.tokenizer)
    chats = [[{"role": "user", "content": prompt}] for prompt in config.prompt]
    if config.chat:
        tokenizer.chat_prompt(chats[0])  # raises TextError if there is no chat template
    elif not all(map(tokenizer.encode, config.prompt)):
        raise InputError("--prompt", "has no tokens", "give a text to complete")
    llm = LLM.from_engine_args(engine)
    if config.chat:
        outputs = llm.chat(chats, params, use_tqdm=False)
    else:
        outputs = llm.generate(config.prompt, params, use_tqdm=False)
    for number, (prompt, output) in enumerate(zip(config.prompt, outputs, strict=True), start=1):
        if len(outputs) > 1:
            print(f"[{number}/{len(outputs)}] {prompt!r:.70}")
        print(output.outputs[0].text)
    return 0


def convert(model: str, config: ConvertConfig) -> int:
    from formats.files.target import check_is_free
    from formats.table import parse_size
    from qserve.hub.local import local_model

    if config.dtype is not None and config.format != FLOAT:
        raise InputError("--dtype", f"needs --format {FLOAT}", "remove it")
    if config.format == GGUF:
        from formats.gguf.writing.container_writer import check_file_is_free
        from formats.gguf.writing.export import export_gguf

        check_file_is_free(config.output)
        print(export_gguf(local_model(model, config), config.output).to_text())
        return 0
    check_is_free(config.output)
    source, most = local_model(model, config), parse_size(config.max_shard_size)
    if config.format == FLOAT:
        from formats.dequantize import dequantize_checkpoint

        written = dequantize_checkpoint(
            source, config.output, dtype=config.dtype, max_shard_bytes=most
        )
        print(written.to_text())
        return 0
    from formats.convert import convert_checkpoint

    conversion = convert_checkpoint(
        source,
        config.output,
        config.format,
        max_shard_bytes=most,
        quantizer=f"qserve-kit:{qserve.__version__}",
    )
    print(conversion.to_text())
    return 0


def inspect(model: str, config: InspectConfig) -> int:
    from formats.heads.folder import is_head_folder
    from formats.heads.inspect import inspect_head
    from formats.hub.fetch import local_path
    from formats.inspection.inspect import inspect_checkpoint
    from qserve.hub.local import local_model

    float_model = config.deep and local_path(config.deep, download_dir=config.download_dir)
    model = local_model(model, config)
    is_head = is_head_folder(model)
    if is_head and float_model is not None:
        raise InputError(
            "--deep",
            f"{model} is a draft head, which cannot run without its target",
            "remove the flag",
        )
    inspection = inspect_head(model) if is_head else inspect_checkpoint(model)
    comparison = None
    if float_model is not None and inspection.ok:
        from qserve.commands.compare import compare_models

        comparison = compare_models(model, float_model)
    elif float_model is not None:
        print(f"Not compared with {config.deep}: fix the errors first", file=sys.stderr)
    if config.json:
        found = inspection.to_dict()
        if comparison is not None:
            found["deep"] = dataclasses.asdict(comparison)
        print(json.dumps(found, indent=2))
    else:
        print(inspection.to_text())
        if comparison is not None:
            print(comparison.to_text())
    return 0 if inspection.ok and (comparison is None or comparison.ok) else 1


def families(config: FamiliesConfig) -> int:
    from formats.architecture import family_table

    print(json.dumps(family_table.rows()) if config.json else family_table.to_text())
    return 0


COMMANDS: dict[str, Command] = {
    "quantize": QUANTIZE,
    "serve": Command(
        help="serve a model through an OpenAI-compatible API",
        settings=(EngineConfig, ServerConfig, DeploySettings),
        run=serve,
        argument_is_flag_too=True,
    ),
    "chat": Command(
        help="chat with the model of a running server",
        settings=(ChatConfig,),
        run=chat,
        argument=None,
    ),
    "complete": Command(
        help="complete texts with the model of a running server",
        settings=(ClientConfig,),
        run=complete,
        argument=None,
    ),
    "run-batch": Command(
        help="run the requests of a batch file, without a server",
        settings=(EngineConfig, BatchConfig),
        run=run_batch,
        argument_is_flag_too=True,
    ),
    "generate": Command(
        help="complete prompts and print the texts",
        settings=(EngineConfig, GenerateConfig),
        run=generate,
    ),
    "convert": Command(
        help="convert a quantized checkpoint to another format, or to floats",
        settings=(ConvertConfig,),
        run=convert,
    ),
    "merge": MERGE,
    "distill": DISTILL,
    "inspect": Command(
        help="show what a checkpoint contains and report its faults (reads everything but "
        "integer codes)",
        settings=(InspectConfig,),
        run=inspect,
    ),
    "families": Command(
        help="print the supported model families",
        settings=(FamiliesConfig,),
        run=families,
        argument=None,
    ),
    "eval": EVAL,
    "bench": Command(
        help="measure latency, throughput, a server, steps or kernels; simulate a server",
        commands=BENCH_COMMANDS,
    ),
    "profile": PROFILE,
    "agent-check": AGENT_CHECK,
    "check-invariance": CHECK_INVARIANCE,
}


STDOUT = 1  # file descriptor
BROKEN_PIPE = 141  # exit code, as of a program that SIGPIPE ends
HTTP_CLIENTS = ("httpx", "httpx2")  # loggers that name every request to the hub


def main(argv: list[str] | None = None) -> int:
    """Run one command. A user error prints one line on stderr and returns exit code 1."""
    # Names of folders and tensors may contain characters that the terminal cannot encode.
    sys.stdout.reconfigure(errors="backslashreplace")
    argv = [with_dashes(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    try:
        argv = _with_config_file(argv)
    except InputError as error:
        print(f"qserve {argv[0]}: {error}", file=sys.stderr)
        return 1
    arguments = build_parser().parse_args(argv)
    name, command = arguments.command, COMMANDS[arguments.command]
    while command.commands:
        inner = getattr(arguments, f"{name} command")
        name, command = f"{name} {inner}", command.commands[inner]
    handler = logs.LineHandler(sys.stderr)
    logging.basicConfig(level=logging.INFO, handlers=[handler], format="%(message)s")
    for client in HTTP_CLIENTS:
        logging.getLogger(client).setLevel(logging.WARNING)
    for note in arguments.notes:
        logging.info(note)
    settings = []
    try:
        check_argument(command, arguments)
        for cls in command.settings:
            values = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(cls)}
            settings.append(cls(**values))
        if command.argument is not None:
            settings.insert(0, getattr(arguments, command.argument))
        with interrupts.handled(f"qserve {name}"):
            code = command.run(*settings)
        sys.stdout.flush()
        return code
    except (InputError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _lost_reader():
            return BROKEN_PIPE
        print(f"qserve {name}: {_message(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        message, code = interrupts.outcome(f"qserve {name}", error)
        print(message, file=sys.stderr)
        return code


def _lost_reader() -> bool:
    """Return True if the reader of stdout is gone, as with `| head`; then discard the output."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # Python flushes stdout again at exit
    return True


def _message(error: Exception) -> str:
    """Return the one-line message of an error, with the file's name for an OSError."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {one_line(error)}"
    return re.sub(r"`(\w+)`", lambda found: _flag(found[1]), str(error))


# Python argument -> flag, where the names differ.
FLAGS = {"kv_cache": "kv_cache_scheme", "output_format": "format"}


def _flag(argument: str) -> str:
    """Return the flag of a Python argument. Anything else stays in back quotes."""
    name = FLAGS.get(argument, argument)
    known = any(name == field.name for cls in TOOLS for field in dataclasses.fields(cls))
    return f"--{name.replace('_', '-')}" if known else f"`{argument}`"


TOOLS = (QuantizeConfig, ConvertConfig)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    parser = Parser(
        prog="qserve", description="Quantize a language model, verify the file, serve it."
    )
    parser.add_argument("--version", action="version", version=qserve.__version__)
    add_commands(parser, COMMANDS)
    return parser


def _with_config_file(argv: list[str]) -> list[str]:
    """Return the command-line arguments with those of the --config file. Raises InputError."""
    command, depth = COMMANDS.get(argv[0]) if argv else None, 1
    while command is not None and command.commands:
        command = command.commands.get(argv[depth]) if depth < len(argv) else None
        depth += 1
    if command is None or not command.has_config_file:
        return argv
    path, others = config_file.find(argv[depth:])
    if path is None:
        return argv
    settings = config_file.read(path)
    argument = settings.pop(command.argument, None)
    known = {
        field.name.replace("_", "-"): hints[field.name]
        for cls in command.settings
        for hints in [typing.get_type_hints(cls)]
        for field in dataclasses.fields(cls)
        if field.name != command.argument and not field.metadata["positional"]
    }
    # The file's settings come first: for a repeated flag the last value counts.
    vllm = [name for cls in command.settings for name in VLLM_SETTINGS.get(cls, ())]
    arguments = config_file.as_arguments(path, settings, known, vllm)
    # Positional arguments stay together, as the parser takes several only if no flag is in between.
    num_first = next((i for i, each in enumerate(others) if each.startswith("-")), len(others))
    if argument is not None and not num_first:
        listed = argument if isinstance(argument, list) else [argument]
        others = [*map(str, listed), *others]
        num_first = len(listed)
    num_first = max(num_first, 1)
    return [*argv[:depth], *others[:num_first], *arguments, *others[num_first:]]


if __name__ == "__main__":
    sys.exit(main())
