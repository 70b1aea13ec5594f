"""Replace hub names in settings with local paths, after downloading the files.

The process that starts an engine calls these functions, once. The engine, its ranks and its workers
receive the local paths.
"""

import dataclasses
import json
from pathlib import Path

from formats.errors import InputError
from formats.hub.fetch import local_path
from formats.hub.name import HubName, is_local
from formats.hub.selection import ADAPTER, DRAFTER, MODEL, SHAPES, TOKENIZER, Kind
from qserve.config import EngineConfig
from qserve.hub.settings import HubSettings
from qserve.lora.request import LoRARequest, parse_modules


def local_model(model: str, settings: HubSettings) -> str:
    """Return the local folder or GGUF file of a command's model. Raises InputError."""
    return local_path(
        model,
        revision=settings.revision,
        subfolder=settings.subfolder,
        download_dir=settings.download_dir,
    )


def local_config(config: EngineConfig) -> EngineConfig:
    """Replace the hub names of the model, tokenizer, adapters and drafter. Raises InputError.

    Local paths are left unchanged.
    """

    def local(name: str, kind: Kind) -> str:
        return local_path(name, kind, download_dir=config.download_dir)

    # Small files first, so that their errors appear before the model is downloaded.
    tokenizer = None if config.tokenizer is None else local(config.tokenizer, TOKENIZER)
    modules = []
    for lora, text in zip(parse_modules(config.lora_modules), config.lora_modules, strict=True):
        path = local(lora.lora_path, ADAPTER)
        is_same = path == lora.lora_path
        modules.append(text if is_same else json.dumps({"name": lora.lora_name, "path": path}))
    drafter = _local_drafter(config)
    model = local_path(
        config.model,
        SHAPES if config.load_format == "dummy" else MODEL,
        revision=config.revision,
        subfolder=config.subfolder,
        download_dir=config.download_dir,
    )
    return dataclasses.replace(
        config,
        model=model,
        tokenizer=tokenizer,
        lora_modules=modules,
        speculative_config=drafter,
        revision=None,  # the local path of the model includes both
        subfolder=None,
    )


def weights_folder(name: str, config: EngineConfig) -> str:
    """Return the local folder of new weights. `name` is a path or a hub name.

    Raises InputError.
    """
    return str(Path(local_path(name, download_dir=config.download_dir)).absolute())


def local_adapter(lora: LoRARequest | None, config: EngineConfig) -> LoRARequest | None:
    """Replace the hub name of a request's adapter. Raises InputError.

    A path is not checked: its folder may be gone after the engine has read the adapter.
    """
    if lora is not None and not isinstance(lora, LoRARequest):
        raise InputError(
            "lora_request",
            f"expected a LoRARequest, found {type(lora).__name__}",
            'such as LoRARequest("sql", 1, "./sql-lora")',
        )
    if lora is None or HubName.parse(lora.lora_path) is None or is_local(lora.lora_path):
        return lora
    path = local_path(lora.lora_path, ADAPTER, download_dir=config.download_dir)
    return dataclasses.replace(lora, lora_path=path)


def _local_drafter(config: EngineConfig) -> str | None:
    """Return --speculative-config with the drafter's local folder. Raises InputError."""
    if config.speculation is None or config.speculation.model is None:
        return config.speculative_config
    found = json.loads(config.speculative_config or "{}")
    path = local_path(found["model"], DRAFTER, download_dir=config.download_dir)
    return (
        config.speculative_config if path == found["model"] else json.dumps(found | {"model": path})
    )
