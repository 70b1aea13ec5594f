"""Build an argparse parser for a table of commands, with flags made from settings classes.

A command's flags are the fields of its settings classes (qserve/config.py). This module loads no
torch.
"""

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from formats.errors import InputError
from qserve.command_line import config_file
from qserve.command_line.command import Command
from qserve.command_line.unknown_flags import unknown_arguments
from qserve.command_line.vllm_settings import (
    ENGINE_SETTINGS,
    SERVER_SETTINGS,
    VllmSetting,
    take_flags,
)
from qserve.config import EngineConfig, ServerConfig
from qserve.deploy.settings import DeploySettings

SHORT_FLAGS = {
    "output": "-o",
    "input": "-i",
    "quick": "-q",
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "quantization": "-q",
}
# Settings classes that are listed under a heading of their own in the help, after the command's
# other flags
SECTIONS = {
    ServerConfig: "the server",
    EngineConfig: "the engine",
    DeploySettings: "replicas",
}

# Settings class -> vLLM's flags that change nothing for commands with these settings
VLLM_SETTINGS = {EngineConfig: ENGINE_SETTINGS, ServerConfig: SERVER_SETTINGS}


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one line, because a usage with eighty flags would hide the error."""

    def __init__(self, *args: typing.Any, **settings: typing.Any) -> None:
        super().__init__(*args, **settings)
        self.arguments_or_flags: list[str] = []
        self.vllm_settings: dict[str, VllmSetting] = {}

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments; also accept an optional positional after a flag, unlike Python 3.11.

        Flags of vLLM that change nothing are accepted; `notes` in the result names them.
        """
        notes: list[str] = []
        if args is not None and self.vllm_settings:
            try:
                args, notes = take_flags(list(args), self.vllm_settings)
            except InputError as error:
                self.error(str(error))
        found, left = super().parse_known_args(args, namespace)
        found.notes = notes + getattr(found, "notes", [])
        for name in self.arguments_or_flags:
            if left and not left[0].startswith("-") and getattr(found, name) is None:
                setattr(found, name, left.pop(0))
        if left:  # argparse would name neither the command nor a remedy
            self.error(unknown_arguments(left, self._option_string_actions))
        return found, left

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def add_commands(
    parser: argparse.ArgumentParser, commands: Mapping[str, Command], path: str = ""
) -> None:
    """Add the rows of a table as subcommands. `path`: names of the commands above them."""
    dest = f"{path} command".strip()
    subparsers = parser.add_subparsers(
        dest=dest, required=True, metavar="COMMAND", help="one of the following"
    )
    for name, command in commands.items():
        text = command.help
        sub = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:])
        if command.commands:
            add_commands(sub, command.commands, f"{path} {name}".strip())
            continue
        if command.argument is not None:
            _add_argument(sub, command)
        if command.has_config_file:
            sub.add_argument(
                config_file.FLAG,
                metavar="FILE",
                help="YAML, TOML or JSON file with this command's flags; the command line takes "
                "precedence",
            )
        added = {"model"}
        for cls in sorted(command.settings, key=_section):
            group = sub.add_argument_group(SECTIONS[cls]) if cls in SECTIONS else sub
            hints = typing.get_type_hints(cls)
            for field in dataclasses.fields(cls):
                if field.name not in added:  # classes may share a setting, such as tokenizer
                    added.add(field.name)
                    _add_flag(group, field, hints[field.name])
                    if _is_argument_or_flag(field):
                        sub.arguments_or_flags.append(field.name)
        rows = {n: row for cls in command.settings for n, row in VLLM_SETTINGS.get(cls, {}).items()}
        sub.vllm_settings = {name: row for name, row in rows.items() if name not in added}
        sub.usage = _usage(sub)


def check_argument(command: Command, arguments: argparse.Namespace) -> None:
    """Raise InputError if a required argument is given neither as positional nor as flag."""
    for cls in command.settings:
        for field in dataclasses.fields(cls):
            if _is_argument_or_flag(field) and getattr(arguments, field.name) is None:
                remedy = f"add it, or {'/'.join(_flag_names(field))}"
                raise InputError(field.name.upper(), "is missing", remedy)
    name = command.argument
    if name is None or command.argument_optional or getattr(arguments, name) is not None:
        return
    raise InputError(name.upper(), f"expected a {command.argument_help}", f"add it, or --{name}")


def with_dashes(argument: str) -> str:
    """Replace underscores in a flag's name by dashes: --max_model_len becomes --max-model-len."""
    flag, equals, value = argument.partition("=")
    # Not a value that starts with dashes, such as a prompt: a flag's name has no spaces.
    if not flag.startswith("--") or len(flag.split()) != 1:
        return argument
    return flag.replace("_", "-") + equals + value


def parse_settings(
    source: str,
    settings: Mapping[str, Any],
    fields: Mapping[str, dataclasses.Field],
    classes: Sequence[type],
) -> dict[str, Any]:
    """Convert settings from a file to the types of their flags. Raises InputError.

    `source`: name of the file, for errors. `fields`: the fields of `classes` that may be set.
    """
    hints = {name: hint for cls in classes for name, hint in typing.get_type_hints(cls).items()}
    named = {name.replace("_", "-"): value for name, value in settings.items()}
    known = {name.replace("_", "-"): hints[name] for name in fields}
    parser = _FileParser(source)
    for name in fields:
        _add_flag(parser, fields[name], hints[name])
    found = vars(parser.parse_args(config_file.as_arguments(source, named, known)))
    return {name: found[name] for name in fields if name.replace("_", "-") in named}


class _FileParser(argparse.ArgumentParser):
    """Parser for the settings in a file, whose errors are InputErrors."""

    def __init__(self, source: str) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self._source = source

    def error(self, message: str) -> NoReturn:
        raise InputError(
            self._source, message.removeprefix("argument "), "correct this setting in the file"
        )


# Suffixes of integers, as in vLLM: 4k is 4,000, 4K is 4,096.
SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def _integer(text: str) -> int:
    """Parse an integer, which may have a suffix such as k (1,000) or K (1,024)."""
    if text[-1:] not in SUFFIXES:
        return int(text)
    number = float(text[:-1]) * SUFFIXES[text[-1]]
    if not number.is_integer():
        raise ValueError
    return int(number)


_integer.__name__ = "int"  # argparse's errors show the name


def _integer_or(texts: Collection[str]) -> Callable[[str], int | str]:
    """Return a parser of integers that keeps certain texts as they are."""

    def parse(text: str) -> int | str:
        return text if text in texts else _integer(text)

    parse.__name__ = _integer.__name__
    return parse


def _number_or_text(text: str) -> int | str:
    """Parse a flag's value as an integer if possible, else as text."""
    return int(text) if text.removeprefix("-").isdecimal() else text


def _section(cls: type) -> int:
    """Position of a settings class in the help: the command's own settings come first."""
    return [*SECTIONS].index(cls) if cls in SECTIONS else -1


def _usage(parser: argparse.ArgumentParser) -> str:
    """Return a usage line with only the required arguments and flags."""
    parts = [parser.prog]
    for action in parser._actions:
        if not action.option_strings:
            optional = {"?": f"[{action.metavar}]", "*": f"[{action.metavar} ...]"}
            parts.append(optional.get(action.nargs, action.metavar))
        elif action.required:
            parts.append(f"{action.option_strings[0]} {action.dest.upper()}")
    return " ".join([*parts, "[options]"])


def _add_argument(parser: argparse.ArgumentParser, command: Command) -> None:
    name, help_text = command.argument, command.argument_help
    if not command.argument_is_flag_too:
        parser.add_argument(name, metavar=name.upper(), help=help_text)
        return
    parser.add_argument(
        name, metavar=name.upper(), nargs="?", default=argparse.SUPPRESS, help=help_text
    )
    parser.add_argument(f"--{name}", help=f"alias of {name.upper()}")


def _flag_names(field: dataclasses.Field) -> list[str]:
    """Return the short flag of a setting, if it has one, and the long flag."""
    short = [SHORT_FLAGS[field.name]] if field.name in SHORT_FLAGS else []
    return [*short, "--" + field.name.replace("_", "-")]


def _is_argument_or_flag(field: dataclasses.Field) -> bool:
    """Return True for a positional setting that may also be given as a flag."""
    return bool(field.metadata.get("positional")) and field.name in SHORT_FLAGS


def _add_flag(parser: argparse._ActionsContainer, field: dataclasses.Field, hint: object) -> None:
    names = _flag_names(field)
    if field.metadata["positional"]:
        metavar, help_text = field.name.upper(), field.metadata["help"]
        either = _is_argument_or_flag(field)
        options: dict[str, Any] = {"type": hint}
        if typing.get_origin(hint) is list:
            options = {"nargs": "*", "default": []}
        elif either:
            options |= {"nargs": "?", "default": argparse.SUPPRESS}
        parser.add_argument(field.name, metavar=metavar, help=help_text, **options)
        if either:
            parser.add_argument(*names, type=hint, help=f"alias of {metavar}")
        return
    help_text = field.metadata["help"]
    if hint is bool:
        # A flag that is on by default needs a --no- form.
        action = argparse.BooleanOptionalAction if field.default else "store_true"
        help_text += " (default: on)" if field.default else ""
        parser.add_argument(*names, action=action, default=field.default, help=help_text)
        return
    if typing.get_origin(hint) is list:
        options = {"action": "append", "default": [], "help": help_text}
        options |= {"action": "extend", "nargs": "+"} if field.metadata["many"] else {}
        options["required"] = field.default_factory is dataclasses.MISSING
        parser.add_argument(*names, **options)
        return
    required = field.default is dataclasses.MISSING
    aliases, choices = field.metadata["aliases"], field.metadata["choices"]
    if not required and field.default not in (None, ""):
        help_text += " (default: %(default)s)"
    if isinstance(hint, types.UnionType):
        kinds = typing.get_args(hint)
        both = int in kinds and str in kinds
        hint = _number_or_text if both else next(k for k in kinds if k is not type(None))
    if hint is int:
        hint = _integer_or(aliases) if aliases else _integer
    parser.add_argument(
        *names,
        type=hint,
        required=required,
        default=None if required else field.default,
        choices=choices and (*choices, *aliases),
        help=help_text,
    )
