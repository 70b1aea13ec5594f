"""Table of GGUF tensor types, one row each. A block is a run of inputs that share scales.

Ids and sizes are ggml's. This module needs no torch, so that headers can be read without it.
"""

from dataclasses import dataclass

from formats.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockType:
    """One type of GGUF tensor."""

    id: int
    name: str
    length: int  # elements of a block
    num_bytes: int  # bytes of a block
    float_dtype: str = ""  # name of a plain float type in torch
    decoded: bool = True  # False: the type is known, but not read
    kernel_form: str = ""  # form in which kernels run it (kernel_forms.py); empty: as floats

    def row_bytes(self, in_features: int) -> int:
        """Return the bytes of a row of `in_features` elements, which must be whole blocks."""
        return in_features // self.length * self.num_bytes


def _plain(id: int, name: str, num_bytes: int, float_dtype: str = "") -> BlockType:
    return BlockType(
        id=id,
        name=name,
        length=1,
        num_bytes=num_bytes,
        float_dtype=float_dtype,
        decoded=bool(float_dtype),
    )


def _blocks(id: int, name: str, length: int, num_bytes: int, kernel_form: str = "") -> BlockType:
    return BlockType(id=id, name=name, length=length, num_bytes=num_bytes, kernel_form=kernel_form)


def _refused(id: int, name: str, length: int, num_bytes: int) -> BlockType:
    return BlockType(id=id, name=name, length=length, num_bytes=num_bytes, decoded=False)


BLOCK_TYPES: dict[int, BlockType] = {
    row.id: row
    for row in (
        _plain(0, "F32", 4, "float32"),
        _plain(1, "F16", 2, "float16"),
        _plain(30, "BF16", 2, "bfloat16"),
        _plain(28, "F64", 8, "float64"),
        _blocks(2, "Q4_0", 32, 18, "int4"),
        _blocks(3, "Q4_1", 32, 20, "q4_1"),
        _blocks(6, "Q5_0", 32, 22, "int8"),
        _blocks(7, "Q5_1", 32, 24, "q5_1"),
        _blocks(8, "Q8_0", 32, 34, "int8"),
        _blocks(10, "Q2_K", 256, 84, "q2_k"),
        _blocks(11, "Q3_K", 256, 110, "q3_k"),
        _blocks(12, "Q4_K", 256, 144, "q4_k"),
        _blocks(13, "Q5_K", 256, 176, "q5_k"),
        _blocks(14, "Q6_K", 256, 210, "q6_k"),
        _blocks(20, "IQ4_NL", 32, 18, "int8"),
        _blocks(23, "IQ4_XS", 256, 136, "iq4_xs"),
        _blocks(39, "MXFP4", 32, 17, "mxfp4"),
        *(_plain(24 + i, f"I{8 << i}", 1 << i) for i in range(4)),
        _refused(9, "Q8_1", 32, 36),
        _refused(15, "Q8_K", 256, 292),
        _refused(16, "IQ2_XXS", 256, 66),
        _refused(17, "IQ2_XS", 256, 74),
        _refused(18, "IQ3_XXS", 256, 98),
        _refused(19, "IQ1_S", 256, 50),
        _refused(21, "IQ3_S", 256, 110),
        _refused(22, "IQ2_S", 256, 82),
        _refused(29, "IQ1_M", 256, 56),
        _refused(34, "TQ1_0", 256, 54),
        _refused(35, "TQ2_0", 256, 66),
        _refused(40, "NVFP4", 64, 36),
        _refused(41, "Q1_0", 128, 18),
        _refused(42, "Q2_0", 64, 18),
    )
}
BY_NAME = {row.name: row for row in BLOCK_TYPES.values()}
READ_NAMES = tuple(row.name for row in BLOCK_TYPES.values() if row.decoded)
REMEDY = "use another file of the model, such as Q4_K_M or Q8_0, or its safetensors"


def find_type(id: int, subject: str) -> BlockType:
    """Return the row of a type. Raises CheckpointError if it is unknown or not read."""
    row = BLOCK_TYPES.get(id)
    if row is None:
        raise CheckpointError(subject, f"has the unknown type {id}", REMEDY)
    if not row.decoded:
        raise CheckpointError(
            subject,
            f"has the unsupported type {row.name}; supported are {', '.join(READ_NAMES)}",
            REMEDY,
        )
    return row
