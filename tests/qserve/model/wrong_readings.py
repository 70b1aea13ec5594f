"""Changes of a decoder as a wrong reading of a config or of weights would make them."""

from dataclasses import replace

import torch

from qkernels.moe.routing import SILU
from qkernels.rowwise.spec import ActSpec
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.norm import Norm
from qserve.model.blocks.rotary import Rotary
from qserve.model.blocks.shared_attention import SharedAttention


def every_layer(change):
    def apply(decoder):
        for layer in decoder.layers:
            change(layer)

    return apply


def moved_window(by):
    def change(layer):
        if layer.attention.window is not None:
            layer.attention.window += by

    return every_layer(change)


def swapped(first, second):
    """Exchange two weights of a layer."""

    def change(layer):
        a, b = (layer.get_submodule(name) for name in (first, second))
        a.weight, b.weight = b.weight, a.weight

    return every_layer(change)


def without_offset(decoder):
    for norm in norms_of(decoder):
        if norm.weight is not None:
            norm.weight -= 1


def other_rotation(layer):
    layer.attention.rotary.interleaved = not layer.attention.rotary.interleaved


def whole_rotation(layer):
    """Twice the channels of a head rotate."""
    rotary = layer.attention.rotary
    rotary.cos_sin = rotary.cos_sin.repeat_interleave(2, 1)


def keys_for_values(layer):
    """Exchange the rows of keys and of values."""
    linear = layer.attention.qkv_proj
    q, k, v = linear.weight.chunk(3)
    linear.weight = torch.cat([q, v, k])


def set_attention(**values):
    def change(layer):
        for name, value in values.items():
            setattr(layer.attention, name, value)

    return every_layer(change)


def set_decoder(**values):
    def change(decoder):
        for name, value in values.items():
            setattr(decoder, name, value)

    return change


def exchanged_rotations(decoder):
    """Layers that slide get the table of those that do not, and the other way round."""
    first, second = dict.fromkeys(layer.attention.rotary for layer in decoder.layers)
    for layer in decoder.layers:
        layer.attention.rotary = second if layer.attention.rotary is first else first


def no_branch_factor(layer):
    layer.attention_end.factor = layer.mlp_end.factor = 1.0


def moved_positions(decoder):
    decoder.embedding.positions = decoder.embedding.positions.roll(2, 0)


def alternating_positions(decoder):
    """The sine of a frequency, its cosine, then those of the next."""
    halves = decoder.embedding.positions.chunk(2, 1)
    decoder.embedding.positions = torch.stack(halves, 2).flatten(1)


def filled_padding(decoder):
    """The padding token's row as the next one, not zeros."""
    row = decoder.embedding.positions.abs().sum(1).argmin()
    decoder.embedding.positions[row] = decoder.embedding.positions[row + 1]


def norms_of(decoder):
    return [each for each in decoder.modules() if type(each).__name__ == "Norm"]


def without_biases(decoder):
    for norm in norms_of(decoder):
        norm.bias = None


def set_norms(**values):
    def change(decoder):
        for norm in norms_of(decoder):
            for name, value in values.items():
                setattr(norm, name, value)
            norm._spec = norm._made_spec()

    return change


def other_activation(layer):
    layer.mlp.activation = ActSpec(kind="gelu", gated=False)


def relu(layer):
    layer.mlp.activation = ActSpec(kind="relu", gated=False)


def in_sequence(decoder):
    """Each layer as one whose feed-forward follows attention."""
    for number, layer in enumerate(decoder.layers):
        decoder.layers[number] = Layer(
            attention_norm=layer.norm,
            attention=layer.attention,
            mlp_norm=layer.norm,
            mlp=layer.mlp,
        )


def one_norm(layer):
    layer.mlp_norm = None


def swapped_norms(layer):
    layer.norm, layer.mlp_norm = layer.mlp_norm, layer.norm


def without_head_bias(decoder):
    decoder.head.bias = None


def plain_relu(layer):
    layer.mlp.activation = ActSpec(kind="relu", gated=False)


def by_scores_alone(layer):
    layer.mlp.router.correction.zero_()


def unnormalized(layer):
    """Routing weights as softmax over all experts gives them."""
    routing = layer.mlp.router.routing
    layer.mlp.router.routing = replace(routing, scores="softmax", normalized=False)


def exchanged_slopes(layer):
    """Slopes in the order of the powers of two."""
    layer.attention.slopes = layer.attention.slopes.sort(descending=True).values


def unscaled_slopes(layer):
    layer.attention.slopes *= layer.attention.head_dim**0.5


def usual_epsilon(layer):
    """Norms after branches take the epsilon of the norms before them."""
    for end in (layer.attention_end, layer.mlp_end):
        end.norm = Norm(end.norm.weight, layer.attention_norm.eps)


def open_gates(layer):
    """Each gate is a half: sigmoid(0)."""
    attention = layer.attention
    queries = attention.num_heads * attention.head_dim
    attention.qkv_proj.weight[queries : 2 * queries] = 0


def longer_chunk(layer):
    if layer.attention.chunk_size is not None:
        layer.attention.chunk_size += 1


def scaled_outputs(layer):
    layer.mlp.scales_inputs = False


def unscaled(layer):
    layer.factor.fill_(1.0)


def values_of_normed_keys(layer):
    """Values multiplied as keys are, where keys are values."""
    if layer.attention.keys_are_values:
        layer.attention.v_norm = layer.attention.k_norm


def exchanged_inputs(decoder):
    """Each layer gets the next layer's input."""
    right = decoder.layer_inputs.forward
    decoder.layer_inputs.forward = lambda *given: right(*given).roll(-1, 1)


def without_input(layer):
    layer.layer_input = None


def other_gate(layer_input):
    layer_input.activation = ActSpec(kind="silu", gated=False)


def without_rotation(layer):
    rotary = layer.attention.rotary
    layer.attention.rotary = Rotary(rotary.cos_sin[:, :0], rotary.interleaved)


def router_of(change):
    """`change` of each router of experts next to a feed-forward."""
    return every_layer(lambda layer: change(layer.mlp.experts.router))


def router_reads_experts_input(layer):
    """The router reads what the experts read, as in other families."""
    experts, right = layer.mlp.experts, layer.mlp.experts.forward
    experts.forward = lambda x_TC, plan, routed_TC: right(x_TC, plan, x_TC)


def experts_read_dense_input(layer):
    layer.mlp.experts_norm = layer.mlp_norm


def sum_of_branches_without_norms(layer):
    layer.mlp.experts_end.norm = None


def shared_layers(change):
    """`change` of each layer that reads keys and values of an earlier one."""

    def apply(decoder):
        found = [layer for layer in decoder.layers if isinstance(layer.attention, SharedAttention)]
        assert len(found) == 3
        for layer in found:
            change(layer)

    return apply


def swish(layer):
    prepared = layer.mlp.experts.experts
    layer.mlp.experts.experts = replace(prepared, glu=SILU)


def set_xielu(**values):
    def change(layer):
        for name, value in values.items():
            getattr(layer.mlp, name).fill_(value)

    return every_layer(change)


def exchanged_slopes_of_xielu(layer):
    layer.mlp.alpha_p, layer.mlp.alpha_n = layer.mlp.alpha_n, layer.mlp.alpha_p


def without_embedding_norm(decoder):
    decoder.embedding.norm = None


def without_shared(layer):
    layer.mlp.shared = None


def plain_embedding(decoder):
    decoder.embedding.factor = 1.0


def set_routing(**values):
    """Other rules of the routers of experts."""

    def change(decoder):
        for layer in decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if router is not None:
                router.routing = replace(router.routing, **values)

    return change


def turned_rotation(decoder):
    """Pairs turn the other way."""
    rotary = decoder.layers[0].attention.rotary
    half = rotary.cos_sin.shape[1] // 2
    rotary.cos_sin[:, half:].neg_()


def without_norms_after(layer):
    layer.attention_end.norm = layer.mlp_end.norm = None


def other_streams(name, change):
    """`change` of a matrix of the streams."""

    def apply(decoder):
        setattr(decoder.streams, name, change(getattr(decoder.streams, name)))

    return apply


def without_laurel(layer):
    layer.laurel.right.zero_()


def without_sparsity(layer):
    if hasattr(layer.mlp, "deviations"):
        layer.mlp.deviations = -1e4  # nothing is left out, and all gates are large
