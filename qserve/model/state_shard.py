"""StateShard: one rank's shard of a layer's mixer with states.

A shard has some heads with their key heads or groups, or some channels. A size in the family's row
that counts channels of the mixer consists of blocks, and a block has a part for each head or for
each group. A rank has the parts of its heads and groups in each block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from formats.architecture.states.mixer import Kind, StateMixer
from formats.errors import InputError
from formats.in_memory.shards import HeadShard, Shard
from formats.in_memory.slices import Rows
from formats.in_memory.state_shards import HEADS, check_states, shard_states
from qserve.model.model_config import ModelConfig

HEAD, GROUP, WHOLE = "head", "group", "whole"
# Size name -> blocks: (whether a block has a part per head or per group, or is whole on every rank;
# size of a part).
_BLOCKS = {
    "linear_num_value_heads": ((HEAD, "one"),),
    "delta_k": ((GROUP, "linear_key_head_dim"),),
    "delta_v": ((HEAD, "linear_value_head_dim"),),
    "delta_qkv": (
        (GROUP, "linear_key_head_dim"),
        (GROUP, "linear_key_head_dim"),
        (HEAD, "linear_value_head_dim"),
    ),
    "mamba_n_heads": ((HEAD, "one"),),
    "mamba_inner": ((HEAD, "mamba_d_head"),),
    "mamba_gated": ((HEAD, "mamba_d_head"),) * 2,
    "mamba_b": ((GROUP, "mamba_d_state"),),
    "mamba_conv": ((HEAD, "mamba_d_head"), (GROUP, "mamba_d_state"), (GROUP, "mamba_d_state")),
    "mamba_in": (
        (HEAD, "mamba_d_head"),
        (HEAD, "mamba_d_head"),
        (GROUP, "mamba_d_state"),
        (GROUP, "mamba_d_state"),
        (HEAD, "one"),
    ),
    # Mamba-1; each channel counts as a head
    "mamba_channels": ((HEAD, "one"),),
    "mamba_channels_in": ((HEAD, "one"),) * 2,
    "mamba_d_state": ((WHOLE, "mamba_d_state"),),
    "linear_num_heads": ((HEAD, "one"),),
    "kda": ((HEAD, "linear_head_dim"),),
    "kda_qkv": ((HEAD, "linear_head_dim"),) * 3,
    # lightning attention
    "q": ((HEAD, "head_dim"),),
    "lightning_qkv": ((HEAD, "head_dim"),) * 3,
    # short convolution; each channel counts as a head
    "hidden_size": ((HEAD, "one"),),
    "short_conv_in": ((HEAD, "one"),) * 3,
}
# For each kind of mixer, the sizes along the sharded axis of a slot's tensors (StateSlots): of the
# recurrent state, with that axis, and of the kept inputs of a row.
_MEMORY: dict[Kind, tuple[int, str]] = {
    "gated delta nets": (0, "linear_num_value_heads"),
    "Kimi delta attention": (0, "linear_num_heads"),
    "lightning attention": (0, "linear_num_heads"),
    "Mamba-2": (0, "mamba_n_heads"),
    "Mamba-1": (2, "mamba_channels"),
}
_ROW_INPUTS: dict[Kind, tuple[str, ...]] = {
    "gated delta nets": ("delta_k", "delta_v", *["linear_num_value_heads"] * 2),
    "Kimi delta attention": ("kda", "kda", "linear_num_heads", "kda"),
    "lightning attention": ("q", "q", "linear_num_heads"),
    "Mamba-2": ("mamba_inner", "mamba_b", "mamba_n_heads"),
    "Mamba-1": ("mamba_channels", "mamba_channels", "mamba_d_state"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShard:
    """The heads and groups of a mixer that a rank has."""

    mixer: StateMixer
    config: ModelConfig
    shards: tuple[HeadShard, ...]  # heads and groups of all ranks, in rank order
    rank: int = 0

    @classmethod
    def make(cls, config: ModelConfig, layer: int, size: int = 1, rank: int = 0) -> "StateShard":
        """Shard a layer's mixer over `size` ranks. Raises InputError if that is not possible."""
        mixer, sizes = config.family.state_mixer, config.sizes
        if size > 1:
            name = f"{config.family.layer.format(i=layer)}.{mixer.out.linears[0].name}"
            scheme = None if config.quant is None else config.quant.scheme_for(name)
            inputs = sizes[mixer.out.inputs]
            shards = shard_states(mixer, sizes, inputs, size, scheme, name)
        else:
            check_states(mixer, sizes)
            heads, groups = _counts(mixer, config)
            shards = (HeadShard(heads=(0, heads), kv_heads=(0, groups)),)
        return cls(mixer=mixer, config=config, shards=shards, rank=rank)

    @property
    def own(self) -> HeadShard:
        return self.shards[self.rank]

    @property
    def num_heads(self) -> int:
        return self.own.num_heads

    @property
    def num_groups(self) -> int:
        return self.own.num_kv_heads

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of channels of each rank's result."""
        ((_, part),) = _BLOCKS[self.mixer.out.inputs]
        return tuple(shard.num_heads * self._width(part) for shard in self.shards)

    @property
    def columns(self) -> Shard:
        """This rank's range of inputs of the output projection."""
        ((start, stop),) = self.rows((self.mixer.out.inputs,))
        return start, stop

    @property
    def split_group(self) -> tuple[int, int] | None:
        """(this rank's group, number of groups) if groups are sharded over ranks, else None."""
        groups = _counts(self.mixer, self.config)[1]
        return (self.own.kv_heads[0], groups) if len(self.shards) > groups else None

    def rows(self, outputs: Sequence[str], *, grouped: bool = False) -> Rows:
        """Return this rank's rows of a tensor whose rows are the sizes `outputs`.

        The rows come in the order of the blocks. `grouped`: True if the tensor stores the rows of
        each group together.
        """
        heads, groups = _counts(self.mixer, self.config)
        blocks = [(kind, self._width(part)) for size in outputs for kind, part in _BLOCKS[size]]
        ratio, rows, offset = heads // groups, [], 0
        group_width = sum(width * (ratio if kind == HEAD else 1) for kind, width in blocks)
        for kind, width in blocks:
            if kind == WHOLE:
                rows.append((offset, offset + width))
                offset += width
                continue
            count = ratio if kind == HEAD else 1  # in each group
            first, last = self.own.heads if kind == HEAD else self.own.kv_heads
            if grouped:
                starts = [
                    number // count * group_width + offset + number % count * width
                    for number in range(first, last)
                ]
                rows += [(start, start + width) for start in starts]
                offset += count * width
            else:
                rows.append((offset + first * width, offset + last * width))
                offset += groups * count * width
        return rows

    def slot_ranges(self) -> dict[str, tuple[int, Rows]]:
        """Return the sharded axis of each tensor of a state slot, and this rank's ranges of it.

        The names are those of `StateSpec.slot_names`. The axes do not count the slots.
        """
        found: dict[str, tuple[int, Rows]] = {}
        tensors = [each for _, each in self.mixer.present(self.config.values)]
        convolutions = [each for each in tensors if each.key.startswith("conv_weight")]
        if convolutions:
            sizes = [size for each in convolutions for size in each.shape[each.axis]]
            found["convolution"] = 0, self.rows(sizes)
        if self.mixer.kind in _MEMORY:
            axis, size = _MEMORY[self.mixer.kind]
            found["memory"] = axis, self.rows((size,))
            found["recent"] = 1, self.rows(_ROW_INPUTS[self.mixer.kind])
        return found

    def _width(self, part: str) -> int:
        """Return the size of a part of a block. Raises InputError if it is not above 0."""
        size = self.config.sizes[part]
        if not size:
            problem = "expected a number above 0"
            raise InputError(f"config.json {part}", problem, "copy it from the float model")
        return size


def _counts(mixer: StateMixer, config: ModelConfig) -> tuple[int, int]:
    """Return the number of heads and of groups of all ranks together."""
    sizes = config.sizes
    if mixer.kind not in HEADS:
        return sizes[mixer.out.inputs], sizes[mixer.out.inputs]
    heads, groups, _ = HEADS[mixer.kind]
    return sizes[heads], sizes[groups]
