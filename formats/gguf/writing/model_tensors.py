"""All tensors of a checkpoint under GGUF's names, in the order of the model."""

import torch

from formats.errors import CheckpointError
from formats.gguf.architectures.converted import ConvertedTensor
from formats.gguf.block_types import BY_NAME
from formats.gguf.names import (
    BOTH_UP,
    GATE,
    GATE_UP,
    UP,
    linear_names,
    other_names,
    outer_names,
    stream_names,
)
from formats.gguf.writing.container_writer import NewTensor, Value
from formats.gguf.writing.converted_tensors import converted_tensors, halves
from formats.gguf.writing.fused import fused_names, fused_tensors, is_fused
from formats.gguf.writing.metadata import REMEDY, head_width, num_experts
from formats.gguf.writing.tensor_maker import TensorMaker


class ModelTensors:
    """The tensors of one checkpoint under GGUF's names."""

    def __init__(self, maker: TensorMaker) -> None:
        self._maker, self._reader = maker, maker.reader
        self._family, self._row = maker.family, maker.row
        # True: kv_b_proj of latent attention is written by head; False: a layer has it quantized
        joined = linear_names(self._family, self._row).get(BOTH_UP, "")
        is_coded = any(name.endswith(f".{joined}") for name in maker.coded)
        self.is_split = bool(joined) and not self._row.joins_kv_b and not is_coded

    def tensors(self) -> list[NewTensor]:
        """Return all tensors, in the order of the model. Raises CheckpointError."""
        family, config, found = self._family, self._reader.config, []
        modules = {
            name.removesuffix(".weight"): ours.removesuffix(".weight")
            for name, ours in outer_names(family, self._row).items()
            if name.endswith(".weight")
        }
        head, last_norm = modules.pop("output"), modules.pop(self._row.output_norm, None)
        if family.is_tied(config):
            head = modules["token_embd"] if self._row.head == "own" else None
        elif self._row.head == "tied":
            raise CheckpointError(
                head,
                f"is a separate output head, which {self._row.name} does not have in GGUF",
                REMEDY,
            )
        for name, module in modules.items():
            found += self._maker.module(name, [module])
        for name, stack in stream_names(family).items():
            found += self._maker.module(name, stack, stack=len(stack))
        for number in range(config["num_hidden_layers"]):
            found += self._layer(number)
        for name, module in ((self._row.output_norm, last_norm), ("output", head)):
            found += self._maker.module(name, [module]) if module else []
        self._maker.left.discard(family.head)
        left = sorted(self._maker.left)
        if left:
            raise CheckpointError(
                left[0], f"and {len(left) - 1} more tensors have no name in GGUF", "remove them"
            )
        return found

    def scalars(self) -> dict[str, Value]:
        """Return the metadata for tensors that have one number per layer."""
        found = {}
        layers = range(self._reader.config["num_hidden_layers"])
        for key, name in self._row.scalars.items():
            names = [f"{self._family.layer.format(i=number)}.{name}" for number in layers]
            values = [self._reader.get(each).item() for each in names]
            self._maker.left -= set(names)
            found[key] = Value(type="f32", value=values)
        return found

    def _layer(self, number: int) -> list[NewTensor]:
        family, found = self._family, []
        prefix, stem = family.layer.format(i=number), f"blk.{number}"
        converted = {
            each.name for each in self._row.tensors.values() if isinstance(each, ConvertedTensor)
        }
        single = {
            **self._row.norms,
            **linear_names(family, self._row, family.has_state(number, self._reader.config)),
            **other_names(family, ""),
        }
        for theirs, ours in single.items():
            if ours in converted or f"{ours}.weight" in converted:
                continue
            if theirs == BOTH_UP and self.is_split:
                if family.has_state(number, self._reader.config):
                    continue
                found += halves(self._maker, stem, f"{prefix}.{ours}.weight")
                continue
            found += self._maker.module(f"{stem}.{theirs}", [f"{prefix}.{ours}"], optional=True)
        has_keys = any(each.name == f"{stem}.attn_k.weight" for each in found)
        if self._row.fills_shared_layers and not has_keys:
            found += self._zero_keys(stem)
        for theirs, ours in self._row.tensors.items():
            if isinstance(ours, ConvertedTensor):
                found += converted_tensors(self._maker, stem, theirs, f"{prefix}.{ours.name}", ours)
            elif f"{prefix}.{ours}" in self._reader:
                found.append(self._maker.floats(f"{stem}.{theirs}", [f"{prefix}.{ours}"]))
        return found + self._experts(stem, prefix)

    def _experts(self, stem: str, prefix: str) -> list[NewTensor]:
        """Return the stacks of a layer's experts."""
        experts, reader, found = self._family.experts, self._reader, []
        if experts is None:
            return found
        of_all = f"{prefix}.{experts.stem}"
        if experts.fused and is_fused(reader, of_all):
            self._maker.left -= fused_names(reader, of_all)
            return [*fused_tensors(reader, stem, of_all, self._maker.type_of_floats)]
        count = num_experts(reader.config) or 0
        for theirs, names in self._stacks(prefix).items():
            modules = [f"{prefix}.{name.format(e=e)}" for e in range(count) for name in names]
            found += self._maker.module(f"{stem}.{theirs}", modules, optional=True, stack=count)
        return found

    def _stacks(self, prefix: str) -> dict[str, list[str]]:
        """Return the linears of one expert by GGUF's name of their stack. One type fits a stack."""
        names = {theirs: [ours] for theirs, ours in other_names(self._family, "{e}").items()}
        if not self._row.joins_gate_up:
            return names
        both = [*names[GATE], *names[UP]]
        types = {self._maker.type_of_module(f"{prefix}.{name.format(e=0)}") for name in both}
        if len(types) > 1:
            return names
        apart = {theirs: ours for theirs, ours in names.items() if theirs not in (GATE, UP)}
        return {GATE_UP: both, **apart}

    def _zero_keys(self, stem: str) -> list[NewTensor]:
        """Return zeroed keys and values for a layer that uses those of an earlier layer."""
        config = self._reader.config
        width, hidden = head_width(config), config["hidden_size"]
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        shapes = {
            "attn_k": (heads * width, hidden),
            "attn_v": (heads * width, hidden),
            "attn_k_norm": (width,),
        }
        found = []
        for local, shape in shapes.items():
            kind = BY_NAME["F32" if len(shape) == 1 else "F16"]
            count = kind.row_bytes(torch.Size(shape).numel())
            found.append(
                NewTensor(
                    name=f"{stem}.{local}.weight",
                    type=kind,
                    shape=shape,
                    make=lambda count=count: bytes(count),
                )
            )
        return found
