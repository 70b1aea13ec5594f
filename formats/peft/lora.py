"""PEFT LoRA folder in memory: A, B and their factor for each adapted linear.

y = W x + scale * B (A x). Legend: N outputs, K inputs, r rank.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from formats.architecture.family import Family
from formats.architecture.float_linears import float_projections
from formats.architecture.projection import Projection
from formats.checkpoint import TensorEntry, read_header
from formats.errors import CheckpointError, one_line
from formats.files.channel_factors import ChannelFactors
from formats.files.side_files import CHANNEL_FACTORS
from formats.peft.linear_names import LinearNames
from formats.peft.lora_config import SAVE_AGAIN, WEIGHTS, LoraConfig
from formats.peft.routed_experts import StackedExperts, names_an_expert
from formats.peft.stacked_pairs import StackedPairs, expert_pairs

PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
ENDS = {".lora_A.weight": "A", ".lora_B.weight": "B"}
# Tensors of features that lora_config.py refuses: a config may fail to state the feature.
OTHER_TENSORS = {
    "lora_embedding_": "adapts the embedding",
    "lora_magnitude_vector": "is DoRA's",
    "lora_B.bias": "is a bias of lora_B",
    ".base_layer.": "is a weight of the base model",
}
MAX_BYTES = 2**35
MAX_HEADER_BYTES = 16_000_000  # a header of 880 linears has 260,000, of 44,544 experts' 13,000,000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPair:
    """Low-rank update of one linear."""

    a_rK: torch.Tensor
    b_Nr: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a_rK.shape[0]

    def delta(self) -> torch.Tensor:
        """Return scale * B A in float32 [N, K], which is added to the weight."""
        return self.scale * (self.b_Nr.float() @ self.a_rK.float())

    def fitted(self, inputs_K: torch.Tensor | None, outputs_N: torch.Tensor | None) -> "LoraPair":
        """Return the pair for a weight diag(1 / outputs) W diag(inputs). None: factors of 1.

        A and B become float32 if they are changed.
        """
        a_rK, b_Nr = self.a_rK, self.b_Nr
        if inputs_K is not None:
            a_rK = a_rK.float() * inputs_K
        if outputs_N is not None:
            b_Nr = b_Nr.float() / outputs_N[:, None]
        return replace(self, a_rK=a_rK, b_Nr=b_Nr)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAdapter:
    """Pairs of an adapter folder, by the linear's name in the base checkpoint."""

    folder: str
    config: LoraConfig
    pairs: Mapping[str, LoraPair]

    @property
    def rank(self) -> int:
        """Return the largest rank."""
        return max(pair.rank for pair in self.pairs.values())

    def fitted(self, factors: ChannelFactors) -> "LoraAdapter":
        """Return an adapter of the float model for a checkpoint with these channel factors.

        Raises CheckpointError if the factors have other sizes.
        """
        pairs = {}
        for name, pair in self.pairs.items():
            inputs_K, outputs_N = factors.inputs.get(name), factors.outputs.get(name)
            sides = ((inputs_K, pair.a_rK.shape[1]), (outputs_N, pair.b_Nr.shape[0]))
            for each, size in sides:
                if each is not None and each.numel() != size:
                    raise CheckpointError(
                        f"{name} in {CHANNEL_FACTORS}",
                        f"expected {size} factors, found {each.numel()}",
                        "quantize the model again",
                    )
            pairs[name] = pair.fitted(inputs_K, outputs_N)
        return replace(self, pairs=pairs)


def adapted_projections(
    family: Family, config: Mapping[str, Any]
) -> Iterator[tuple[int, str, Projection]]:
    """Yield (layer, its prefix, projection) for every linear that can be adapted.

    These are all linears of a layer except routers, routed experts (routed_experts.py) and
    indexers.
    """
    for layer in range(config[family.num_layers_key]):
        row, prefix = family.of_layer(layer, config), family.layer.format(i=layer)
        blocks = row.blocks(config, layer)
        for projection in (*row.projections(blocks), *float_projections(row, blocks)):
            yield layer, prefix, projection


def adapted_shapes(family: Family, config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return [N, K] of every linear that can be adapted, by its name in the checkpoint."""
    sizes = family.sizes(config)
    return {
        f"{prefix}.{linear.name}": (sum(sizes[n] for n in linear.outputs), sizes[linear.inputs])
        for _, prefix, projection in adapted_projections(family, config)
        for linear in projection.linears
    }


def read_adapter(
    folder: str | Path,
    shapes: Mapping[str, tuple[int, int]],
    *,
    family: Family | None = None,
    stacked: StackedExperts | None = None,
    max_rank: int | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> LoraAdapter:
    """Read an adapter for a base model whose linears have these shapes. Raises CheckpointError.

    `family`: the model's row, for adapters that name the linears as transformers does. `stacked`:
    the stacks of experts whose linears are among `shapes`; None: they are not adapted.
    `is_wanted` is called before each linear; if it returns False, reading stops with an error.
    Sizes and ranks are checked before a tensor is read; every tensor must be used, and every linear
    that the configuration names must have its pair. Links to the folder are resolved once, and
    weights that another process replaces meanwhile are refused.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(str(folder), "is not a folder", "give a folder that PEFT has saved")
    folder = folder.resolve()
    config = LoraConfig.from_folder(folder)
    file = _File(folder)
    names = LinearNames(shapes, family)
    stacks = None if stacked is None else StackedPairs(path=file.path, stacked=stacked)
    stored = _sorted_out(file, names, family, stacks)
    for module, pair in stored.items():
        _check_wanted(folder, is_wanted)
        _check_pair(file, config, pair, shapes[module], max_rank)
    of_stacks = [] if stacks is None else stacks.checked(config, file.entries, max_rank)
    if not stored and not of_stacks:
        raise CheckpointError(str(file.path), "holds no tensors", "save the adapter again")
    # An expression may match linears without a pair: "all-linear" also matches the router.
    listed = not isinstance(config.target, str)
    # In transformers 5 experts are parameters, so their usual names match other linears only.
    with_experts = any(map(names_an_expert, stored))
    in_adapter = names.in_adapter([pair.name for pair in stored.values()])
    missing = [
        name
        for name in shapes
        if listed
        and name not in stored
        and (with_experts or not names_an_expert(name))
        and config.adapts(in_adapter(name))
    ]
    if missing:
        raise CheckpointError(
            str(folder),
            f"{config.source} lists {missing[0]}, but the file has no tensors for it"
            f" ({len(missing)} such modules)",
            "use an adapter that was trained on this model",
        )
    pairs = {}
    for module, pair in stored.items():
        _check_wanted(folder, is_wanted)
        a_rK, b_Nr = (_finite(file, pair.tensors[part]) for part in "AB")
        scale = config.scale_of(pair.name_in(config) or module)
        pairs[module] = LoraPair(a_rK=a_rK, b_Nr=b_Nr, scale=scale)
    for each in of_stacks:
        _check_wanted(folder, is_wanted)
        scale = config.scale_of(each.name)
        for module, a_rK, b_Nr in expert_pairs(each, lambda name: _finite(file, name)):
            if module in pairs:
                raise CheckpointError(
                    f"{file.path}: {each.name}",
                    f"adapts {module}, which has tensors of its own",
                    "save the adapter again",
                )
            pairs[module] = LoraPair(a_rK=a_rK, b_Nr=b_Nr, scale=scale)
    return LoraAdapter(folder=str(folder), config=config, pairs=pairs)


def _check_wanted(folder: Path, is_wanted: Callable[[], bool]) -> None:
    if not is_wanted():
        raise CheckpointError(
            str(folder),
            "loading was stopped: no request waits for it any more",
            "send the request again",
        )


class _File:
    """Tensors of an adapter folder, safetensors first: `entries` with shapes, `get(name)`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / WEIGHTS
        self._pickled: dict[str, torch.Tensor] | None = None
        self.entries: dict[str, tuple[tuple[int, ...], torch.dtype]]
        if self.path.exists():
            self._version = _version(self.path.stat())
            header = read_header(self.path, MAX_HEADER_BYTES)
            self._header: dict[str, TensorEntry] = header
            self.entries = {name: (entry.shape, entry.dtype) for name, entry in header.items()}
            return
        self.path = folder / PICKLE
        if not self.path.is_file():
            raise CheckpointError(
                str(folder), f"has neither {WEIGHTS} nor {PICKLE}", "download it again"
            )
        if self.path.stat().st_size > MAX_BYTES:
            raise CheckpointError(
                str(self.path),
                f"is larger than {MAX_BYTES} bytes",
                f"save the adapter as {WEIGHTS}, which is read in parts",
            )
        path = self.path
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # the errors of a damaged file are not documented
            problem = f"cannot be read: {one_line(error)}"
            raise CheckpointError(str(self.path), problem, "save it as safetensors") from None
        tensors = isinstance(found, dict) and all(
            isinstance(name, str) and isinstance(value, torch.Tensor)
            for name, value in found.items()
        )
        if not tensors:
            raise CheckpointError(
                str(self.path),
                f"expected tensors by name, found {type(found).__name__}",
                SAVE_AGAIN,
            )
        self._pickled = found
        self.entries = {name: (tuple(t.shape), t.dtype) for name, t in found.items()}

    def get(self, name: str) -> torch.Tensor:
        if self._pickled is not None:
            return self._pickled[name]
        entry = self._header[name]
        with self.path.open("rb") as file:
            if _version(os.fstat(file.fileno())) != self._version:
                problem = "was replaced or changed while it was read"
                raise CheckpointError(str(self.path), problem, "load the adapter again")
            file.seek(entry.offset)
            data = bytearray(entry.num_bytes)
            if file.readinto(data) != entry.num_bytes:
                raise CheckpointError(str(self.path), f"ends inside {name}", "download it again")
        return torch.frombuffer(data, dtype=entry.dtype).reshape(entry.shape)


def _version(status: os.stat_result) -> tuple[int, ...]:
    """Return the identity of a file's content, different for each file and each file version."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredPair:
    """Tensors of one linear in the file."""

    name: str  # of the linear in the file
    module: str  # of the linear in the checkpoint
    tensors: dict[str, str]  # "A", "B" -> name of the tensor

    def name_in(self, config: LoraConfig) -> str | None:
        """Return the name that the configuration adapts; None: it adapts neither."""
        return next((name for name in (self.name, self.module) if config.adapts(name)), None)


def _sorted_out(
    file: _File, names: LinearNames, family: Family | None, stacks: StackedPairs | None
) -> dict[str, _StoredPair]:
    """Map linears of the checkpoint to their tensors, except those of `stacks`, which takes them.

    Every tensor must belong to a linear or to a stack of experts.
    """
    found: dict[str, _StoredPair] = {}
    for name in file.entries:
        end = next((end for end in ENDS if name.endswith(end)), None)
        if not name.startswith(PREFIX) or end is None:
            reason = next((why for part, why in OTHER_TENSORS.items() if part in name), "")
            raise CheckpointError(
                f"{file.path}: {name}",
                f"{reason or 'is not a tensor of a LoRA adapter'}; not supported",
                "train or save the adapter with linear layers as its only targets",
            )
        stored = name.removeprefix(PREFIX).removesuffix(end)
        module = names.find(stored)
        if module is None and stacks is not None and stacks.take(stored, ENDS[end], name):
            continue
        if module is None and names_an_expert(stored) and stacks is None:
            raise CheckpointError(
                f"{file.path}: {name}",
                "adapts routed experts, which take no adapters here",
                "serve it with --enable-lora --lora-experts, or add it to the float model with"
                " `qserve merge`",
            )
        if module is None:
            model = "this model" if family is None else family.architecture
            raise CheckpointError(
                f"{file.path}: {name}",
                f"adapts {stored}, which is not a linear of {model} that can be adapted",
                "use an adapter that was trained on this model and adapts only mixers, attention"
                " and feed-forwards, not embeddings, heads, routers and convolutions; `qserve"
                " merge` takes adapters of any linear of a float model",
            )
        pair = found.setdefault(module, _StoredPair(name=stored, module=module, tensors={}))
        if pair.name != stored:
            raise CheckpointError(
                f"{file.path}: {name}",
                f"adapts a linear that {pair.name} also names",
                "save the adapter again",
            )
        pair.tensors[ENDS[end]] = name
    return found


def _check_pair(
    file: _File,
    config: LoraConfig,
    pair: _StoredPair,
    shape: tuple[int, int],
    max_rank: int | None,
) -> None:
    subject, parts = f"{file.path}: {pair.name}", pair.tensors
    if len(parts) != 2:
        raise CheckpointError(subject, f"has lora_{'/'.join(parts)} alone", "download it again")
    name = pair.name_in(config)
    if name is None:
        raise CheckpointError(
            subject, f"has tensors, and {config.source} does not name it", SAVE_AGAIN
        )
    (N, K), rank = shape, config.rank_of(name)
    for part, wanted in (("A", (rank, K)), ("B", (N, rank))):
        found, dtype = file.entries[parts[part]]
        if found != wanted:
            raise CheckpointError(
                f"{subject} lora_{part}",
                f"expected {list(wanted)}, found {list(found)}",
                "use an adapter that was trained on this model, with these ranks",
            )
        if not dtype.is_floating_point:
            raise CheckpointError(
                f"{subject} lora_{part}", f"expected floats, found {dtype}", SAVE_AGAIN
            )
    if max_rank is not None and rank > max_rank:
        raise CheckpointError(
            subject, f"expected a rank of at most {max_rank}, found {rank}", "raise --max-lora-rank"
        )


def _finite(file: _File, name: str) -> torch.Tensor:
    tensor = file.get(name)
    if not tensor.float().isfinite().all():
        raise CheckpointError(f"{file.path}: {name}", "holds NaN or infinity", "train it again")
    return tensor
