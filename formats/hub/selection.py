"""Choice of a repository's files: only those that a model, an adapter or a tokenizer needs.

Code (*.py), pickles, `original/` and copies in other frameworks' formats are never chosen. Weights
in Mistral's format (`consolidated*`) are chosen only if there are no others. Paths are relative to
the repository, with `/`.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from formats.errors import CheckpointError, InputError
from formats.files.model_path import is_file_inside
from formats.files.side_files import CHANNEL_FACTORS

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
PARAMS, TEKKEN = "params.json", "tekken.json"  # of a model in Mistral's format
GGUF = ".gguf"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
NAMES_SHOWN = 6
# Configs of the model, its quantization, tokenizer, processors and pooling; chat templates; factors
# for adapters.
SIDE_PATTERNS = (
    *("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"),
    *("tokenizer.jsonl", "tokenizer.model.v*"),
    "additional_chat_templates/*.jinja",
    CHANNEL_FACTORS,
)
NOT_NEEDED = ("*.bin.index.json", "trainer_state.json", "*.msgpack.index.json", "*.ckpt.index.json")
# Modules of sentence-transformers, which modules.json lists: 1_Pooling, 2_Dense.
MODULE = re.compile(r"\d+_\w+/[^/]+\.(json|safetensors)")
SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Kind of repository. `weights`: candidate files, of which the first that exists is chosen."""

    noun: str
    required: str = ""  # file without which a repository is not of this kind
    weights: tuple[str, ...] = ()
    torch_weights: tuple[str, ...] = ()  # read as plain tensors, without running code
    has_index: bool = False
    patterns: tuple[str, ...] = SIDE_PATTERNS


HEAD_WEIGHTS = ("medusa_lm_head.safetensors",)
TORCH_HEADS = ("medusa_lm_head.pt", "pytorch_model.bin")
MODEL = Kind(noun="model", required=CONFIG, weights=(SINGLE, *HEAD_WEIGHTS), has_index=True)
# A draft model or a draft head; heads are often torch files.
DRAFTER = replace(MODEL, noun="drafter", torch_weights=TORCH_HEADS)
ADAPTER = Kind(
    noun="adapter",
    required="adapter_config.json",
    weights=("adapter_model.safetensors",),
    torch_weights=("adapter_model.bin",),
    patterns=("adapter_config.json",),
)
TOKENIZER = Kind(noun="tokenizer")
# a model without its weights, which are then random
SHAPES = Kind(noun="model", required=CONFIG)


def side_files(files: Iterable[str], kind: Kind, folder: str = "") -> list[str]:
    """Choose the small files of a repository, or of a folder in it."""
    return sorted(name for name in files if _is_side_file(_inside(name, folder), kind))


def weight_files(files: Collection[str], kind: Kind, folder: str, source: str) -> list[str] | None:
    """Choose the weight files; None: the files that the index lists. Raises CheckpointError."""
    if not kind.weights:
        return []
    if kind.has_index and (own := mistral_files(files, folder)):
        return own
    if folder + kind.required in files:
        if kind.has_index and folder + INDEX in files:
            return None
        for name in (*kind.weights, *kind.torch_weights):
            if folder + name in files:
                return [folder + name]
    raise _no_weights(files, kind, folder, source)


def mistral_files(files: Collection[str], folder: str = "") -> list[str]:
    """Return the weight files of a repository in Mistral's format alone; []: it has others."""
    inside = [name for each in files if (name := _inside(each, folder)) and "/" not in name]
    own = [name for name in inside if fnmatchcase(name, "consolidated*.safetensors")]
    is_other = any(fnmatchcase(name, "model*.safetensors*") for name in inside)
    return [] if is_other or PARAMS not in inside else sorted(folder + name for name in own)


def indexed_files(index: Mapping[str, object], source: str) -> list[str]:
    """Return the files that an index lists. Raises CheckpointError for one outside the folder."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(source, f"{INDEX} has no weight_map", "choose another model")
    for name in weight_map.values():
        if not is_file_inside(name) or not name.endswith(".safetensors"):
            raise CheckpointError(
                source,
                f"{INDEX} names {name!r:.100}, which is not a safetensors file of its folder",
                "choose another model",
            )
    return sorted(set(weight_map.values()))


def gguf_files(files: Iterable[str], wanted: str | None, source: str) -> list[str]:
    """Choose a GGUF file with all its parts, by its name or its type. Raises InputError.

    Without `wanted` the repository must contain a single model.
    """
    found: dict[str, list[str]] = {}  # first part -> its parts
    for name in sorted(each for each in files if each.lower().endswith(GGUF)):
        split = SPLIT.fullmatch(name)
        first = f"{split['stem']}-00001-of-{split['count']}.gguf" if split else name
        found.setdefault(first, []).append(name)
    models = [each for each in found if not PurePosixPath(each).name.startswith("mmproj")]
    if wanted is None:
        chosen = models
    elif wanted.lower().endswith(GGUF):
        chosen = [each for each in found if wanted in (each, *found[each])]
    else:
        chosen = [each for each in models if _has_type(each, wanted)]
    if len(chosen) != 1:
        if not models:
            raise InputError(source, "has no GGUF file", "leave out what follows the colon")
        problem = "several GGUF files match" if len(chosen) > 1 else "no GGUF file matches"
        raise InputError(
            source, f"{problem}; it has {_listed(chosen or models)}", "name one: ORG/NAME:FILE.gguf"
        )
    return found[chosen[0]]


def _has_type(name: str, wanted: str) -> bool:
    stem = PurePosixPath(name).stem
    split = SPLIT.fullmatch(PurePosixPath(name).name)
    stem = split["stem"] if split else stem
    return re.search(rf"(^|[-.]){re.escape(wanted)}$", stem, re.IGNORECASE) is not None


def _inside(name: str, folder: str) -> str | None:
    return name.removeprefix(folder) if name.startswith(folder) else None


def _is_side_file(name: str | None, kind: Kind) -> bool:
    if name is None or any(fnmatchcase(name, each) for each in NOT_NEEDED):
        return False
    if kind.has_index and MODULE.fullmatch(name):
        return True
    depth = name.count("/")
    return any(fnmatchcase(name, each) and depth == each.count("/") for each in kind.patterns)


def _no_weights(files: Collection[str], kind: Kind, folder: str, source: str) -> CheckpointError:
    """Return an error that names the weight files that the repository has instead."""
    subject = f"{source} {folder}".rstrip(" /")
    own = [name for each in files if (name := _inside(each, folder)) and "/" not in name]
    if kind.required not in own:
        expected = kind.required
    else:
        expected = " or ".join([INDEX] * kind.has_index + [kind.weights[0]])
    others = (
        ((GGUF,), "has GGUF files alone", "name one: ORG/NAME:FILE.gguf"),
        (
            (".safetensors",),
            f"has no {expected}",
            "choose a copy that save_pretrained of transformers has written",
        ),
        (
            PICKLES,
            "has only pickled weights, which may contain code and are not supported",
            "choose a copy or a --revision with safetensors",
        ),
    )
    for suffixes, problem, remedy in others if kind.has_index else ():
        found = [name for name in own if name.lower().endswith(suffixes)]
        if found:
            return CheckpointError(subject, f"{problem}: {_listed(found)}", remedy)
    folders = sorted(
        each.rpartition("/")[0] for each in files if each.endswith(f"/{kind.required}")
    )
    remedy = (
        f"add --subfolder {folders[0]}"
        if folders and not folder
        else f"is this the repository of the {kind.noun}?"
    )
    return CheckpointError(subject, f"has no {expected}", remedy)


def _listed(names: Collection[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(sorted(names)[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
