"""Model folder made from a GGUF file: config.json, tokenizer files and an index of tensors.

It is made once, in the user's cache, under a key of the file's path, size and time, and read like
any model folder. The weights stay in the GGUF file. Needs no torch if the folder exists.
"""

import array
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.errors import DOWNLOAD_AGAIN, CheckpointError
from formats.files.made_folder import fingerprint, made_folder
from formats.files.model_path import INDEX, stem
from formats.gguf.architectures.converted import Order
from formats.gguf.block_types import BY_NAME, find_type
from formats.gguf.config import (
    find_family,
    head_dim,
    make_config,
    num_heads,
    num_kv_heads,
    num_layers,
)
from formats.gguf.container import StoredTensor, read_gguf, split_files
from formats.gguf.metadata import Metadata
from formats.gguf.names import NameMap, Presented
from formats.gguf.tokenizer import tokenizer_files

FORMAT = 6  # version of the folder's content; after a change folders are made again
REMEDY = "give the GGUF file again"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufIndex:
    """Content of the folder's index: the file's tensors under the family's names."""

    path: Path  # the first file
    presented: dict[str, Presented]
    # tensors of one number that the metadata contain: (shape, number) by name
    scalars: dict[str, tuple[tuple[int, ...], float]]


def folder_of_file(file: Path) -> Path:
    """Return the folder of a GGUF file, and make it if it does not exist yet."""
    if not file.is_file():
        raise CheckpointError(str(file), "not found", "give a GGUF file or a model folder")
    stated = [fingerprint(each) for each in split_files(file)]
    return made_folder(
        "gguf", stem(file.name), INDEX, [FORMAT, stated], lambda: _make_texts(file, stated)
    )


def _make_texts(file: Path, stated: list[list[Any]]) -> dict[str, str]:
    """Return the text of each file of the folder. Raises CheckpointError."""
    from formats.architecture.stored_form.config import canonical_config
    from formats.codecs.config_fields import BLOCK
    from formats.gguf import config_block
    from formats.gguf.entries import schemes_of

    gguf = read_gguf(file)
    metadata = Metadata(gguf)
    config = make_config(metadata)
    found = _name_map(metadata, config).present(gguf.tensors, str(file))
    family = find_family(metadata)
    unread = family.unread(canonical_config(config))  # tensors that the model does not use
    found = {name: each for name, each in found.items() if not name.startswith(unread)}
    schemes = schemes_of(found, family)
    types = Counter(found[f"{name}.weight"].stored.type.name for name in schemes)
    if not all(BY_NAME[name].float_dtype for name in types):
        config[BLOCK] = config_block.write(schemes, types)
    numbers = {path: number for number, path in enumerate(gguf.files)}
    tensors = [_row(each, numbers) for each in found.values()]
    index = {
        "format": FORMAT,
        "files": stated,
        "tensors": tensors,
        "scalars": _scalars(metadata),
    }
    others = tokenizer_files(metadata, config)
    values = {"config.json": config, **others, INDEX: index}
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in values.items()
    }


def _name_map(metadata: Metadata, config: Mapping[str, Any]) -> NameMap:
    heads = num_heads(metadata)
    head_dim(metadata)  # raises if keys and values have different widths
    return NameMap(
        architecture=metadata.architecture,
        family=find_family(metadata),
        num_layers=num_layers(metadata),
        heads=heads,
        kv_heads=num_kv_heads(metadata),
        config=config,
    )


def _scalars(metadata: Metadata) -> dict[str, list[Any]]:
    """Return (shape, number) of each tensor that the metadata contain, by its full name.

    Raises CheckpointError for a list without a number for each layer.
    """
    family, count, found = find_family(metadata), num_layers(metadata), {}
    for key, name in metadata.architecture.scalars.items():
        stated = metadata.gguf.metadata.get(key)
        values = as_list(stated) or [stated] * count
        is_number = all(type(value) in (int, float) and abs(value) < 1e30 for value in values)
        if len(values) != count or not is_number:
            raise CheckpointError(
                f"{metadata.subject}: {key}",
                f"expected a number for each of {count} layers, found {stated!r:.80}",
                DOWNLOAD_AGAIN,
            )
        shapes = dict(family.activation_tensors.values())
        for number, value in enumerate(values):
            full = f"{family.layer.format(i=number)}.{name}"
            found[full] = [[1] * len(shapes[name]), float(value)]
    return found


def _row(each: Presented, numbers: dict[Path, int]) -> list[Any]:
    parts = [each.stored, *(part for part in (each.values, each.below) if part)]
    places = [
        [numbers[stored.file], stored.type.id, stored.offset, list(stored.shape), stored.name]
        for stored in parts
    ]
    order = [each.heads, each.kv_heads]
    moves = [each.rows, each.columns, each.exponent, each.below is not None]
    return [each.name, list(each.shape), each.first_row, order, moves, each.offset, places]


def read_index(folder: Path) -> GgufIndex:
    """Read the folder's index.

    Raises CheckpointError if the GGUF file is missing or was changed.
    """
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        files = [Path(path) for path, _, _ in index["files"]]
        for path, stated in zip(files, index["files"], strict=True):
            if not path.is_file():
                raise CheckpointError(str(path), "not found; its folder is a cache", REMEDY)
            if fingerprint(path) != stated:
                raise CheckpointError(str(path), "has changed since it was opened", REMEDY)
        presented = {}
        for name, shape, first_row, order, moves, offset, places in index["tensors"]:
            rows, columns, exponent, is_below = moves
            stored, *second = (
                StoredTensor(
                    name=stored_name,
                    type=find_type(kind, stored_name),
                    shape=tuple(stored_shape),
                    file=files[number],
                    offset=at,
                )
                for number, kind, at, stored_shape, stored_name in places
            )
            presented[name] = Presented(
                name=name,
                stored=stored,
                values=second[0] if second and not is_below else None,
                below=second[0] if is_below else None,
                shape=tuple(shape),
                first_row=first_row,
                heads=order[0],
                kv_heads=order[1],
                rows=_order(rows),
                columns=_order(columns),
                exponent=exponent,
                offset=offset,
            )
        scalars = {
            name: (tuple(shape), float(value)) for name, (shape, value) in index["scalars"].items()
        }
    except (OSError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(str(folder / INDEX), "is damaged", "remove its folder") from None
    return GgufIndex(path=files[0], presented=presented, scalars=scalars)


def _order(stated: Any) -> Order | None:
    return None if stated is None else Order(stated[0], tuple(stated[1]))


def as_list(values: Any) -> list[Any]:
    """Return an array of metadata as a list; [] for any other value."""
    return list(values) if isinstance(values, list | array.array) else []
