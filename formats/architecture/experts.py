"""Experts of a family's row: their linears, their router and shared expert, and their layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from formats.architecture.flags import Flag
from formats.architecture.projection import Projection, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Routing of tokens to experts. It stays in float."""

    name: str = "gate"  # below the module
    # transformers has a Linear, which it would take for quantized unless the file says otherwise
    is_linear: bool = False
    # applied to x @ weight; softmax_of_chosen: softmax over the chosen experts' logits only;
    # sparsemixer: over those near each (qkernels/moe/routing.py)
    scores: Literal["softmax", "sigmoid", "softmax_of_chosen", "sparsemixer"] = "softmax"
    jitter_key: str = ""  # key of config.json, of sparsemixer
    normalized: Flag = False  # routing weights of the active experts are normalized to sum to 1
    float32: bool = False  # x @ weight is computed in float32
    rounded: bool = False  # routing weights are rounded to the activations' dtype
    bias: bool = False  # of the product
    correction: str = ""  # tensor below the module that is added to scores for the choice only
    correction_is_row: bool = False  # it is stored as [1, experts]
    # Experts form n_group groups; topk_group of them are kept, ranked by a group's best score or by
    # the sum of its two best.
    group_score: Literal["", "max", "top2"] = ""
    grouped: Flag = True  # False: all experts are one group
    factor_key: str = ""  # key of config.json: factor of the routing weights
    # It reads the residual stream, normed without weights, times this tensor of the layer and
    # hidden_size^-0.5; empty: it reads what the experts read.
    input_scale: str = ""
    expert_scale: str = ""  # tensor of the layer: a factor of each expert's routing weight


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """Shared expert, which every token uses."""

    gate_up: Projection
    down: Projection
    gate: str = ""  # linear of one output; its sigmoid multiplies the expert's output


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts that replaces a layer's feed-forward, or is next to it."""

    # name in the checkpoint, which transformers calls `mlp`; empty: the layer holds router and
    # experts
    module: str
    gate_up: Projection
    down: Projection
    routing: Router
    shared: SharedExpert | None = None
    # One tensor holds the matrices of all experts, transposed, with biases; gate and up alternate.
    # In MXFP4 it is a pair of tensors, not transposed.
    fused: bool = False
    # Names below the layer of two tensors that hold gate and up [E, 2 I, H] and down [E, H, I] of
    # all experts, or of three, each for one linear; the reader presents the linears of each expert
    # (expert_stacks.py).
    stacks: tuple[str, ...] = ()
    stacks_transposed: bool = False  # those tensors are [E, H, 2 I] and [E, I, H]
    # Linears of a layer before and after the experts, which read what the first one makes. Router
    # and shared expert read the layer's input.
    latent: tuple[Projection, ...] = ()
    with_dense: bool = False  # their layers have a dense feed-forward, too
    # The routing weight multiplies an expert's input instead of its output; a token has one expert.
    scaled_inputs: bool = False
    clamped: bool = False  # (up + 1) * gate * sigmoid(swiglu_alpha * gate), within swiglu_limit
    limits_key: str = ""  # as Family.limits_key, of these experts
    # Keys of config.json for the layers that keep the dense feed-forward: a list of layers; all
    # layers before a number; all but every n-th.
    dense_layers_key: str = ""
    first_dense_key: str = ""
    every_key: str = ""
    types_key: str = ""  # a list: "sparse" for each layer with experts

    @property
    def gated(self) -> bool:
        """Return True if gate_up makes gate and up, False if up alone."""
        return len(self.gate_up.members) == 2

    @property
    def router(self) -> str:
        """Return the router's linear."""
        return self._below(self.routing.name)

    @property
    def stem(self) -> str:
        """Return the module of the experts alone."""
        return self._below("experts")

    def _below(self, name: str) -> str:
        return f"{self.module}.{name}" if self.module else name

    def stand_in(self, layer: int, config: Mapping[str, Any]) -> bool:
        """Return True if a layer has experts."""
        if layer in (config.get(self.dense_layers_key) or ()):
            return False
        types = config.get(self.types_key)
        if isinstance(types, list) and layer < len(types) and types[layer] != "sparse":
            return False
        if layer < (config.get(self.first_dense_key) or 0):
            return False
        return (layer + 1) % (config.get(self.every_key) or 1) == 0

    def tensors(self, config: Mapping[str, Any]) -> dict[str, Shape]:
        """Return the tensors other than the experts' linears, by their names below the layer."""
        E = ("num_experts",)
        shapes: dict[str, Shape] = {f"{self.router}.weight": (E, ("hidden_size",))}
        if self.routing.bias:
            shapes[f"{self.router}.bias"] = (E,)
        if self.routing.correction:
            row = (("one",), E) if self.routing.correction_is_row else (E,)
            shapes[self._below(self.routing.correction)] = row
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
