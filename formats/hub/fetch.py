"""local_path: turns a local path or a hub name into a local path, and downloads missing files.

huggingface_hub stores the files below $HF_HOME/hub or the given folder: `refs`, `blobs`, and
`snapshots` of links. It reads HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE.
"""

import json
import logging
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.errors import CheckpointError, DiskError, InputError
from formats.files.model_path import check_is_no_adapter
from formats.files.side_files import TOKENIZER_FILES
from formats.heads.config import head_kind
from formats.hub import errors
from formats.hub.name import EXAMPLE, HubName, is_local
from formats.hub.selection import (
    CONFIG,
    DRAFTER,
    INDEX,
    MODEL,
    SHAPES,
    SPLIT,
    TEKKEN,
    TOKENIZER,
    Kind,
    gguf_files,
    indexed_files,
    side_files,
    weight_files,
)
from formats.table import size_text

TIMEOUT = 10.0  # seconds for the hub's first answer
SPARE_BYTES = 2**26  # disk space to leave free
log = logging.getLogger(__name__)


def local_path(
    model: str | Path,
    kind: Kind = MODEL,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    download_dir: str | Path | None = None,
) -> str:
    """Return the local folder, or the GGUF file, of a path or of a hub name.

    A path that exists is returned unchanged. For a hub name, the files of `kind` that the cache
    lacks are downloaded; without a network, a complete snapshot in the cache is used.
    `download_dir` replaces the hub's cache. Raises InputError.
    """
    text = str(model)
    if not text:
        raise InputError("MODEL", "is empty", "give a folder, a .gguf file or a hub name ORG/NAME")
    if is_local(text):
        if revision is not None:
            raise InputError(
                "--revision", f"applies to hub names, but {text} is a local path", "remove it"
            )
        found = _in_folder(Path(text), subfolder)
        if kind in (MODEL, SHAPES):
            check_is_no_adapter(Path(found))
        return found
    name = HubName.parse(text)
    if name is None:
        noun = "file" if text.endswith(".gguf") else "folder"
        raise InputError(text, f"no such {noun}", f"check the path; {EXAMPLE}")
    name = name.at(revision)
    folder = _plain_subfolder(subfolder)
    if name.gguf is not None and folder:
        raise InputError(
            "--subfolder", "does not apply to a GGUF file", "add it to the file's name"
        )
    return str(_Fetch(name, kind, folder, download_dir).run())


def _plain_subfolder(subfolder: str | None) -> str:
    """Return the prefix of files in a folder of a repository: "" or "FOLDER/".

    Raises InputError.
    """
    parts = [] if subfolder is None else subfolder.strip("/").split("/")
    if any(part in ("", ".", "..") or "\\" in part for part in parts):
        raise InputError(
            "--subfolder",
            f"expected a folder of the repository, found {subfolder!r}",
            "give a relative path such as model/fp16",
        )
    return "".join(f"{part}/" for part in parts)


def _in_folder(path: Path, subfolder: str | None) -> str:
    if subfolder is None:
        return str(path)
    inner = path / _plain_subfolder(subfolder)
    if not inner.is_dir():
        raise InputError(
            "--subfolder",
            f"there is no folder {inner}",
            "name a folder of the repository, or leave it out",
        )
    return str(inner)


@dataclass(frozen=True, slots=True)
class _Fetch:
    """Download of one name: the files of a kind that the cache lacks."""

    name: HubName
    kind: Kind
    folder: str  # "" or "FOLDER/" in the repository
    download_dir: str | Path | None

    @property
    def cache(self) -> str:
        """Return the folder of the cache."""
        from huggingface_hub import constants

        return str(self.download_dir or constants.HF_HUB_CACHE)

    @property
    def source(self) -> str:
        return str(self.name)

    def run(self) -> Path:
        """Return the folder or GGUF file. Raises InputError."""
        from huggingface_hub import HfApi

        if self.name.is_pinned and (found := self._cached(with_tokenizer=True)) is not None:
            return found
        try:
            info = HfApi(endpoint=errors.endpoint()).model_info(
                self.name.repo,
                revision=self.name.revision,
                timeout=TIMEOUT,
                files_metadata=True,
            )
        except Exception as error:  # the client also raises exceptions of its HTTP library
            found = self._cached() if errors.is_unreachable(error) else None
            if found is None:
                raise self._explained(error) from error
            if not errors.is_offline(error):
                log.warning(
                    "%s: %s cannot be reached; using the copy in the cache, %s",
                    *(self.name, errors.endpoint(), found),
                )
            return found
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        try:
            path = self._download(sizes, str(info.sha))
        except InputError:
            raise
        except Exception as error:
            raise self._explained(error, is_begun=True) from error
        log.info("%s: %s", self.name, path)
        return path

    def _download(self, sizes: Mapping[str, int], commit: str) -> Path:
        """Download the files that the cache lacks.

        Weights come last: a snapshot that has them is complete.
        """
        if self.name.gguf is not None or _is_gguf_alone(sizes, self.folder):
            files = gguf_files(sizes, self.name.gguf, self.source)
            self._check_space(files, sizes, commit)
            return self._snapshot(files, commit) / files[0]
        kind = self._settled_kind(sizes, commit)
        if kind is TOKENIZER and not any(self.folder + name in sizes for name in TOKENIZER_FILES):
            raise CheckpointError(
                self.source,
                f"has no tokenizer: none of {', '.join(TOKENIZER_FILES)}",
                "name the model that it was made from",
            )
        root = self._snapshot(side_files(sizes, kind, self.folder), commit)
        weights = weight_files(sizes, kind, self.folder, self.source)
        if weights is None:
            weights = [self.folder + name for name in self._indexed(root)]
        if lacking := [name for name in weights if name not in sizes]:
            raise CheckpointError(
                self.source,
                f"lacks {lacking[0]}, which its {INDEX} lists",
                "choose another revision: the upload is incomplete",
            )
        if weights:
            self._check_space(weights, sizes, commit)
            # the commit of the first files, even if the branch has moved since then
            self._snapshot(weights, root.name, is_pinned=True)
        if any(not (root / name).is_file() for name in weights):
            raise InputError(self.source, "has changed during the download", errors.AGAIN)
        return root / self.folder if self.folder else root

    def _settled_kind(self, sizes: Mapping[str, int], commit: str) -> Kind:
        """Return the kind. A model whose config.json is a draft head's may have a torch file.

        Raises InputError.
        """
        if self.kind is not MODEL:
            return self.kind
        try:
            weight_files(sizes, MODEL, self.folder, self.source)
        except CheckpointError:
            config = self.folder + CONFIG
            if config not in sizes:
                raise
            if head_kind(_read_json(self._snapshot([config], commit) / config)) is None:
                raise
            return DRAFTER
        return MODEL

    def _snapshot(self, files: Sequence[str], commit: str, *, is_pinned: bool = False) -> Path:
        """Download files, with a progress bar; return the folder of the commit.

        Unless `is_pinned`, the name's revision is fetched and recorded in the cache's `refs`. This
        revision is usually `commit`, and no request is made if the cache has all files.
        """
        from huggingface_hub import snapshot_download

        revision = commit if is_pinned else self.name.revision
        root = self._cached_root(revision)
        if root is not None and root.name == commit and all((root / n).is_file() for n in files):
            return root
        return Path(
            snapshot_download(
                self.name.repo,
                revision=revision,
                cache_dir=self.download_dir,
                endpoint=errors.endpoint(),
                allow_patterns=[_escaped(name) for name in files],
            )
        )

    def _check_space(self, files: Sequence[str], sizes: Mapping[str, int], commit: str) -> None:
        """Raise DiskError if the files that the cache lacks do not fit on the disk."""
        from huggingface_hub import try_to_load_from_cache

        needed = sum(
            sizes[name]
            for name in files
            if not isinstance(
                try_to_load_from_cache(self.name.repo, name, self.download_dir, commit), str
            )
        )
        place = Path(self.cache).absolute()
        free = shutil.disk_usage(next(p for p in (place, *place.parents) if p.exists())).free
        if needed and needed + SPARE_BYTES > free:
            raise DiskError(
                self.source,
                f"needs {size_text(needed)}, but {self.cache} has {size_text(free)} free",
                f"free some, or {errors.OTHER_FOLDER}",
            )

    def _cached(self, *, with_tokenizer: bool = False) -> Path | None:
        """Return the folder or GGUF file in the cache, without a request; None if incomplete."""
        root = self._cached_root(self.name.revision)
        if root is None:
            return None
        files = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
        try:
            if self.name.gguf is not None or _is_gguf_alone(files, self.folder):
                parts = gguf_files(files, self.name.gguf, self.source)
                return root / parts[0] if _has_all_parts(parts) else None
            kind = self._settled_in(root)
            weights = weight_files(files, kind, self.folder, self.source)
            if weights is None:
                weights = [self.folder + name for name in self._indexed(root)]
        except InputError:
            return None
        needs_tokenizer = self.kind is TOKENIZER or (with_tokenizer and kind is MODEL)
        tokenizers = (*TOKENIZER_FILES, TEKKEN)
        if needs_tokenizer and not any(self.folder + name in files for name in tokenizers):
            return None
        if not files >= set(weights):
            return None
        return root / self.folder if self.folder else root

    def _cached_root(self, revision: str | None) -> Path | None:
        """Return the folder of a revision in the cache, which may lack files."""
        from huggingface_hub import snapshot_download

        try:
            return Path(
                snapshot_download(
                    self.name.repo,
                    revision=revision,
                    cache_dir=self.download_dir,
                    local_files_only=True,
                    allow_patterns=["-"],  # no file: callers check for the files that they need
                )
            )
        except (OSError, ValueError):
            return None

    def _settled_in(self, root: Path) -> Kind:
        config = root / self.folder / CONFIG
        is_head = self.kind is MODEL and config.is_file() and head_kind(_read_json(config))
        return DRAFTER if is_head else self.kind

    def _indexed(self, root: Path) -> list[str]:
        return indexed_files(_read_json(root / self.folder / INDEX), self.source)

    def _explained(self, error: BaseException, *, is_begun: bool = False) -> InputError:
        noun, cache = self.kind.noun, self.cache
        return errors.explained(error, self.name, noun, cache, is_begun=is_begun)


def _is_gguf_alone(files: Collection[str], folder: str) -> bool:
    """Return True if a repository has GGUF files and no config.json."""
    return folder + CONFIG not in files and any(
        name.startswith(folder) and name.lower().endswith(".gguf") for name in files
    )


def _has_all_parts(parts: Sequence[str]) -> bool:
    split = SPLIT.fullmatch(parts[0])
    return split is None or len(parts) == int(split["count"])


def _escaped(name: str) -> str:
    """Return a pattern that matches only this name, since file names may contain * and [."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object without torch, which formats.checkpoint loads. Raises CheckpointError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CheckpointError(str(path), "is not a JSON object", "choose another model")
    return found
