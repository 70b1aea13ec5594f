"""Experts of a family's row: linears, router, shared expert, and the layers that have them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from formats.architecture.flags import Flag
from formats.architecture.projection import Projection, Shape
from formats.architecture.sizes import layer_numbers
from formats.errors import config_error

# key of config.json with the type of each layer's experts, and the type with a table of tokens
HASHED_KEY, HASHED = "mlp_layer_types", "hash_moe"
MEDIA_ROUTER = "weight_1"  # name below the router of the weight for tokens of media


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Routing of tokens to experts. It stays in float."""

    name: str = "gate"  # below the module
    # In transformers the router is a Linear, which counts as quantized unless the file lists it.
    is_linear: bool = False
    # Function of x @ weight. softmax_of_chosen: softmax over the chosen experts' logits only;
    # sigmoid_of_chosen: experts are chosen by logits, to which the correction is added;
    # sparsemixer: softmax over the logits near each chosen one (qkernels/moe/routing.py).
    scores: Literal[
        "softmax",
        "sigmoid",
        "sqrtsoftplus",
        "softmax_of_chosen",
        "sigmoid_of_chosen",
        "sparsemixer",
    ] = "softmax"
    jitter_key: str = ""  # key of config.json: jitter of sparsemixer
    normalized: Flag = False  # routing weights of the active experts are normalized to sum to 1
    float32: bool = False  # x @ weight is computed in float32
    rounded: bool = False  # routing weights are rounded to the activations' dtype
    bias: bool = False  # x @ weight has a bias
    correction: str = ""  # tensor below the module that is added to scores for the choice only
    correction_is_row: bool = False  # the correction is stored as [1, experts]
    # Tensor below the module with the experts of each token, integers [tokens, experts of a token].
    # Layers of the type `hash_moe` (mlp_layer_types) have it and no correction: scores only weigh
    # the experts.
    table: str = ""
    # Experts form n_group groups. Only the topk_group best groups take part in the choice, ranked
    # by a group's best score or by the sum of its two best.
    group_score: Literal["", "max", "top2"] = ""
    grouped: Flag = True  # False: all experts are one group
    factor_key: str = ""  # key of config.json: factor of the routing weights
    # Tensor of the layer. The router reads the residual stream, normalized without weights, times
    # this tensor and hidden_size^-0.5. Empty: the router reads the experts' input.
    input_scale: str = ""
    expert_scale: str = ""  # tensor of the layer: a factor of each expert's routing weight
    scale: str = ""  # tensor below the module: a factor of all routing weights


@dataclass(frozen=True, slots=True, kw_only=True)
class AlwaysActive:
    """Experts that every token uses and that the router weighs together with the chosen ones.

    They follow the other experts: the number of experts (`num_experts`) includes them, the router's
    weight has rows for them, and its correction has none.
    """

    count_key: str  # key of config.json: their number
    # Module below the layer with a tensor for gate, up and down of all of them. The reader presents
    # the linears of each expert.
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """Shared expert, which processes every token."""

    gate_up: Projection
    down: Projection
    gate: str = ""  # linear with one output, whose sigmoid multiplies the expert's output

    @property
    def gate_projection(self) -> Projection | None:
        """The gate as a projection, which is never quantized; None: there is no gate."""
        if not self.gate:
            return None
        return Projection(name=self.gate, members=((self.gate, "one"),), inputs="hidden_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts that replaces a layer's feed-forward, or is next to it."""

    # name in the checkpoint (transformers calls it `mlp`); empty: router and experts are directly
    # below the layer
    module: str
    gate_up: Projection
    down: Projection
    routing: Router
    shared: SharedExpert | None = None
    always: AlwaysActive | None = None
    # One tensor holds the matrices of all experts, transposed, with biases; gate and up alternate.
    # In MXFP4 there is a pair of tensors instead, not transposed.
    fused: bool = False
    # Names below the layer of two tensors that hold gate and up [E, 2 I, H] and down [E, H, I] of
    # all experts, or of three, each for one linear; the reader presents the linears of each expert
    # (expert_stacks.py).
    stacks: tuple[str, ...] = ()
    stacks_transposed: bool = False  # the stacks are [E, H, 2 I] and [E, I, H]
    # Float files have the stacks alone: transformers does not read linears of a single expert.
    stacks_only: bool = False
    # Linears before and after the experts, which read the output of the first. Router and shared
    # expert read the layer's input.
    latent: tuple[Projection, ...] = ()
    # Size of the features of experts for the tokens of images and videos. They are the second half
    # of the experts, and have a router of their own; the first half is for other tokens. Both
    # routers are stored as [inputs, outputs]. Empty: all experts are for all tokens.
    media_inner: str = ""
    with_dense: bool = False  # layers with experts also have a dense feed-forward
    # The routing weight multiplies an expert's input instead of its output; a token has one expert.
    scaled_inputs: bool = False
    # (up + 1) * gate * sigmoid(swiglu_alpha * gate), within swiglu_limit. This holds for the shared
    # expert and for layers without experts, too.
    clamped: bool = False
    limits_key: str = ""  # like Family.limits_key, for these experts
    limits_gates: bool = False  # the limit clamps gates before their activation, not its result
    # Keys of config.json for the layers with a dense feed-forward instead: a list of layers; all
    # layers before a number; all layers except every n-th.
    dense_layers_key: str = ""
    first_dense_key: str = ""
    every_key: str = ""
    types_key: str = ""  # a list with "sparse" for each layer with experts

    @property
    def gated(self) -> bool:
        """True if gate_up computes gate and up, False if only up."""
        return len(self.gate_up.members) == 2

    @property
    def router(self) -> str:
        """Name of the router's linear."""
        return self._below(self.routing.name)

    @property
    def stem(self) -> str:
        """Name of the module that holds only the experts."""
        return self._below("experts")

    def _below(self, name: str) -> str:
        return f"{self.module}.{name}" if self.module else name

    def alpha_and_limit(self, config: Mapping[str, Any]) -> tuple[float, float]:
        """Return the numbers of a `clamped` activation.

        gpt-oss checkpoints have no `swiglu_alpha`. Older transformers have the value in the model
        code, newer ones have the same value as a default of the config class.
        """
        return config.get("swiglu_alpha", 1.702), config.get("swiglu_limit", 7.0)

    def is_in(self, layer: int, config: Mapping[str, Any]) -> bool:
        """Return True if a layer has experts. Raises CheckpointError for values of other types."""
        if layer in layer_numbers(config, self.dense_layers_key):
            return False
        types = config.get(self.types_key)
        if isinstance(types, list) and layer < len(types) and types[layer] != "sparse":
            return False
        if layer < _count(config, self.first_dense_key, 0):
            return False
        return (layer + 1) % _count(config, self.every_key, 1) == 0

    def of_number(self, number: int, count: int) -> tuple[Projection, Projection]:
        """Return gate_up and down of one of `count` experts."""
        found = self.gate_up.expert(number), self.down.expert(number)
        if not self.media_inner or number < (count + 1) // 2:
            return found
        first, last = (each.with_size(self.down.inputs, self.media_inner) for each in found)
        return first, last

    def has_table(self, layer: int | None, config: Mapping[str, Any]) -> bool:
        """Return True if a table of the layer has the experts of each token."""
        kinds = config.get(HASHED_KEY)
        if not self.routing.table or layer is None or not isinstance(kinds, list):
            return False
        return layer < len(kinds) and kinds[layer] == HASHED

    def tensors(self, config: Mapping[str, Any], layer: int | None = None) -> dict[str, Shape]:
        """Return all tensors except the experts' linears, by name below the layer."""
        if self.media_inner:
            half = ("moe_num_experts",)
            shape = ("hidden_size",), half
            return {
                f"{self.router}.weight": shape,
                f"{self.router}.{MEDIA_ROUTER}": shape,
                self._below(self.routing.correction): (("one", "one"), half),
            }
        E = ("num_experts",)
        shapes: dict[str, Shape] = {f"{self.router}.weight": (E, ("hidden_size",))}
        if self.routing.bias:
            shapes[f"{self.router}.bias"] = (E,)
        if self.has_table(layer, config):
            shapes[self._below(self.routing.table)] = (("vocab_size",), ("num_experts_per_tok",))
        elif self.routing.correction:
            row = (("one",), E) if self.routing.correction_is_row else (E,)
            row = row if self.always is None else (("n_routed_experts",),)
            shapes[self._below(self.routing.correction)] = row
        if self.routing.scale:
            shapes[self._below(self.routing.scale)] = (("one",),)
        if self.routing.input_scale:
            shapes[self.routing.input_scale] = (("hidden_size",),)
        if self.routing.expert_scale:
            shapes[self.routing.expert_scale] = (E,)
        if self.fused:
            C, inner = ("hidden_size",), (self.down.inputs,)
            both, stem = inner * 2, self.stem
            shapes |= {
                f"{stem}.gate_up_proj": (E, C, both),
                f"{stem}.gate_up_proj_bias": (E, both),
                f"{stem}.down_proj": (E, inner, C),
                f"{stem}.down_proj_bias": (E, C),
            }
        if self.shared and self.shared.gate:
            shapes[f"{self.shared.gate}.weight"] = (("one",), ("hidden_size",))
        return shapes


def _count(config: Mapping[str, Any], key: str, default: int) -> int:
    """Return a number of layers that config.json states, or `default`. Raises CheckpointError."""
    found = config.get(key) or default
    if not isinstance(found, int) or found < 0:
        raise config_error(key, "a whole number of 0 or more", found)
    return found
