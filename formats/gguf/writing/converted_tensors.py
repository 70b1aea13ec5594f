"""Write tensors that GGUF files store in another form (architectures/converted.py)."""

from dataclasses import replace

import torch

from formats.errors import CheckpointError
from formats.gguf.architectures.converted import (
    ConvertedTensor,
    Order,
    order_of,
    rows_above,
    stored_shape,
)
from formats.gguf.block_types import BlockType
from formats.gguf.entries import JoinedEntry
from formats.gguf.names import KEY_UP, VALUE_UP
from formats.gguf.row_moves import in_steps, to_file
from formats.gguf.writing.container_writer import NewTensor
from formats.gguf.writing.encode import encode_floats, to_bytes
from formats.gguf.writing.latent import split_by_head
from formats.gguf.writing.tensor_maker import TensorMaker, holds_blocks


def converted_tensors(
    maker: TensorMaker, stem: str, theirs: str, name: str, converted: ConvertedTensor
) -> list[NewTensor]:
    """Return a tensor in GGUF's form, which differs from the family's: one tensor, or two."""
    module, config = name.removesuffix(".weight"), maker.reader.config
    is_coded = module != name and module in maker.coded
    if not is_coded and name not in maker.reader:
        return []
    if is_coded:
        whole = maker.codes(f"{stem}.{theirs}", [module])
    else:
        whole = maker.floats(f"{stem}.{theirs}", [name])
    rows, columns = (order_of(order, config) for order in (converted.rows, converted.columns))
    entry = maker.reader.entries.get(name)
    if holds_blocks(entry) and entry.presented.columns:
        columns = None  # blocks of a GGUF file are already in the file's order
    shape = stored_shape(converted.shape, whole.shape, config.get("mamba_n_groups") or 1)

    def make() -> torch.Tensor:
        data = torch.frombuffer(bytearray(whole.make()), dtype=torch.uint8)
        if converted.exponent:
            values = -torch.exp(data.view(torch.float32))
            data = values.view(torch.uint8)
        count = whole.shape[0] if rows is not None or converted.below else 1
        data = to_file(data.reshape(count, -1), rows)
        return _columns_moved(data, columns, whole) if columns else data

    if not converted.below:
        return [replace(whole, name=f"{stem}.{theirs}", shape=shape, make=lambda: to_bytes(make()))]
    above = rows_above(converted, shape, config)
    parts = ((theirs, slice(0, above)), (converted.below, slice(above, shape[0])))
    return [
        replace(
            whole,
            name=f"{stem}.{part}",
            shape=(which.stop - which.start, *shape[1:]),
            make=lambda which=which: to_bytes(make()[which]),
        )
        for part, which in parts
    ]


def halves(maker: TensorMaker, stem: str, name: str) -> list[NewTensor]:
    """Return kv_b_proj as two tensors by head: keys, transposed, and values."""
    if name not in maker.reader:
        raise CheckpointError(name, "is missing", "use a complete checkpoint")
    entry, config = maker.reader.entries[name], maker.reader.config
    maker.left.discard(name)
    heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
    latent, width = entry.shape[1], entry.shape[0] // heads - nope
    shapes = ((KEY_UP, (heads, latent, nope)), (VALUE_UP, (heads, width, latent)))
    found = []
    for number, (local, shape) in enumerate(shapes):
        kind = maker.float_type(name, entry)
        if isinstance(entry, JoinedEntry):  # from a GGUF file, whose blocks are kept
            kind = entry.parts[number].presented.stored.type

        def make(number: int = number, kind: BlockType = kind) -> bytes:
            if isinstance(entry, JoinedEntry):
                return to_bytes(entry.parts[number].stored_rows())
            part = split_by_head(maker.reader.get(name), config)[number]
            return to_bytes(encode_floats(part.flatten(0, 1), kind))

        found.append(NewTensor(name=f"{stem}.{local}.weight", type=kind, shape=shape, make=make))
    return found


def _columns_moved(data: torch.Tensor, order: Order, whole: NewTensor) -> torch.Tensor:
    """Return rows of blocks with their columns in the file's order. Raises CheckpointError."""
    kind, (N, K) = whole.type, whole.shape
    step = kind.length
    if order.numbers[-1] % step:
        raise CheckpointError(
            whole.name,
            f"has heads of {order.numbers[-1]} inputs, not a multiple of the block size {step}",
            "quantize it in blocks of 32, such as q8_0",
        )
    blocks = data.reshape(N, K // step, -1)
    return to_file(blocks, in_steps(order, step), dim=1).reshape(N, -1)
