"""Journal: finished layers on disk, so that an interrupted run can resume.

A folder next to the target has journal.json (the run's identity) and one safetensors file per
finished layer, with the layer's report in its metadata. A file is written under a temporary name
and then renamed, so every file with a final name is complete.
"""

import json
import logging
import os
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from calibrate.layer import FinishedLayer
from calibrate.results.report import LinearReport
from formats.checkpoint import read_json
from formats.errors import FREE_SPACE, CheckpointError, DiskError, InputError, one_line
from formats.files import staging
from formats.files.channel_factors import ChannelFactors
from formats.in_memory.fp4 import Fp4Weight, is_fp4
from formats.in_memory.fp8 import Fp8Weight
from formats.in_memory.k_weight import KWeight, is_k_quant
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import Weight
from formats.scheme import K_TYPES, ActivationSpec, QuantSpec

log = logging.getLogger(__name__)

IDENTITY = "journal.json"
# spec type -> the tensors of a weight of that type, by their names in the file
FIELDS = {
    "int": {"words": "words_NW", "scales": "scales_NG", "zeros": "zeros_NG"},
    "float": {"codes": "codes_NK", "scales": "scales_RC"},
    "mxfp4": {"codes": "bytes_NB", "scales": "scales_NG"},
    "nvfp4": {"codes": "bytes_NB", "scales": "scales_NG", "whole": "global_scale"},
    **{name: {"blocks": "bytes_NX"} for name in K_TYPES},
}
# Optional tensors: the scale of static activations, and the input order of act-order
OPTIONAL = {"input_scale": "input_scale", "order": "input_order"}
RECORD = "qserve_layer"
FACTOR = "factor."  # before the names of channel factors


class JournalError(CheckpointError):
    """The journal on disk does not fit this run. It is kept: only the user may delete it."""


class Journal:
    """Context manager that keeps or removes the journal's folder when the run fails.

    The folder is kept after a crash or a disk error with at least one finished layer, and after any
    failure when all layers are solved. It is removed after another InputError before that, and
    after any error of a run that cannot resume because its recipe has no version.
    """

    def __init__(self, target: str | Path, identity: dict[str, Any]) -> None:
        """Open or create the folder. Raises JournalError if its run had other settings."""
        target = Path(target).resolve()
        self.folder = target.parent / f".{target.name}.unfinished"
        self.all_solved = False  # set by the pipeline
        # Normalized through JSON, like the file's contents: tuples become lists.
        self.identity = json.loads(json.dumps(identity))
        path = self.folder / IDENTITY
        stored = read_json(path) if path.exists() else None
        if stored is not None and _resumes(stored) and self._has_layers():
            # The identity's order: a changed scheme changes what follows from it, too.
            for name in (*self.identity, *sorted(stored.keys() - self.identity.keys())):
                before, now = stored.get(name), self.identity.get(name)
                if before != now:
                    where, before, now = _difference(name, before, now)
                    raise JournalError(
                        str(self.folder),
                        f"is from an unfinished run with {where} {before!r}; this run has {now!r}",
                        "use the old settings, or delete this folder to start again",
                    )
            return
        try:
            if self.folder.exists():
                shutil.rmtree(self.folder)
            staging.register(self.folder)  # without a finished layer it is of no use
            self.folder.mkdir(parents=True)
            self._write(IDENTITY, json.dumps(self.identity, indent=2).encode())
        except OSError as error:
            self.remove()
            raise DiskError(
                str(self.folder), f"cannot be created: {error.strerror}", FREE_SPACE
            ) from None

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, JournalError):
            return
        mended = issubclass(kind, DiskError) or self.all_solved  # resuming can succeed
        keeps = self._has_layers() and _resumes(self.identity)
        if not keeps or (issubclass(kind, InputError) and not mended):
            self.remove()
        else:
            log.warning(
                "%s keeps the finished layers: run the same command again to resume", self.folder
            )

    def remove(self) -> None:
        """Delete the folder: the run is complete, or cannot be completed."""
        shutil.rmtree(self.folder, ignore_errors=True)
        staging.release(self.folder)

    def write(self, layer: int, finished: FinishedLayer, source: str) -> None:
        """Write a finished layer. `source`: digest of the float layer. Raises DiskError."""
        tensors = {f"changed.{name}": tensor for name, tensor in finished.changed.items()}
        tensors |= {f"{FACTOR}{name}": each for name, each in finished.factors.tensors().items()}
        for name, packed in finished.packed.items():
            for short, field in (FIELDS[packed.spec.type] | OPTIONAL).items():
                if getattr(packed, field, None) is not None:
                    tensors[f"{short}.{name}"] = getattr(packed, field)
        record = {
            "source": source,
            "linears": [asdict(report) for report in finished.reports],
            "notes": finished.notes,
            "packed": {
                name: {
                    "spec": asdict(packed.spec),
                    "activation": packed.activation and asdict(packed.activation),
                    "in_features": packed.in_features,
                }
                for name, packed in finished.packed.items()
            },
        }
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        partial = self.folder / "partial"
        try:
            save_file(tensors, partial, metadata={RECORD: json.dumps(record)})
            self._publish(partial, self._path(layer))
            staging.release(self.folder)
        except (SafetensorError, OSError) as error:
            raise DiskError(
                str(self.folder), f"cannot be written: {one_line(error)}", FREE_SPACE
            ) from None

    def read(self, layer: int, device: str, source: str) -> FinishedLayer | None:
        """Read a finished layer, or return None if it does not exist.

        Raises JournalError if the file is damaged, or was made from a float layer whose digest is
        not `source`.
        """
        path = self._path(layer)
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                record = json.loads((file.metadata() or {})[RECORD])
                tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118 - no mapping
            packed = {
                name: _weight(name, fields, tensors) for name, fields in record["packed"].items()
            }
            reports = tuple(_report(linear) for linear in record["linears"])
            made_of = record["source"]
        except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
            raise JournalError(
                str(path), f"is damaged: {error}", f"delete {self.folder} to start again"
            ) from None
        if made_of != source:
            raise JournalError(
                str(self.folder),
                f"is from an unfinished run with other weights in layer {layer}",
                "restore the old weights, or delete this folder to start again",
            )
        changed = {
            name.removeprefix("changed."): tensor
            for name, tensor in tensors.items()
            if name.startswith("changed.")
        }
        factors = {
            name.removeprefix(FACTOR): tensor
            for name, tensor in tensors.items()
            if name.startswith(FACTOR)
        }
        return FinishedLayer(
            packed=packed,
            changed=changed,
            reports=reports,
            notes=tuple(record["notes"]),
            factors=ChannelFactors.from_tensors(factors),
        )

    def _has_layers(self) -> bool:
        return any(self.folder.glob("layer-*"))

    def _path(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:05d}.safetensors"

    def _write(self, name: str, content: bytes) -> None:
        partial = self.folder / "partial"
        partial.write_bytes(content)
        self._publish(partial, self.folder / name)

    def _publish(self, partial: Path, path: Path) -> None:
        """Sync, then rename, so that a file with its final name is complete after a power cut."""
        descriptor = os.open(partial, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        partial.rename(path)


def _resumes(identity: dict[str, Any]) -> bool:
    """Return False if the recipe is a user's without a version (calibrate/recipe.py)."""
    return identity.get("recipe", "") is not None


def _difference(name: str, before: Any, now: Any) -> tuple[str, Any, Any]:
    """Return the first difference as (name, before, now). Dicts are compared entry by entry."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return name, _short(before), _short(now)
    key = next(key for key in {**before, **now} if before.get(key) != now.get(key))
    return _difference(f"{name} {key}", before.get(key), now.get(key))


def _short(value: Any) -> Any:
    """Return what names a value: of an object its first entry, such as the calibration's source."""
    return next(iter(value.values()), None) if isinstance(value, dict) else value


def _weight(name: str, record: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Weight:
    spec, activation = QuantSpec(**record["spec"]), record["activation"]
    values: dict[str, Any] = {
        field: tensors[f"{short}.{name}"] for short, field in FIELDS[spec.type].items()
    }
    values["input_scale"] = tensors.get(f"input_scale.{name}")
    values["activation"] = activation and ActivationSpec(**activation)
    if spec.type == "float":
        return Fp8Weight(spec=spec, **values)
    if is_fp4(spec):
        return Fp4Weight(spec=spec, **{"global_scale": None, **values})
    if is_k_quant(spec):
        return KWeight(spec=spec, **values)
    values["input_order"] = tensors.get(f"order.{name}")
    return PackedWeight(spec=spec, in_features=record["in_features"], **values)


def _report(values: dict[str, Any]) -> LinearReport:
    known = {field.name for field in fields(LinearReport)}
    values = {name: value for name, value in values.items() if name in known}
    return LinearReport(**{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})
