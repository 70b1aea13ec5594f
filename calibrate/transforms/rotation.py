"""Fold rotations into the weights, to spread outliers over all channels before rounding.

Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs" (2024): R1 rotates the
residual stream, R2 each value head. First the weights of norms are folded into the linears after
them. Inference needs no extra work, but embedding and head can no longer be tied.
"""

from functools import lru_cache

import torch

from calibrate.layer_map import ScalePair
from calibrate.solvers.solving import LayerContext, LayerState, Transform
from formats.errors import InputError


@lru_cache(maxsize=4)
def rotation_matrix(size: int, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return a random orthogonal matrix [size, size], float64.

    It is the Kronecker product of a Hadamard matrix for the power of two in `size` and a random
    orthogonal matrix for the odd factor, with random signs of the rows.
    """
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (size,), generator=generator).double().mul_(2).sub_(1)
    odd = size
    while odd % 2 == 0:
        odd //= 2
    matrix = torch.ones(1, 1, dtype=torch.float64)
    if odd > 1:
        normal = torch.randn(odd, odd, generator=generator, dtype=torch.float64)
        matrix = torch.linalg.qr(normal)[0].contiguous()
    while matrix.shape[0] < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double() / 2**0.5, matrix)
    return (signs[:, None] * matrix).to(device)


def rotate_model(tensors: LayerState, context: LayerContext) -> LayerState:
    """Rotate the embedding and the head by R1, after folding the last norm into the head.

    Raises InputError for an architecture that cannot be rotated.
    """
    layer_map = context.layer_map
    if not layer_map.rotatable:
        raise InputError(
            f"architecture {context.config['architectures'][0]!r}",
            "has layer norms, or norms, routers or gates between its linears, so rotations cannot"
            " be folded",
            "use another recipe",
        )
    embedding, norm, head = (
        tensors[name] for name in (layer_map.embedding, layer_map.last_norm, layer_map.head)
    )
    rotation_DD = rotation_matrix(embedding.shape[1], context.seed, embedding.device)
    gain_D = norm.double() + layer_map.norm_offset
    return {
        layer_map.embedding: (embedding.double() @ rotation_DD).to(embedding.dtype),
        layer_map.last_norm: torch.full_like(norm, 1 - layer_map.norm_offset),
        layer_map.head: ((head.double() * gain_D) @ rotation_DD).to(head.dtype),
    }


def rotate_layer(state: LayerState, context: LayerContext) -> LayerState:
    """Fold a layer's norms into the linears after them, and R1 and R2 into all linears."""
    changed: LayerState = {}
    weights = {
        name: state[f"{name}.weight"].double()
        for group in context.layer_map.inputs(context.config, context.layer)
        for name in group
    }
    for pair in context.scale_pairs:
        if pair.kind == "norm":
            norm = state[f"{pair.previous}.weight"]
            for name in pair.linears:
                weights[name] = weights[name] * (norm.double() + context.layer_map.norm_offset)
            changed[f"{pair.previous}.weight"] = torch.full_like(
                norm, 1 - context.layer_map.norm_offset
            )
    biases = {name: state[f"{name}.bias"].double() for name in weights if f"{name}.bias" in state}
    for pair in context.scale_pairs:
        if pair.kind == "values":
            _rotate_heads(pair, weights, biases, context)
    reading = {n for p in context.scale_pairs if p.kind == "norm" for n in p.linears}
    for name, weight_NK in weights.items():
        size = weight_NK.shape[1 if name in reading else 0]
        rotation_DD = rotation_matrix(size, context.seed, weight_NK.device)
        if name in reading:
            weights[name] = weight_NK @ rotation_DD
        else:
            weights[name] = rotation_DD.t() @ weight_NK
            if name in biases:
                biases[name] = biases[name] @ rotation_DD
    changed |= {f"{name}.weight": weight.float() for name, weight in weights.items()}
    for name, bias in biases.items():
        changed[f"{name}.bias"] = bias.to(state[f"{name}.bias"].dtype)
    return changed


def _rotate_heads(
    pair: ScalePair, weights: LayerState, biases: LayerState, context: LayerContext
) -> None:
    """Apply R2 to each value head's outputs, and its inverse to the linears that read them."""
    heads, repeats = context.value_heads
    previous = weights[pair.previous]
    width = weights[pair.linears[0]].shape[1] // (heads * repeats)
    rotation_DD = rotation_matrix(width, context.seed + 1, previous.device)
    kept = previous.shape[0] - heads * width  # rows of a fused projection with queries and keys
    values = previous[kept:].unflatten(0, (heads, width))
    values = torch.einsum("hdk,de->hek", values, rotation_DD).flatten(0, 1)
    weights[pair.previous] = torch.cat([previous[:kept], values])
    if pair.previous in biases:
        bias = biases[pair.previous]
        rotated = (bias[kept:].view(heads, width) @ rotation_DD).flatten()
        biases[pair.previous] = torch.cat([bias[:kept], rotated])
    for name in pair.linears:
        weight = weights[name].unflatten(1, (-1, width))
        weights[name] = (weight @ rotation_DD).flatten(1)


ROTATE = Transform(name="rotate", on_model=rotate_model, on_load=rotate_layer)
