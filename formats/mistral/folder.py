"""Model folder made from a folder in Mistral's format: the small files, and an index.

It is made once, in the user's cache, under a key of the files' paths, sizes and times. Needs no
torch if it exists.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.errors import CheckpointError
from formats.files.json_file import read_json
from formats.files.made_folder import fingerprint, made_folder
from formats.files.model_path import MISTRAL_INDEX
from formats.files.side_files import find_side_files
from formats.mistral.params import PARAMS

if TYPE_CHECKING:
    from formats.files.tensor_entry import TensorEntry

FORMAT = 1  # version of the folder's content; after a change folders are made again
WEIGHTS = "consolidated*.safetensors"
INDEX = "consolidated.safetensors.index.json"
CONFIG = "config.json"
TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"
REMEDY = "give the model folder again"


def folder_of_mistral(source: Path) -> Path:
    """Return the folder made from a folder in Mistral's format. Raises CheckpointError."""
    weights = weight_files(source)
    read = [PARAMS, *map(str, find_side_files(source)), *_tokenizers(source)]
    stated = [fingerprint(source / name) for name in dict.fromkeys(read)]
    stated += [fingerprint(path) for path in weights]
    # The name becomes the model's name in the server.
    name = source.resolve().name or "mistral"
    key = [FORMAT, name, stated]
    return made_folder("mistral", name, MISTRAL_INDEX, key, lambda: _make(source, weights, stated))


def weight_files(source: Path) -> list[Path]:
    """Return the weight files, as the index lists them if there is one. Raises CheckpointError."""
    files = sorted(source.glob(WEIGHTS))
    if not (source / INDEX).is_file():
        return files
    listed = read_json(source / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(str(source / INDEX), "has no weight_map", "download it again")
    names = {path.name for path in files}
    for name in set(map(str, listed.values())) - names:
        raise CheckpointError(
            str(source / INDEX), f"lists {name!r:.80}, which is missing", "download the model again"
        )
    return [path for path in files if path.name in set(listed.values())]


def _tokenizers(source: Path) -> list[str]:
    from formats.mistral.tokenizer import find_tokenizer

    found = find_tokenizer(source)
    return [] if found is None else [found.name]


def _make(source: Path, weights: list[Path], stated: list[Any]) -> dict[str, str | bytes]:
    """Return the contents of the folder's files. Raises CheckpointError."""
    from formats.codecs.config_fields import BLOCK
    from formats.mistral.entries import presented, read_headers
    from formats.mistral.names import NameMap
    from formats.mistral.params import config_of
    from formats.mistral.quantization import block_of
    from formats.mistral.tokenizer import tokenizer_files

    params = read_json(source / PARAMS)
    stored = read_headers(weights)
    config = config_of(params, _float_dtype(stored))
    names = NameMap.of(config)
    shapes = {name: entry.shape for name, entry in presented(stored, names).items()}
    block = block_of(params, names, shapes)
    if block is not None:
        config[BLOCK] = block
    made = tokenizer_files(source, config.get("text_config", config))
    values: dict[str, Any] = {CONFIG: config, **made, **_processor(params)}
    index = {"format": FORMAT, "source": str(source.resolve()), "files": stated}
    contents: dict[str, str | bytes] = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in {**values, MISTRAL_INDEX: index}.items()
    }
    copied = {str(path): (source / path).read_bytes() for path in find_side_files(source)}
    copied = {name: content for name, content in copied.items() if "/" not in name}
    return {**contents, **copied}


def _float_dtype(stored: Mapping[str, "TensorEntry"]) -> str:
    """Return the dtype of the embedding, which is never quantized."""
    entry = stored.get("tok_embeddings.weight")
    if entry is None:
        raise CheckpointError("tensor 'tok_embeddings.weight'", "is missing", "download it again")
    return entry.stored_as


def _processor(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the image processor, which scales images as Mistral's code does."""
    encoder = params.get("vision_encoder")
    if not isinstance(encoder, dict):
        return {}
    patch = encoder.get("patch_size")
    longest = encoder.get("max_image_size") or encoder.get("image_size")
    merge = encoder.get("spatial_merge_size", 1)
    return {
        "preprocessor_config.json": {
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": patch,
            "size": {"longest_edge": longest},
            "do_convert_rgb": True,
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "rescale_factor": 1 / 255,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "resample": 3,
        },
        "processor_config.json": {
            "processor_class": "PixtralProcessor",
            "patch_size": patch,
            "spatial_merge_size": merge,
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
    }


def open_folder(folder: Path, config: Mapping[str, Any]) -> dict[str, "TensorEntry"]:
    """Return the tensors of a made folder. Raises CheckpointError if its source has changed."""
    from formats.mistral.entries import presented, read_headers
    from formats.mistral.names import NameMap

    index = read_json(folder / MISTRAL_INDEX)
    stated = index.get("files")
    if index.get("format") != FORMAT or not isinstance(stated, list):
        raise CheckpointError(str(folder / MISTRAL_INDEX), "is damaged", "remove its folder")
    paths = [Path(each[0]) for each in stated]
    for path, found in zip(paths, stated, strict=True):
        if not path.is_file():
            raise CheckpointError(str(path), "not found; its folder is a cache", REMEDY)
        if fingerprint(path) != found:
            raise CheckpointError(str(path), "has changed since it was opened", REMEDY)
    weights = weight_files(Path(index["source"]))
    return presented(read_headers(weights), NameMap.of(config))
