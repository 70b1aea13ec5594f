"""The command line: one table of commands, flags made from the settings. Loads torch only to work.

A command's flags are the fields of its settings classes (qserve/config.py).
"""

import argparse
import dataclasses
import json
import logging
import sys
import types
import typing
from collections.abc import Mapping

import qserve
from formats.errors import InputError
from qserve.bench.commands import BENCH_COMMANDS
from qserve.command import Command
from qserve.config import (
    ConvertConfig,
    EngineConfig,
    EvalConfig,
    GenerateConfig,
    InspectConfig,
    QuantizeConfig,
    ServerConfig,
)

SHORT_FLAGS = {"output": "-o"}


def quantize(model: str, config: QuantizeConfig) -> int:
    from calibrate.pipeline import quantize_checkpoint
    from calibrate.recipe import default_recipe
    from formats.plan import parse_override
    from formats.scheme import Scheme
    from formats.table import parse_size

    scheme = Scheme.parse(config.scheme, config.group_size)
    report = quantize_checkpoint(
        model,
        config.output,
        scheme=scheme,
        recipe=config.recipe or default_recipe(scheme),
        output_format=config.format,
        ignore=config.ignore,
        overrides=[parse_override(text) for text in config.override],
        pad=config.pad,
        max_shard_bytes=parse_size(config.max_shard_size),
        kv_cache=config.kv_cache_scheme,
        calibration=config.calibration,
        samples=config.samples,
        sequence_length=config.sequence_length,
        seed=config.seed,
        eval_text=config.eval_text,
        spill=config.spill,
        device=_device(config.device),
        quantizer=f"qserve-kit:{qserve.__version__}",
    )
    print(report.to_text())
    print(f"Wrote and verified {config.output}")
    return 0


def serve(model: str, engine: EngineConfig, server: ServerConfig) -> int:
    from qserve.server.app import serve as serve_http

    return serve_http(engine, server)


def generate(model: str, engine: EngineConfig, config: GenerateConfig) -> int:
    from qserve.llm import LLM
    from qserve.sampling_params import SamplingParams

    # Before the model: a number out of range should not show only after a long load.
    params = SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_tokens,
    )
    llm = LLM(**dataclasses.asdict(engine))
    if config.chat:
        message = {"role": "user", "content": config.prompt}
        output = llm.chat([message], params, use_tqdm=False)[0]
    else:
        output = llm.generate(config.prompt, params, use_tqdm=False)[0]
    print(output.outputs[0].text)
    return 0


def convert(model: str, config: ConvertConfig) -> int:
    from formats.convert import convert_checkpoint
    from formats.table import parse_size

    conversion = convert_checkpoint(
        model,
        config.output,
        config.format,
        max_shard_bytes=parse_size(config.max_shard_size),
        quantizer=f"qserve-kit:{qserve.__version__}",
    )
    print(conversion.to_text())
    return 0


def inspect(model: str, config: InspectConfig) -> int:
    from formats.inspect import inspect_checkpoint

    inspection = inspect_checkpoint(model)
    comparison = None
    if config.deep is not None and inspection.ok:
        from qserve.compare import compare_models

        comparison = compare_models(model, config.deep)
    elif config.deep is not None:
        print(f"Not compared with {config.deep}: mend the errors first", file=sys.stderr)
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


def evaluate(model: str, engine: EngineConfig, config: EvalConfig) -> int:
    from calibrate.evaluate import make_windows, perplexity, read_texts
    from qserve.llm import LLM

    texts = read_texts(config.text)
    llm = LLM(**dataclasses.asdict(engine))
    tokenizer = llm.get_tokenizer()
    windows = make_windows(
        texts,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        tokenizer.bos_token_id,
        config.sequence_length,
        config.windows,
        source=config.text,
    )
    result = perplexity(windows, lambda window: llm.logits(window.tolist()))
    if config.json:
        print(json.dumps({"model": model, "text": config.text, **dataclasses.asdict(result)}))
    else:
        print(
            f"perplexity {result.value:.4f} on {result.windows} windows"
            f" of {config.sequence_length} tokens"
        )
    return 0


COMMANDS: dict[str, Command] = {
    "quantize": Command(
        help="write a quantized copy of a float model",
        settings=(QuantizeConfig,),
        run=quantize,
    ),
    "serve": Command(
        help="serve a model behind an OpenAI-compatible endpoint",
        settings=(EngineConfig, ServerConfig),
        run=serve,
    ),
    "generate": Command(
        help="continue one prompt and print the text",
        settings=(EngineConfig, GenerateConfig),
        run=generate,
    ),
    "convert": Command(
        help="write a quantized checkpoint in another format, code for code",
        settings=(ConvertConfig,),
        run=convert,
    ),
    "inspect": Command(
        help="show what a checkpoint holds and what is wrong with it: reads all but integer codes",
        settings=(InspectConfig,),
        run=inspect,
    ),
    "eval": Command(
        help="measure perplexity on a text",
        settings=(EngineConfig, EvalConfig),
        run=evaluate,
    ),
    "bench": Command(
        help="measure latency, throughput, a server, steps and kernels; simulate a server",
        commands=BENCH_COMMANDS,
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command. A user's mistake is one line on stderr and exit code 1."""
    # Names of folders and tensors may hold what the terminal's encoding does not.
    sys.stdout.reconfigure(errors="backslashreplace")
    argv = sys.argv[1:] if argv is None else argv
    arguments = build_parser().parse_args([_with_dashes(argument) for argument in argv])
    name, command = arguments.command, COMMANDS[arguments.command]
    while command.commands:
        inner = getattr(arguments, f"{name} command")
        name, command = f"{name} {inner}", command.commands[inner]
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    settings = []
    try:
        _check_argument(command, arguments)
        for cls in command.settings:
            values = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(cls)}
            settings.append(cls(**values))
        if command.argument is None:
            return command.run(*settings)
        return command.run(getattr(arguments, command.argument), *settings)
    except (InputError, OSError) as error:
        print(f"qserve {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="qserve", description="Quantize a language model, prove the file right, serve it."
    )
    parser.add_argument("--version", action="version", version=qserve.__version__)
    _add_commands(parser, COMMANDS, "")
    return parser


def _add_commands(
    parser: argparse.ArgumentParser, commands: Mapping[str, Command], path: str
) -> None:
    """The rows of a table as subcommands; `path` names the commands above them."""
    dest = f"{path} command".strip()
    subparsers = parser.add_subparsers(dest=dest, required=True, metavar="COMMAND")
    for name, command in commands.items():
        sub = subparsers.add_parser(name, help=command.help, description=command.help.capitalize())
        if command.commands:
            _add_commands(sub, command.commands, f"{path} {name}".strip())
            continue
        if command.argument is not None:
            _add_argument(sub, command)
        for cls in command.settings:
            hints = typing.get_type_hints(cls)
            for field in dataclasses.fields(cls):
                if field.name != "model":
                    _add_flag(sub, field, hints[field.name])


def _add_argument(parser: argparse.ArgumentParser, command: Command) -> None:
    name, help_text = command.argument, command.argument_help
    if not command.argument_is_flag_too:
        parser.add_argument(name, metavar=name.upper(), help=help_text)
        return
    parser.add_argument(
        name, metavar=name.upper(), nargs="?", default=argparse.SUPPRESS, help=help_text
    )
    parser.add_argument(f"--{name}", help=f"the same as {name.upper()}")


def _check_argument(command: Command, arguments: argparse.Namespace) -> None:
    name = command.argument
    if name is None or command.argument_optional or getattr(arguments, name) is not None:
        return
    raise InputError(name.upper(), f"expected a {command.argument_help}", f"give it, or --{name}")


def _add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field, hint: object) -> None:
    if field.metadata["positional"]:
        parser.add_argument(
            field.name, metavar=field.name.upper(), type=hint, help=field.metadata["help"]
        )
        return
    names = [SHORT_FLAGS[field.name]] if field.name in SHORT_FLAGS else []
    names.append("--" + field.name.replace("_", "-"))
    help_text = field.metadata["help"]
    if hint is bool:
        parser.add_argument(*names, action="store_true", help=help_text)
        return
    if typing.get_origin(hint) is list:
        several = {"action": "extend", "nargs": "+"} if field.metadata["several"] else {}
        several = several or {"action": "append"}
        parser.add_argument(*names, **several, default=[], help=help_text)
        return
    required = field.default is dataclasses.MISSING
    if not required and field.default is not None:
        help_text += " (default: %(default)s)"
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    parser.add_argument(
        *names,
        type=hint,
        required=required,
        default=None if required else field.default,
        choices=field.metadata["choices"],
        help=help_text,
    )


def _with_dashes(argument: str) -> str:
    """--max_model_len and --max-model-len are the same flag."""
    flag, equals, value = argument.partition("=")
    # Text, such as a prompt, may begin with dashes too; the name of a flag has no spaces.
    if not flag.startswith("--") or len(flag.split()) != 1:
        return argument
    return flag.replace("_", "-") + equals + value


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    sys.exit(main())
