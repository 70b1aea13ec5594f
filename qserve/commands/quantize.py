"""`qserve quantize`: write a quantized copy of a float model, or of a draft head."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import qserve
from formats.errors import InputError
from formats.names import AUTO_GROUPS, GGUF, GGUF_TYPES
from qserve.command_line.command import Command
from qserve.command_line.recipe_file import recipe_settings, with_recipe_file
from qserve.command_line.tool_config import QuantizeConfig


def quantize(model: str, config: QuantizeConfig) -> int:
    from formats.files.target import check_is_free
    from formats.gguf.writing.container_writer import check_file_is_free
    from formats.heads.folder import is_head_folder
    from formats.hub.fetch import local_path
    from formats.hub.selection import DRAFTER, MODEL
    from formats.table import parse_size
    from qserve.model.fallback.quantize import has_no_row

    config = with_recipe_file(config)
    asked = _QuantizeRequest.of(config)
    parse_size(config.max_shard_size)  # raises before a model is fetched
    (check_file_is_free if asked.is_gguf else check_is_free)(config.output)
    model = local_path(
        model,
        MODEL if config.target is None else DRAFTER,
        revision=config.revision,
        subfolder=config.subfolder,
        download_dir=config.download_dir,
    )
    is_head = is_head_folder(model)
    if is_head:
        report = _quantize_head(model, config, asked)
    elif config.target is not None:
        raise InputError("--target", f"{model} is not a draft head", "remove it")
    elif has_no_row(model):
        report = _quantize_fallback(model, config, asked)
    else:
        report = _quantize_model(model, config, asked)
    _print_result(report, config.output, is_head)
    return 0


def _print_result(report: Any, output: str, is_head: bool) -> None:
    """Print the report, the file with its plots, and the command that comes next."""
    from calibrate.results.report_html import REPORT_HTML

    print(report.to_text())
    print(f"Wrote and verified {output}")
    plots = Path(output) / REPORT_HTML
    if plots.exists():
        print(f"Plots of the errors: {plots}")
    if not is_head:
        print(f"To serve it: qserve serve {shlex.quote(output)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _QuantizeRequest:
    """Requested scheme and format, and arguments that apply to models and heads alike."""

    scheme: Any  # Scheme, or the name of a GGUF type
    is_gguf: bool
    fit_groups: bool | None  # as in quantize_checkpoint
    arguments: dict[str, Any]  # keyword arguments of quantize_checkpoint

    @classmethod
    def of(cls, config: QuantizeConfig) -> "_QuantizeRequest":
        """Read the flags. Raises InputError for flags that exclude each other."""
        from formats.plan import parse_override
        from formats.scheme import SCHEMES, Scheme

        is_auto = config.group_size == AUTO_GROUPS
        is_type = config.scheme in GGUF_TYPES
        is_gguf = config.format == GGUF or (is_type and config.format is None)
        if is_type and not is_gguf:
            raise InputError(
                f"--scheme {config.scheme}", "is a type of GGUF files", "add --format gguf"
            )
        if is_type and config.group_size is not None and not is_auto:
            raise InputError("--group-size", f"blocks of {config.scheme} are fixed", "remove it")
        scheme = config.scheme
        if not is_type and re.match(r"i?q\d", scheme.lower()):  # of llama.cpp, such as Q4_K_M
            is_case = scheme.lower() in GGUF_TYPES
            remedy = f"use {scheme.lower()}" if is_case else f"known: {', '.join(GGUF_TYPES)}"
            problem = "is no type of GGUF files that is written"
            raise InputError(f"--scheme {scheme}", problem, remedy)
        if not is_type:
            scheme = Scheme.parse(scheme, None if is_auto else config.group_size)
        if is_auto and config.scheme not in SCHEMES:
            raise InputError(
                "--group-size", f"the scheme {config.scheme} already sets it", "set one of them"
            )
        is_unstated = config.group_size is None and config.scheme in SCHEMES
        return cls(
            scheme=scheme,
            is_gguf=is_gguf,
            fit_groups=None if is_unstated else is_auto,
            arguments={
                "scheme": scheme,
                "recipe": config.recipe,
                "output_format": None if is_gguf else config.format,
                "ignore": config.ignore,
                "overrides": [parse_override(text) for text in config.override],
                "calibration": config.calibration,
                "samples": config.samples,
                "sequence_length": config.sequence_length,
                "seed": config.seed,
                "bos": config.bos,
                "device": device_of(config.device),
                "quantizer": f"qserve-kit:{qserve.__version__}",
            },
        )


def _quantize_model(model: Any, config: QuantizeConfig, asked: _QuantizeRequest) -> Any:
    """Quantize a model of a listed family."""
    from calibrate.gguf_file import quantize_to_gguf
    from calibrate.pipeline import quantize_checkpoint
    from calibrate.recipe import default_recipe
    from formats.gguf.schemes import base_scheme
    from formats.hub.fetch import local_path
    from formats.hub.selection import ADAPTER
    from formats.table import parse_size
    from qserve.multimodal.calibration import CalibrationChats

    is_type = asked.scheme in GGUF_TYPES
    # GGUF files have no channel factors, by which adapters are made to fit
    keeps_inputs = asked.is_gguf or config.adapter is not None
    scheme = base_scheme(asked.scheme) if is_type else asked.scheme
    usual = default_recipe(scheme, keeps_inputs=keeps_inputs)
    adapter = config.adapter and local_path(
        config.adapter, ADAPTER, download_dir=config.download_dir
    )
    return (quantize_to_gguf if asked.is_gguf else quantize_checkpoint)(
        model,
        config.output,
        **asked.arguments | {"recipe": config.recipe or usual},
        bits=config.bits,
        pad=config.pad,
        fit_groups=asked.fit_groups,
        quantize_head=_outer_scheme(config.quantize_head, config.group_size),
        quantize_embedding=_outer_scheme(config.quantize_embedding, config.group_size),
        act_order=config.act_order,
        max_shard_bytes=parse_size(config.max_shard_size),
        kv_cache=config.kv_cache_scheme,
        kv_per_head=config.kv_per_head,
        adapter=adapter,
        moe_calibrate_all_experts=config.moe_calibrate_all_experts,
        eval_text=config.eval_text,
        quality_windows=config.quality_windows,
        spill=config.spill,
        settings=recipe_settings(config),
        chats=CalibrationChats(model),
    )


def _quantize_head(model: Any, config: QuantizeConfig, asked: _QuantizeRequest) -> Any:
    """Quantize a draft head. Raises InputError for flags that apply to models only."""
    from calibrate.devices import Devices
    from calibrate.heads.quantize import quantize_head
    from formats.hub.fetch import local_path
    from qserve.multimodal.calibration import CalibrationChats

    if len(Devices.parse(asked.arguments["device"]).names) > 1:
        raise InputError(
            "--device", f"{model} is a draft head, which is quantized on one device", "name one"
        )
    if asked.fit_groups:
        raise InputError("--group-size", f"{model} is a draft head", "give a number")
    if asked.is_gguf:
        raise InputError("--format gguf", f"{model} is a draft head", "write another format")
    for name in NOT_OF_A_HEAD:
        if getattr(config, name):
            flag = "--" + name.replace("_", "-")
            raise InputError(flag, f"{model} is a draft head", "remove it")
    target = config.target and local_path(config.target, download_dir=config.download_dir)
    chats = None if target is None else CalibrationChats(target)
    return quantize_head(model, config.output, target=target, chats=chats, **asked.arguments)


def _quantize_fallback(model: Any, config: QuantizeConfig, asked: _QuantizeRequest) -> Any:
    """Quantize a model that runs through transformers. Raises InputError for unsupported flags."""
    from qserve.model.fallback.quantize import check_settings, quantize_fallback

    recipe = ""
    if not (asked.is_gguf or asked.fit_groups):
        recipe = config.recipe or _default_recipe(asked.scheme)
    given = [name for name in (*NOT_OF_A_HEAD, "override", "adapter") if getattr(config, name)]
    check_settings(model, recipe, given)
    own = {name: asked.arguments[name] for name in ("output_format", "ignore", "quantizer")}
    solve = None if recipe == "rtn" else _solver(model, asked.scheme, asked.arguments)
    return quantize_fallback(model, config.output, asked.scheme, solve=solve, **own)


def _outer_scheme(text: str | None, group_size: int | str | None) -> Any:
    """Parse the scheme of --quantize-head. If it names no group size, --group-size applies."""
    from formats.scheme import SCHEMES, Scheme

    if text is None:
        return None
    return Scheme.parse(text, group_size if text in SCHEMES and group_size != AUTO_GROUPS else None)


def _default_recipe(scheme: Any) -> str:
    """Return the default recipe of a model that runs through transformers."""
    from formats.scheme import FP4_TYPES

    weight = scheme.weight
    return "gptq" if weight.type in ("int", *FP4_TYPES) and weight.bits <= 4 else "rtn"


def _solver(folder: str, scheme: Any, settings: Mapping[str, Any]) -> Any:
    """Return a function that quantizes the linears of a transformers model by GPTQ."""
    from transformers import AutoTokenizer

    from calibrate.any_decoder import solve_layers
    from calibrate.devices import Devices
    from calibrate.recipe import check_makes, find_recipe
    from calibrate.texts.data import read_calibration

    check_makes(find_recipe("gptq"), [scheme])
    devices = Devices.parse(settings["device"])
    if len(devices.names) > 1:
        raise InputError(
            "--device",
            f"{folder} runs through transformers, and is quantized on one device",
            "name one",
        )
    names = ("samples", "sequence_length", "seed", "bos")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def solve(model: Any, linears: Sequence[str]) -> dict[str, Any]:
        own = {name: settings[name] for name in names}
        longest = getattr(model.config, "max_position_embeddings", None)
        own["sequence_length"] = min(own["sequence_length"], longest or own["sequence_length"])
        data = read_calibration(settings["calibration"], tokenizer, **own)
        return solve_layers(
            model, linears, data.ids_WS, scheme.weight, device=devices.first, subject=folder
        )

    return solve


# Settings of `quantize` that apply to models only, not to draft heads.
NOT_OF_A_HEAD = (
    *("act_order", "bits", "pad", "kv_cache_scheme", "kv_per_head", "eval_text", "spill"),
    *("moe_calibrate_all_experts", "quantize_head", "quantize_embedding"),
)


def device_of(name: str) -> str:
    """Return the device of a --device flag. "auto" means the GPU if there is one, else the CPU."""
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


QUANTIZE = Command(
    help="write a quantized copy of a float model",
    settings=(QuantizeConfig,),
    run=quantize,
)
