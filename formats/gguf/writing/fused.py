"""Write gpt-oss's experts, which checkpoints store in one tensor per matrix, as GGUF stacks.

A checkpoint has gate_up_proj [E, K, 2 I] and down_proj [E, I, K], transposed; or pairs of MXFP4
tensors, not transposed. Even outputs of gate_up are gate's. GGUF has separate gate, up and down,
each [E, N, K], and biases [E, N]. Legend: E experts, N outputs, K inputs, I inner size.
"""

from collections.abc import Callable, Iterator

import torch

from formats.checkpoint import CheckpointReader
from formats.codecs import mxfp4
from formats.gguf.block_types import BY_NAME, BlockType
from formats.gguf.writing.container_writer import NewTensor
from formats.gguf.writing.encode import encode_floats, encode_weight, to_bytes

# GGUF's name -> (the checkpoint's name, the outputs of its matrix)
_PARTS = {
    "ffn_gate_exps": ("gate_up_proj", slice(0, None, 2)),
    "ffn_up_exps": ("gate_up_proj", slice(1, None, 2)),
    "ffn_down_exps": ("down_proj", slice(None)),
}


def is_fused(reader: CheckpointReader, stem: str) -> bool:
    """Return True if the experts below `stem` are in one tensor per matrix."""
    return f"{stem}.down_proj_bias" in reader


def fused_names(reader: CheckpointReader, stem: str) -> set[str]:
    """Return the checkpoint's tensors that hold the experts."""
    names = {f"{stem}.{name}" for name, _ in _PARTS.values()}
    return {
        f"{name}{end}"
        for name in names
        for end in ("", "_blocks", "_scales", "_bias")
        if f"{name}{end}" in reader
    }


def fused_tensors(
    reader: CheckpointReader,
    prefix: str,
    stem: str,
    kind_of: Callable[[str], BlockType],
) -> Iterator[NewTensor]:
    """Yield the stacks of a layer, named below `prefix`.

    `kind_of` gives the type of a float tensor.
    """
    for theirs, (name, outputs) in _PARTS.items():
        stored = f"{stem}.{name}"
        E, N = _bias(reader, stored, outputs).shape
        if f"{stored}_blocks" in reader:
            kind = BY_NAME["MXFP4"]
            K = reader.entries[f"{stored}_scales"].shape[-1] * mxfp4.GROUP
        else:
            kind, K = kind_of(stored), reader.entries[stored].shape[1]
        yield NewTensor(
            name=f"{prefix}.{theirs}.weight",
            type=kind,
            shape=(E, N, K),
            make=lambda stored=stored, outputs=outputs, kind=kind: _rows(
                reader, stored, outputs, kind
            ),
        )
        yield NewTensor(
            name=f"{prefix}.{theirs}.bias",
            type=BY_NAME["F32"],
            shape=(E, N),
            make=lambda stored=stored, outputs=outputs: to_bytes(
                encode_floats(_bias(reader, stored, outputs), BY_NAME["F32"])
            ),
        )


def _rows(reader: CheckpointReader, stored: str, outputs: slice, kind: BlockType) -> bytes:
    """Return the rows of all experts. MXFP4 codes are kept unchanged."""
    if f"{stored}_blocks" not in reader:
        weights = reader.get(stored)[:, :, outputs].transpose(1, 2).flatten(0, 1)
        return to_bytes(encode_floats(weights, kind))
    blocks, scales = (reader.get(f"{stored}{end}")[:, outputs] for end in ("_blocks", "_scales"))
    weight = mxfp4.decode(blocks.flatten(0, 1), scales.flatten(0, 1), stored)
    return to_bytes(encode_weight(weight, stored))


def _bias(reader: CheckpointReader, stored: str, outputs: slice) -> torch.Tensor:
    return reader.get(f"{stored}_bias")[:, outputs]
