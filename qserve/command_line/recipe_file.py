"""Recipe files: the settings of `qserve quantize` as YAML."""

import dataclasses
import typing

from formats.errors import InputError, one_line
from qserve.command_line.tool_config import QuantizeConfig
from qserve.hub.settings import HubSettings

# Settings of the machine, which are not part of a recipe
NOT_IN_A_RECIPE = ("output", "config", "device", "download_dir")


def recipe_settings(config: HubSettings) -> dict[str, object]:
    """Return the settings of `quantize` or `distill` that are recorded with the result."""
    values = dataclasses.asdict(config)
    return {name: value for name, value in values.items() if name not in NOT_IN_A_RECIPE}


def with_recipe_file(config: QuantizeConfig) -> QuantizeConfig:
    """Fill in the settings of the --config file where no flag was given. Raises InputError."""
    if config.config is None:
        return config
    import yaml

    try:
        with open(config.config, encoding="utf-8") as file:
            stated = yaml.safe_load(file)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(
            config.config, f"is not valid YAML: {one_line(error)}", "repair the line that it names"
        ) from None
    fields = {each.name: each for each in dataclasses.fields(QuantizeConfig)}
    known = fields.keys() - set(NOT_IN_A_RECIPE)
    if not isinstance(stated, dict) or not stated.keys() <= known:
        found = sorted(map(str, stated.keys() - known)) if isinstance(stated, dict) else stated
        raise InputError(
            config.config,
            f"expected a mapping of settings such as scheme and recipe, found {found!r:.200}",
            "write one `name: value` a line",
        )
    hints = typing.get_type_hints(QuantizeConfig)
    taken = {}
    for name, value in stated.items():
        default = [] if typing.get_origin(hints[name]) is list else fields[name].default
        if getattr(config, name) != default:
            continue
        if not _is_of(value, hints[name]):
            raise InputError(
                f"{config.config}: {name}",
                f"expected {hints[name]}, found {value!r}",
                "`qserve quantize --help` describes the setting",
            )
        taken[name] = value
    return dataclasses.replace(config, **taken)


def _is_of(value: object, hint: object) -> bool:
    """Return True if a value from a YAML file has the setting's type."""
    if typing.get_origin(hint) is list:
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    kinds = typing.get_args(hint) or (hint,)
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (isinstance(value, int) and float in kinds)
