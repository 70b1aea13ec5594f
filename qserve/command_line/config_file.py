"""Read flags from a file with `--config FILE`. Loads no torch.

The file's extension selects TOML, JSON or YAML (default). A key is a flag's name, with dashes or
underscores. The command line takes precedence.
"""

import json
import tomllib
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any

from formats.errors import InputError, one_line
from qserve.command_line.unknown_flags import nearest

FLAG = "--config"


def find(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Return the path after --config (or None) and the other arguments. Raises InputError."""
    path, others, rest = None, [], iter(arguments)
    for argument in rest:
        if argument == FLAG:
            path = next(rest, None)
            if path is None:
                raise InputError(FLAG, "expected a file", "add its path after the flag")
        elif argument.startswith(f"{FLAG}="):
            path = argument.partition("=")[2]
        else:
            others.append(argument)
    return path, others


def read(path: str) -> dict[str, Any]:
    """Read the settings of a file; names get dashes for underscores. Raises InputError."""
    return {name.replace("_", "-"): value for name, value in read_mapping(path).items()}


def read_mapping(path: str) -> dict[str, Any]:
    """Read a file that has a mapping with string keys. Raises InputError."""
    try:
        found = _parse(Path(path), Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(
            path, f"cannot be read: {error.strerror}", "choose another file"
        ) from error
    except Exception as error:  # each of the three parsers raises its own types
        raise InputError(
            path, f"cannot be read: {one_line(error)}", "correct the line that it names"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise InputError(
            path, "expected a mapping of flags to values", "write lines such as `max-num-seqs: 64`"
        )
    return found


def as_arguments(
    path: str,
    settings: dict[str, Any],
    known: dict[str, Any],
    vllm_settings: Collection[str] = (),
) -> list[str]:
    """Convert settings to command-line arguments. Raises InputError for a setting without a flag.

    `path`: the file, for errors. `known`: maps the name of each flag to its type.
    `vllm_settings`: names with underscores of vLLM's settings, which the parser checks.
    """
    arguments = []
    for name, value in settings.items():
        if name not in known and name.replace("-", "_") in vllm_settings:
            switches = {True: [f"--{name}"], False: [f"--no-{name}"], None: []}
            text = value if isinstance(value, str) else json.dumps(value)
            is_switch = value is None or isinstance(value, bool)
            arguments += switches[value] if is_switch else [f"--{name}={text}"]
            continue
        if name not in known:
            like = nearest(name, known)
            remedy = "see --help" if like is None else f"did you mean {like}?"
            raise InputError(path, f"{name} is not a setting of this command", remedy)
        if known[name] is bool:
            if not isinstance(value, bool):
                raise InputError(
                    path,
                    f"{name}: expected true or false, found {value!r}",
                    "write true or false without quotes",
                )
            arguments += [f"--{name}"] * value
            continue
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        if isinstance(value, list) and typing.get_origin(known[name]) is not list:
            raise InputError(
                path,
                f"{name}: expected one value, found {value!r:.100}",
                "write one scalar after the colon",
            )
        takes_text = _takes_text(known[name])
        if any(isinstance(each, list | bool) or each is None for each in values) or (
            not takes_text and any(isinstance(each, dict) for each in values)
        ):
            raise InputError(
                path,
                f"{name}: expected a string or a number, found {value!r:.100}",
                "put a string in quotes" if takes_text else "see --help",
            )
        arguments += [f"--{name}={_text(path, name, each)}" for each in values]
    return arguments


def _takes_text(hint: Any) -> bool:
    """Return True if a setting's type is a string, or a list of strings, with None or without."""
    return hint is str or any(_takes_text(each) for each in typing.get_args(hint))


def _text(path: str, name: str, value: Any) -> str:
    """Return a value as a flag takes it: a mapping as JSON. Raises InputError."""
    if not isinstance(value, dict):
        return str(value)
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(path, f"{name}: {one_line(error)}", "use JSON's types") from None


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        return tomllib.loads(text)
    if path.suffix == ".json":
        return json.loads(text)
    import yaml  # installed with transformers

    return yaml.safe_load(text)
