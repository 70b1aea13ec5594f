"""The command line: one table of commands, flags made from the settings. Loads torch only to work.

A command's flags are the fields of its settings classes (qserve/config.py).
"""

import argparse
import dataclasses
import json
import logging
import sys
import typing
from pathlib import Path

import qserve
from formats.errors import InputError, one_line
from qserve import config_file, interrupts, logs
from qserve.arguments import Parser, add_commands, check_argument, with_dashes
from qserve.bench.commands import BENCH_COMMANDS, PROFILE
from qserve.command import Command
from qserve.config import EngineConfig, ServerConfig
from qserve.deploy.settings import DeploySettings
from qserve.lora.command import MERGE
from qserve.tool_config import (
    BatchConfig,
    ConvertConfig,
    EvalConfig,
    GenerateConfig,
    InspectConfig,
    QuantizeConfig,
    TalkConfig,
)


def quantize(model: str, config: QuantizeConfig) -> int:
    from calibrate.devices import Devices
    from calibrate.heads.quantize import quantize_head
    from calibrate.pipeline import quantize_checkpoint
    from calibrate.recipe import default_recipe
    from formats.heads.folder import is_head_folder
    from formats.plan import parse_override
    from formats.scheme import Scheme
    from formats.table import parse_size

    config = _with_recipe_file(config)
    scheme = Scheme.parse(config.scheme, config.group_size)
    settings = {
        "scheme": scheme,
        "recipe": config.recipe,
        "output_format": config.format,
        "ignore": config.ignore,
        "overrides": [parse_override(text) for text in config.override],
        "calibration": config.calibration,
        "samples": config.samples,
        "sequence_length": config.sequence_length,
        "seed": config.seed,
        "device": _device(config.device),
        "quantizer": f"qserve-kit:{qserve.__version__}",
    }
    if is_head_folder(model):
        if len(Devices.parse(settings["device"]).names) > 1:
            raise InputError("--device", f"{model} is a draft head, for one device", "name one")
        for name in NOT_OF_A_HEAD:
            if getattr(config, name):
                flag = "--" + name.replace("_", "-")
                raise InputError(flag, f"{model} is a draft head", "leave it out")
        report = quantize_head(model, config.output, target=config.target, **settings)
    elif config.target is not None:
        raise InputError("--target", f"{model} is no draft head", "leave it out")
    else:
        settings["recipe"] = config.recipe or default_recipe(scheme)
        report = quantize_checkpoint(
            model,
            config.output,
            bits=config.bits,
            pad=config.pad,
            act_order=config.act_order,
            max_shard_bytes=parse_size(config.max_shard_size),
            kv_cache=config.kv_cache_scheme,
            adapter=config.adapter,
            kv_per_head=config.kv_per_head,
            eval_text=config.eval_text,
            spill=config.spill,
            settings=_recipe_settings(config),
            **settings,
        )
    print(report.to_text())
    print(f"Wrote and verified {config.output}")
    return 0


# settings of `quantize` for models alone
NOT_OF_A_HEAD = ("act_order", "bits", "pad", "kv_cache_scheme", "kv_per_head", "eval_text", "spill")
NOT_IN_A_RECIPE = ("output", "config", "device")  # of the machine, not of the result


def _recipe_settings(config: QuantizeConfig) -> dict[str, object]:
    """The settings that a recipe file holds."""
    values = dataclasses.asdict(config)
    return {name: value for name, value in values.items() if name not in NOT_IN_A_RECIPE}


def _with_recipe_file(config: QuantizeConfig) -> QuantizeConfig:
    """The settings of --config where no flag gives them. Raises InputError."""
    if config.config is None:
        return config
    import yaml

    try:
        with open(config.config, encoding="utf-8") as file:
            stated = yaml.safe_load(file)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(config.config, f"is no YAML file: {one_line(error)}") from None
    fields = {each.name: each for each in dataclasses.fields(QuantizeConfig)}
    known = fields.keys() - set(NOT_IN_A_RECIPE)
    if not isinstance(stated, dict) or not stated.keys() <= known:
        found = sorted(map(str, stated.keys() - known)) if isinstance(stated, dict) else stated
        raise InputError(
            config.config, f"expected settings such as scheme and recipe, found {found!r:.200}"
        )
    hints = typing.get_type_hints(QuantizeConfig)
    taken = {}
    for name, value in stated.items():
        default = [] if typing.get_origin(hints[name]) is list else fields[name].default
        if getattr(config, name) != default:
            continue
        if not _is_of(value, hints[name]):
            raise InputError(f"{config.config}: {name}", f"expected {hints[name]}, found {value!r}")
        taken[name] = value
    return dataclasses.replace(config, **taken)


def _is_of(value: object, hint: object) -> bool:
    """Is a value of a YAML file what a setting holds?"""
    if typing.get_origin(hint) is list:
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    kinds = typing.get_args(hint) or (hint,)
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (isinstance(value, int) and float in kinds)


def serve(model: str, engine: EngineConfig, server: ServerConfig, replicas: DeploySettings) -> int:
    if replicas.backend == "ray":
        try:
            import ray  # noqa: F401
        except ImportError:
            raise InputError(
                "--backend ray", "needs Ray Serve", "pip install 'qserve-kit[ray]'"
            ) from None
        from qserve.deploy.ray_app import serve_on_ray

        return serve_on_ray(engine, server, replicas)
    from qserve.server.app import serve as serve_http

    return serve_http(engine, server)


def chat(config: TalkConfig) -> int:
    from qserve import talk

    return talk.chat(config)


def complete(config: TalkConfig) -> int:
    from qserve import talk

    return talk.complete(config)


def run_batch(model: str, engine: EngineConfig, config: BatchConfig) -> int:
    from qserve.run_batch import run_batch as run

    return run(engine, config)


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
    from formats.heads.folder import is_head_folder
    from formats.heads.inspect import inspect_head
    from formats.inspect import inspect_checkpoint

    is_head = is_head_folder(model)
    if config.deep is not None and not Path(config.deep).is_dir():
        raise InputError(config.deep, "is not a folder", "give the float model's folder")
    if is_head and config.deep is not None:
        raise InputError("--deep", f"{model} is a draft head, which says nothing alone", "leave it")
    inspection = inspect_head(model) if is_head else inspect_checkpoint(model)
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
    from qserve.text import Tokenizer

    # Before the model, as far as it goes: loading that may take minutes.
    texts, tokenizer = read_texts(config.text), Tokenizer(model)
    windows = make_windows(
        texts,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        tokenizer.bos_token_id,
        config.sequence_length,
        config.windows,
        source=config.text,
    )
    llm = LLM(**dataclasses.asdict(engine))
    if config.sequence_length > llm.engine.max_model_len:
        raise InputError(
            "--sequence-length",
            f"expected at most {llm.engine.max_model_len}, the model's length,"
            f" found {config.sequence_length}",
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
        settings=(EngineConfig, ServerConfig, DeploySettings),
        run=serve,
    ),
    "chat": Command(
        help="talk to the model of a running server",
        settings=(TalkConfig,),
        run=chat,
        argument=None,
    ),
    "complete": Command(
        help="let the model of a running server continue texts",
        settings=(TalkConfig,),
        run=complete,
        argument=None,
    ),
    "run-batch": Command(
        help="answer the requests of a file, without a server",
        settings=(EngineConfig, BatchConfig),
        run=run_batch,
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
    "merge": MERGE,
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
    "profile": PROFILE,
}


def main(argv: list[str] | None = None) -> int:
    """Run one command. A user's mistake is one line on stderr and exit code 1."""
    # Names of folders and tensors may hold what the terminal's encoding does not.
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
    settings = []
    try:
        check_argument(command, arguments)
        for cls in command.settings:
            values = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(cls)}
            settings.append(cls(**values))
        if command.argument is not None:
            settings.insert(0, getattr(arguments, command.argument))
        with interrupts.end_while_importing():
            return command.run(*settings)
    except (InputError, OSError) as error:
        print(f"qserve {name}: {_message(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _message(error: Exception) -> str:
    """What an error says, in one line that names the file."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {one_line(error)}"
    return str(error)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = Parser(
        prog="qserve", description="Quantize a language model, prove the file right, serve it."
    )
    parser.add_argument("--version", action="version", version=qserve.__version__)
    add_commands(parser, COMMANDS)
    return parser


def _with_config_file(argv: list[str]) -> list[str]:
    """The arguments with those of the file that --config names. Raises InputError."""
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
        field.name.replace("_", "-"): hints[field.name] is bool
        for cls in command.settings
        for hints in [typing.get_type_hints(cls)]
        for field in dataclasses.fields(cls)
        if field.name != command.argument and not field.metadata["positional"]
    }
    # The file's come first: what is given twice counts as given last.
    arguments = config_file.as_arguments(path, settings, known)
    has_argument = bool(others) and not others[0].startswith("-")
    if argument is not None and not has_argument:
        others = [str(argument), *others]
    return [*argv[:depth], *others[:1], *arguments, *others[1:]]


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    sys.exit(main())
