"""Quantized folders of kinds that no golden folder has, made of random weights: one row each.

A model has one layer. Linears are written by the project's codecs, or by hand where it only reads.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import round_to_nearest
from formats.layouts import encode_linear, find_layout
from formats.numerics.bits import pack
from formats.quant_config import QuantConfig
from formats.scheme import QuantSpec, Scheme
from tests.formats.damaged.kinds import BLOCK, Folder
from tests.formats.other_tools.test_vendor_formats import KINDS as VENDORS

H, INNER, EXPERTS = 64, 128, 4
LAYER = "model.layers.0"
ATTENTION = {f"self_attn.{name}_proj": (H, H) for name in "qkvo"}
FEED_FORWARD = {"gate_proj": (INNER, H), "up_proj": (INNER, H), "down_proj": (H, INNER)}
SIZES = {
    **{"hidden_size": H, "intermediate_size": INNER, "vocab_size": 64, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
    **{"max_position_embeddings": 128, "rms_norm_eps": 1e-6, "hidden_act": "silu"},
    **{"rope_theta": 10000.0, "tie_word_embeddings": False, "dtype": "float16"},
}
MIXTURE = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
    **{"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER},
    **{"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
}
STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(0.1).half()


def shapes(experts: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Every linear of the layer; 0 experts: a dense feed-forward."""
    for local, shape in ATTENTION.items():
        yield f"{LAYER}.{local}", shape
    parents = [f"mlp.experts.{number}" for number in range(experts)] or ["mlp"]
    for parent in parents:
        for local, shape in FEED_FORWARD.items():
            yield f"{LAYER}.{parent}.{local}", shape


Fields = Callable[[str, tuple[int, int]], dict[str, torch.Tensor]]


def model(block: dict[str, Any], fields_of: Fields, *, experts: int = 0) -> Folder:
    """A folder whose linears have these tensors by local name."""
    tensors = {
        "model.embed_tokens.weight": random(64, H),
        "lm_head.weight": random(64, H),
        "model.norm.weight": torch.ones(H).half(),
        f"{LAYER}.input_layernorm.weight": torch.ones(H).half(),
        f"{LAYER}.post_attention_layernorm.weight": torch.ones(H).half(),
    }
    if experts:
        tensors[f"{LAYER}.mlp.gate.weight"] = random(experts, H)
        for name in ("q_norm", "k_norm"):
            tensors[f"{LAYER}.self_attn.{name}.weight"] = torch.ones(16).half()
    for module, shape in shapes(experts):
        for field, tensor in fields_of(module, shape).items():
            tensors[f"{module}.{field}"] = tensor.contiguous()
    config = {**SIZES, **(MIXTURE if experts else LLAMA), BLOCK: block}
    return Folder(config=config, tensors=tensors, metadata={"format": "pt"})


def written(layout: str, scheme: str, *, experts: int = 0) -> Folder:
    """A folder of a format that the project writes."""
    parsed, row = Scheme.parse(scheme), find_layout(layout)
    is_static = parsed.activation is not None and not parsed.activation.dynamic

    def fields(module: str, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        weight = round_to_nearest(random(*shape), parsed.weight, module)
        return encode_linear(weight, parsed, row, module, 0.1 if is_static else None)

    schemes = dict.fromkeys((module for module, _ in shapes(experts)), parsed)
    return model(QuantConfig.of_modules(layout, schemes).to_dict(), fields, experts=experts)


def stacked(scheme: str) -> Folder:
    """Experts in one tensor per projection, as llm-compressor repacks them."""
    folder = written("compressed-tensors", scheme, experts=EXPERTS)
    stem = f"{LAYER}.mlp.experts"
    for stack, leaves in STACKS.items():
        for field in ("weight_packed", "weight_scale", "weight_global_scale", "weight_shape"):
            names = [[f"{stem}.{e}.{leaf}.{field}" for leaf in leaves] for e in range(EXPERTS)]
            if names[0][0] not in folder.tensors:
                continue
            parts = [[folder.tensors.pop(name) for name in row] for row in names]
            dtype = parts[0][0].dtype
            experts = [torch.cat([part.view(torch.uint8) for part in row]) for row in parts]
            folder.tensors[f"{stem}.{stack}.{field}"] = torch.stack(experts).view(dtype)
    folder.module = f"{stem}.gate_up_proj"
    return folder


def awq_gemv() -> Folder:
    """Zeros and scales padded to 32 groups."""
    spec = QuantSpec(bits=4, symmetric=False, group_size=32)

    def fields(module: str, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        weight = PackedWeight.from_float(random(*shape), spec)
        padding = (0, 32 - weight.num_groups)
        return {
            "qweight": weight.words_NW,
            "qzeros": pack(torch.nn.functional.pad(weight.zeros_NG, padding), 4),
            "scales": torch.nn.functional.pad(weight.scales_NG, padding),
        }

    block = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    return model({**block, "version": "gemv"}, fields)


def native_fp8(size: int | None) -> Folder:
    """Float8 with a scale for each block of size x size, or for the whole weight."""

    def fields(module: str, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        codes = random(*shape).float().mul_(1000).clamp_(-448, 448).to(torch.float8_e4m3fn)
        if size is None:
            return {"weight": codes, "weight_scale": torch.tensor(0.001)}
        scales = torch.full((shape[0] // size, shape[1] // size), 0.001)
        return {"weight": codes, "weight_scale_inv": scales}

    block: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if size is not None:
        block["weight_block_size"] = [size, size]
    return model({**block, "modules_to_not_convert": ["lm_head"]}, fields)


def of_vendor(kind: str) -> Folder:
    """A format of another tool, as the tests of its decoder write it."""
    block, tensors_of = VENDORS[kind]
    return model(block, lambda module, shape: tensors_of(*shape)[0])


MADE_HERE: dict[str, Callable[[], Folder]] = {
    "gptq-v2-w4-asym": partial(written, "gptq", "w4a16-asym-g32"),
    "gptq-w8a8": partial(written, "gptq", "w8a8"),
    "awq-w4-sym": partial(written, "awq", "w4a16-sym-g32"),
    "awq-gemv": awq_gemv,
    "compressed-w4-asym": partial(written, "compressed-tensors", "w4a16-asym-g32"),
    "compressed-w3": partial(written, "compressed-tensors", "w3a16-sym-g32"),
    "compressed-w4a8": partial(written, "compressed-tensors", "w4a8-g32"),
    "compressed-w8a8-static": partial(written, "compressed-tensors", "w8a8-static"),
    "compressed-fp8-static": partial(written, "compressed-tensors", "w8a8-fp8-static"),
    "compressed-mxfp4": partial(written, "compressed-tensors", "w4a16-mxfp4"),
    "compressed-nvfp4": partial(written, "compressed-tensors", "w4a16-nvfp4"),
    "compressed-mxfp6": partial(of_vendor, "mxfp6"),
    "quark-int4": partial(of_vendor, "quark-int4"),
    "fp8-blocks": partial(native_fp8, 16),
    "fp8-tensor": partial(native_fp8, None),
    "stacked-w4": partial(stacked, "w4a16-sym-g32"),
    "stacked-nvfp4": partial(stacked, "w4a16-nvfp4"),
}
