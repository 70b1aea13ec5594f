"""Folders of torchao, which transformers calls."""

from pathlib import Path

import torch
from makers.golden import Golden, Weights
from makers.linears import by_transformers, projections


def torchao(source: Path, target: Path, kind: str, **options: object) -> Weights:
    from torchao import quantization
    from transformers import TorchAoConfig

    if "group_size" in options:
        name = "weight_granularity" if "Dynamic" in kind else "granularity"
        options[name] = quantization.PerGroup(options.pop("group_size"))
    if "weight_dtype" in options:
        options["weight_dtype"] = getattr(torch, options["weight_dtype"])
    config = TorchAoConfig(getattr(quantization, kind)(**options))
    model = by_transformers(source, target, config)
    return {name: module.weight.dequantize() for name, module in projections(model).items()}


def torchao_tiles(source: Path, target: Path, group_size: int) -> Weights:
    """torchao's layout of one CUDA kernel, written without a GPU.

    Only the permutation is written out here, as PyTorch documents `_convert_weight_to_int4pack`;
    padding, scales, codes, files and the arithmetic of the expected weights are torchao's.
    """
    from torchao import quantization
    from torchao.quantization.quant_primitives import _dequantize_affine_tinygemm
    from torchao.quantization.quantize_.workflows.int4 import int4_tile_packed_to_4d_tensor as tiles
    from transformers import AutoModelForCausalLM, TorchAoConfig

    torch.cuda.get_device_capability = lambda *_: (8, 0)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_convert_weight_to_int4pack", pack_tiles, "CPU")
    dense, expected = [], {}
    quantize, from_hp = tiles._quantize_affine_tinygemm, tiles.Int4TilePackedTo4dTensor.from_hp

    def quantized(weight, block_size, scale, zero, *arguments, **options):
        codes = quantize(weight, block_size, scale, zero, *arguments, **options)
        dense.append(
            _dequantize_affine_tinygemm(codes, block_size, scale, zero, torch.int32, 0, 15)
        )
        return codes

    def packed(*arguments, **options):
        made = from_hp(*arguments, **options)
        expected[made.qdata.numpy().tobytes()] = dense.pop()
        return made

    tiles.Int4TilePackedTo4dTensor.from_hp = packed
    tiles._quantize_affine_tinygemm = quantized
    config = quantization.Int4WeightOnlyConfig(
        group_size=group_size, int4_packing_format="tile_packed_to_4d"
    )
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=TorchAoConfig(config), dtype=torch.bfloat16, device_map="cpu"
    )
    model.save_pretrained(target)
    found = {}
    for name, module in projections(model).items():
        whole, (N, K) = expected[module.weight.qdata.numpy().tobytes()], module.weight.shape
        found[name] = whole[:N, :K].to(torch.bfloat16)
    return found


def pack_tiles(pairs: torch.Tensor, inner_tiles: int) -> torch.Tensor:
    """uint8 [N, K / 2], even inputs in the high half -> int32 [N / 8, K / 16T, 32, T / 2]."""
    rows, pairs_per_row = pairs.shape
    bytes_per_tile = 8 * inner_tiles
    words = torch.zeros(rows // 8, pairs_per_row // bytes_per_tile, 32, inner_tiles // 2)
    words = words.to(torch.int64)
    for tile in range(words.shape[1]):
        for lane in range(32):
            for word in range(words.shape[3]):
                first = tile * bytes_per_tile + 16 * word + lane % 4
                own = pairs[lane // 4 :: 8].long()
                for place, column in enumerate((first, first + 4, first + 8, first + 12)):
                    byte = own[:, column]
                    words[:, tile, lane, word] |= byte >> 4 << 4 * place
                    words[:, tile, lane, word] |= (byte & 15) << 4 * place + 16
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


FOLDERS = {
    f"torchao-{name}": Golden(
        distribution="torchao",
        write=write,
        options=options,
        model="narrow",
        whole=True,
        metadata=True,  # says what each tensor is; torchao reads no file without
    )
    for name, write, options in (
        ("int8", torchao, {"kind": "Int8DynamicActivationInt8WeightConfig"}),
        (
            "int4",
            torchao,
            {"kind": "IntxWeightOnlyConfig", "weight_dtype": "int4", "group_size": 32},
        ),
        ("tiles", torchao_tiles, {"group_size": 32}),
        ("fp8", torchao, {"kind": "Float8WeightOnlyConfig"}),
    )
}
