"""Tolerant reader of a model folder's tensors: damage becomes a finding.

`CheckpointReader` is the strict counterpart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from formats.architecture.text_part import text_name
from formats.checkpoint import CONFIG, INDEX, SINGLE, TensorEntry, read_header, read_json
from formats.errors import CheckpointError
from formats.files.model_path import (
    is_file_inside,
    is_gguf_folder,
    is_mistral_folder,
    origin,
)
from formats.files.side_files import TOKENIZER_FILES
from formats.files.tensor_entry import StatedShape
from formats.gguf.opened import open_gguf
from formats.inspection.findings import Findings
from formats.mistral.folder import open_folder


@dataclass(slots=True)
class Shards:
    """Tensors of all readable files, and the names that the index expects in damaged files."""

    entries: dict[str, TensorEntry] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    damaged: bool = False
    vision_bytes: int = 0  # size of the tensors outside the text model

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def load(self, name: str, findings: Findings) -> torch.Tensor | None:
        """Read one tensor; None, with a finding, if its file cannot be read."""
        try:
            return self.entries[name].read()
        except CheckpointError as error:
            findings.caught(error)
            return None

    def keep_text_part(self) -> None:
        """Keep only the text model's tensors, under its names (text_part.py)."""
        others = [entry for name, entry in self.entries.items() if text_name(name) is None]
        self.vision_bytes = sum(entry.num_bytes for entry in others)
        self.entries = {own: e for name, e in self.entries.items() if (own := text_name(name))}
        self.lost = {own for name in self.lost if (own := text_name(name))}

    def rename(self, own_names: Mapping[str, str]) -> None:
        """Rename all tensors. `own_names`: stored name -> name; {}: keep the names."""
        if own_names:
            self.entries = {own: self.entries[name] for name, own in own_names.items()}


def read_shards(folder: Path, findings: Findings) -> Shards:
    """Read the headers of a folder's shards and compare them with the index."""
    shards = Shards()
    if is_gguf_folder(folder):
        config = read_json(folder / CONFIG)
        shards.entries = open_gguf(
            folder, config, as_floats=False, rounded=False, in_blocks=True
        ).entries
        return shards
    if is_mistral_folder(folder):
        shards.entries = open_folder(folder, read_json(folder / CONFIG))
        return shards
    weight_map, total_size = _read_index(folder, findings)
    on_disk = sorted(path.name for path in folder.glob("*.safetensors"))
    if weight_map:
        files = sorted(set(weight_map.values()))
    elif SINGLE in on_disk or not on_disk:
        files = [SINGLE]
    else:
        files = on_disk
        if not (folder / INDEX).exists() and len(files) == 1:
            findings.error(SINGLE, f"not found, but {files[0]}", f"rename it to {SINGLE}")
        elif not (folder / INDEX).exists():
            findings.error(INDEX, f"not found for {len(files)} shards", "download it again")
    for name in on_disk:
        if name not in files:
            findings.warning(name, "is not listed in the index", "remove it, or fix the index")
    for file_name in files:
        listed = {name for name, file in weight_map.items() if file == file_name}
        try:
            entries = read_header(folder / file_name)
        except CheckpointError as error:
            findings.caught(error)
            shards.lost |= listed
            shards.damaged = True
            continue
        _check_shard(folder / file_name, entries, listed, shards, weight_map, findings)
        shards.entries.update(entries)
    found = sum(entry.num_bytes for entry in shards.entries.values())
    if total_size is not None and total_size != found and not shards.damaged:
        findings.warning(
            INDEX, f"states a total_size of {total_size} bytes, the tensors have {found}", "fix it"
        )
    partial = [*folder.glob("*.partial"), folder.absolute().parent / f".{folder.name}.partial"]
    for path in partial:
        if path.exists():
            findings.warning(str(path), "is left over from a killed run", "remove it")
    return shards


def check_tokenizer(folder: Path, findings: Findings) -> None:
    """Report a tokenizer that is missing or truncated."""
    found = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        findings.warning(
            str(origin(folder)),
            f"has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there; the weights can be"
            " read, but servers that take text refuse the folder",
            "copy tokenizer.json and tokenizer_config.json from the original model",
        )
    for name in found:
        if name.endswith(".json"):
            try:
                read_json(folder / name)
            except CheckpointError as error:
                findings.caught(error)


def _read_index(folder: Path, findings: Findings) -> tuple[dict[str, str], int | None]:
    """Return (tensor -> file name, total_size), both empty without a readable index."""
    if not (folder / INDEX).exists():
        return {}, None
    try:
        index = read_json(folder / INDEX)
    except CheckpointError as error:
        findings.caught(error)
        return {}, None
    listed = index.get("weight_map")
    if not isinstance(listed, dict) or not listed:
        findings.error(INDEX, "has no weight_map", "download it again")
        return {}, None
    weight_map = {}
    for name, file_name in listed.items():
        if not is_file_inside(file_name):
            text = f"{name}: {file_name!r} is not the name of a file in the folder"
            findings.error(INDEX, text, "fix it")
        else:
            weight_map[name] = file_name
    metadata = index.get("metadata")
    return weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None


def _check_shard(
    path: Path,
    entries: dict[str, TensorEntry],
    listed: set[str],
    shards: Shards,
    weight_map: dict[str, str],
    findings: Findings,
) -> None:
    for name in sorted(listed - entries.keys()):
        findings.error(name, f"the index places it in {path.name}, which does not contain it")
        shards.lost.add(name)
    for name in sorted(entries.keys() & shards.entries.keys()):
        findings.error(name, f"is in both {path.name} and {shards.entries[name].file.name}")
    stored = {name for name, entry in entries.items() if not isinstance(entry, StatedShape)}
    for name in sorted(stored - listed if weight_map else ()):
        findings.warning(name, f"is in {path.name}, but the index does not list it there")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        findings.error(path.name, f"the safetensors library refuses it: {error}")
        return
    if metadata.get("format") != "pt":
        findings.warning(
            path.name,
            f"its metadata should state format 'pt', found {metadata.get('format')!r}",
            "transformers before 5 refuses the file",
        )
