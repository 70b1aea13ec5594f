"""Tensor-parallel shards of recurrent mixers.

A delta net is divided by value heads, together with the key heads that they read; Mamba-2 by heads,
together with their groups. If there are fewer key heads or groups than GPUs, several GPUs hold the
same one. In Kimi delta attention and lightning attention each head has its own keys. A short
convolution is divided by channels.
"""

from collections.abc import Mapping

from formats.architecture.states.mixer import Kind, StateMixer
from formats.errors import InputError
from formats.in_memory.shards import HeadShard, shard_features, shard_heads
from formats.scheme import Scheme

# kind -> names of the sizes (heads, groups of heads), and their names in errors
HEADS: dict[Kind, tuple[str, str, tuple[str, str]]] = {
    "gated delta nets": (
        *("linear_num_value_heads", "linear_num_key_heads"),
        ("value heads", "key heads"),
    ),
    "Mamba-2": ("mamba_n_heads", "mamba_n_groups", ("Mamba-2 heads", "groups")),
    "Kimi delta attention": (
        *("linear_num_heads", "linear_num_heads"),
        ("heads of Kimi delta attention", "key heads"),
    ),
    "lightning attention": (
        *("num_attention_heads", "norm_groups"),
        ("heads of lightning attention", "groups"),
    ),
}


def check_state_shards(mixer: StateMixer | None, size: int) -> None:
    """Raise InputError for convolutions of what attention and experts compute: they have no linear
    of their own that could be divided."""
    if size > 1 and mixer is not None and mixer.out is None:
        raise InputError(
            f"--tensor-parallel-size {size}",
            f"does not divide {mixer.kind} inside of attention and experts",
            "use --data-parallel-size",
        )


def shard_states(
    mixer: StateMixer,
    sizes: Mapping[str, int | None],
    inputs: int,
    size: int,
    scheme: Scheme | None,
    name: str,
) -> tuple[HeadShard, ...]:
    """Return each GPU's heads and groups of a layer; for a short convolution, its channels.

    `inputs` are the inputs of the layer's output projection, `name`, which has `scheme`. Raises
    InputError if they cannot be divided.
    """
    check_states(mixer, sizes)
    if mixer.kind not in HEADS:
        shards = shard_features(name, inputs, size, scheme)
        return tuple(HeadShard(heads=shard, kv_heads=shard) for shard in shards)
    heads, groups, words = HEADS[mixer.kind]
    if mixer.kind == "lightning attention" and sizes[groups] % size and size % sizes[groups] == 0:
        raise InputError(
            f"--tensor-parallel-size {size}",
            f"the norm of {name} has {sizes[groups]} groups, and a rank needs whole ones",
            f"use {sizes[groups]} or fewer",
        )
    width = inputs // sizes[heads]
    return shard_heads(sizes[heads], sizes[groups], width, size, [scheme], words)


def check_states(mixer: StateMixer, sizes: Mapping[str, int | None]) -> None:
    """Raise InputError unless sizes are known and each group has the same number of heads."""
    if mixer.kind not in HEADS:
        if not sizes[mixer.out.inputs]:
            raise InputError(
                "config.json",
                f"states no sizes from which the number of channels of {mixer.kind} follows",
                "copy it from the float model",
            )
        return
    heads, groups, _ = HEADS[mixer.kind]
    missing = [name for name in (heads, groups) if not sizes[name]]
    if missing:
        raise InputError(f"config.json {missing[0]}", "is missing", "copy it from the float model")
    if sizes[heads] % sizes[groups]:
        raise InputError(
            f"config.json {heads}",
            f"expected a multiple of {groups}, {sizes[groups]}, found {sizes[heads]}",
            "copy both from the float model",
        )
