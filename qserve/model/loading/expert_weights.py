"""Creates routers and experts of a layer from the family's row and the weights.

E: experts. C: hidden size. N: outputs. K: inputs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from formats.architecture.experts import MEDIA_ROUTER, Experts
from formats.architecture.flags import is_set
from formats.architecture.projection import Projection
from formats.architecture.sizes import num_experts, num_experts_key, stated_size
from formats.codecs import mxfp4
from formats.errors import CheckpointError, config_error
from formats.in_memory.shards import Shard
from formats.in_memory.slices import take_inputs
from formats.in_memory.weights import merge
from formats.scheme import Scheme
from qkernels.moe.experts import ExpertMatrix, ExpertWeights
from qkernels.moe.routing import GEGLU, RELU2, SILU, Glu, Routing
from qserve.model.blocks.moe import Router, TableRouter
from qserve.model.tp_plan import WHOLE, LinearPart, LinearShard

ALWAYS = 1e9  # added to the scores of experts that every token uses
_GLUS = {"silu": SILU, "gelu_pytorch_tanh": GEGLU}
STACKED_ENDS = ("", "_bias", "_blocks", "_scales")  # suffixes of tensors that stack all experts
MXFP4 = Scheme(weight=mxfp4.SPEC)  # scheme of a decoded MXFP4 weight


def routing_of(experts: Experts, config: Mapping[str, Any]) -> Routing:
    """Return the routing rule of a family's row, with values from config.json."""
    rule, groups = experts.routing, {}
    if rule.group_score and is_set(rule.grouped, config):
        groups = {
            "num_groups": stated_size(config, "n_group"),
            "top_groups": stated_size(config, "topk_group"),
            "group_score": rule.group_score,
        }
    count = stated_size(config, num_experts_key(config))
    return Routing(
        # of those for text, or of as many for tokens of media
        num_experts=count // 2 if experts.media_inner else count,
        top_k=stated_size(config, "num_experts_per_tok") + _num_always(experts, config),
        scores=rule.scores,
        jitter=config.get(rule.jitter_key, 0.0),
        normalized=is_set(rule.normalized, config),
        factor=_factor(config, rule.factor_key),
        rounded=rule.rounded,
        **groups,
    )


def _num_always(experts: Experts, config: Mapping[str, Any]) -> int:
    """Return the number of experts that every token uses besides those that it chooses."""
    return 0 if experts.always is None else stated_size(config, experts.always.count_key)


def correction_of(weights: Any, prefix: str, num_experts: int) -> torch.Tensor | None:
    """Return float32 [E], which is added to scores for the choice; None: nothing is added."""
    experts = weights.family.experts
    rule, values = experts.routing, weights.config.values
    if not rule.correction:
        return None
    always = _num_always(experts, values)
    row = (1, num_experts) if rule.correction_is_row else (num_experts - always,)
    stored = weights.source.tensor(f"{prefix}.{experts.module}.{rule.correction}", row).flatten()
    found = stored.to(weights.device, torch.float32)
    return torch.nn.functional.pad(found, (0, always), value=ALWAYS) if always else found


def scaled(weights: Any, prefix: str, routing: Routing) -> Routing:
    """Return the routing rule with the layer's learned factor of all routing weights, if any."""
    experts = weights.family.experts
    if not experts.routing.scale:
        return routing
    name = f"{prefix}.{experts.module}.{experts.routing.scale}"
    factor = weights.source.tensor(name, (1,)).item()
    return replace(routing, factor=routing.factor * factor)


def _factor(config: Mapping[str, Any], key: str) -> float:
    """Return a factor of config.json, 1 without the key. Raises CheckpointError for no number."""
    value = config.get(key, 1.0)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise config_error(key, "a number", value)
    return value


def glu_of(
    experts: Experts, activation: str, config: Mapping[str, Any], limit: float | None = None
) -> Glu:
    """Return the activation between the two matrices of an expert.

    `limit`: value of the layer under `limits_key`.
    """
    if experts.clamped:
        alpha, limit = experts.alpha_and_limit(config)
        return Glu(alpha=alpha, offset=1.0, limit=limit)
    if limit is not None:
        return Glu(limit=limit, cut_after=not experts.limits_gates)
    return _GLUS[activation] if experts.gated else RELU2


def table_router(
    weights: Any, name: str, shape: tuple[int, int], table: str, routing: Routing
) -> TableRouter:
    """Return a router by a table. Raises CheckpointError for experts that do not exist.

    `name`: tensor of the router's weight. `table`: tensor of the experts of each token.
    """
    sizes = weights.config.vocab_size, routing.top_k
    stored_Vk = weights.source.tensor(table, sizes, integers=True)
    if stored_Vk.is_floating_point() or not (
        int(stored_Vk.min()) >= 0 and int(stored_Vk.max()) < routing.num_experts
    ):
        raise CheckpointError(
            table,
            f"expected integers from 0 to {routing.num_experts - 1}, numbers of experts",
            "copy it from the float model",
        )
    table_Vk = stored_Vk.to(weights.device, torch.int32)
    return TableRouter(routing, weights.tensor(name, shape), table_Vk)


def media_routers(
    weights: Any, prefix: str, experts: Experts, *, fixed_order: bool
) -> tuple[Router, Router]:
    """Return the routers of a layer's experts for text and of those for tokens of media.

    `weights`: qserve.model.loading.weights.Weights.
    """
    routing, rule = routing_of(experts, weights.config.values), experts.routing
    E = routing.num_experts
    stored = f"{prefix}.{experts.module}.{rule.correction}"
    corrections_2E = weights.source.tensor(stored, (2, E)).to(weights.device, torch.float32)
    found = []
    for name, correction_E in zip(("weight", MEDIA_ROUTER), corrections_2E, strict=True):
        stored = f"{prefix}.{experts.router}.{name}"
        weight_CE = weights.tensor(stored, (weights.config.hidden_size, E))
        weight_EC = weight_CE.float().T.contiguous() if rule.float32 else weight_CE.T
        found.append(
            Router(routing, weight_EC, correction_E=correction_E.clone(), fixed_order=fixed_order)
        )
    return found[0], found[1]


def expert_weights(
    weights: Any, prefix: str, layer: int, *, of_media: bool = False
) -> ExpertWeights:
    """Return this rank's experts of the layer `prefix`. `weights`: loading.weights.Weights.

    `of_media`: those for tokens of media, in families that have such experts.
    """
    experts, config = weights.family.experts, weights.config.values
    routing = routing_of(experts, config)
    limit = weights.config.limit(experts.limits_key, layer)
    glu = glu_of(experts, weights.config.activation, config, limit)
    E, here = routing.num_experts, weights.tp_plan.experts(layer)
    weights.local_experts[layer] = tuple(range(E) if here is None else here)
    if experts.fused and not _are_apart(weights, prefix):
        matrices = _fused(weights, prefix, E, here)
    else:
        matrices = {}
        weights.elsewhere |= _of_others(weights, prefix, here)
        numbers = range(E) if here is None else here
        if experts.media_inner:
            numbers = range(E, 2 * E) if of_media else range(E)
        for place, name in enumerate(("gate_up", "down")):
            projections = [_of_number(weights, number)[place] for number in numbers]
            weights.source.decode_together(
                {
                    f"{prefix}.{linear.name}": weights.shape(linear.shape)
                    for projection in projections
                    for linear in projection.linears
                }
            )
            matrices[name] = [
                _matrix(weights, prefix, projection, number)
                for number, projection in zip(numbers, projections, strict=True)
            ]
            if experts.fused:
                matrices |= _biases(weights, prefix, name, projections, numbers)
    routed = None if here is None else E
    if experts.media_inner:
        routed = E + 1  # the id E means that a token has no expert of this set
    return ExpertWeights(top_k=routing.top_k, glu=glu, routed_experts=routed, **matrices)


def _of_number(weights: Any, number: int) -> tuple[Projection, Projection]:
    """Return gate_up and down of one expert."""
    experts = weights.family.experts
    return experts.of_number(number, num_experts(weights.config.values) or 0)


def _of_others(weights: Any, prefix: str, here: Sequence[int] | None) -> set[str]:
    """Return the names of linears of experts that are not in `here`; None: all are here."""
    if here is None:
        return set()
    experts, numbers = weights.family.experts, range(num_experts(weights.config.values))
    return {
        f"{prefix}.{linear.name}"
        for number in set(numbers) - set(here)
        for projection in (experts.gate_up, experts.down)
        for linear in projection.expert(number).linears
    }


def not_read_ahead(weights: Any, prefix: str, here: Sequence[int] | None) -> set[str]:
    """Return the tensors and linears of a layer that a rank with the experts `here` does not need.

    They are not read ahead. This includes tensors that stack all experts, of which only some rows
    are read.
    """
    if here is None:
        return set()
    stem = f"{prefix}.{weights.family.experts.stem}"
    stacks = {f"{stem}.{name}_proj{end}" for name in ("gate_up", "down") for end in STACKED_ENDS}
    return stacks | _of_others(weights, prefix, here)


def _are_apart(weights: Any, prefix: str) -> bool:
    """Return True if a family with fused experts has separate tensors per expert here."""
    (linear,) = weights.family.experts.down.expert(0).linears
    return weights.source.has_linear(f"{prefix}.{linear.name}")


def _biases(
    weights: Any,
    prefix: str,
    name: str,
    projections: Sequence[Projection],
    numbers: Sequence[int],
) -> dict[str, torch.Tensor]:
    """Return the biases of these experts as one tensor; empty if another rank adds them."""
    rows = []
    for number, projection in zip(numbers, projections, strict=True):
        cuts = _cuts(weights, prefix, projection, number)
        linears = projection.linears
        stored = [
            weights.tensor(f"{prefix}.{linear.name}.bias", weights.shape((linear.outputs,)))
            for linear in linears
        ]
        parts = [cut.bias(bias_N) for cut, bias_N in zip(cuts, stored, strict=True)]
        if parts[0] is None:
            return {}
        rows.append(torch.cat(parts))
    return {f"{name}_bias_EN": torch.stack(rows)}


def _cuts(weights: Any, prefix: str, projection: Projection, number: int) -> list[LinearShard]:
    """Return this rank's shard of each linear of an expert."""

    def order_of(name: str, shape: tuple[int, int]) -> torch.Tensor | None:
        full = f"{prefix}.{name}"
        return (
            weights.source.input_order(full, shape) if weights.source.is_quantized(full) else None
        )

    if weights.tp_plan.is_whole or weights.tp_plan.has_whole_experts:
        return [WHOLE] * len(projection.linears)
    gate_up, down = _of_number(weights, number)
    cuts = []
    for linear in projection.linears:
        cut = weights.tp_plan.cut(
            projection, linear, prefix, order_of, down if projection == gate_up else None
        )
        order_K = (
            None if cut.columns is None else order_of(linear.name, weights.shape(linear.shape))
        )
        weights.parts[f"{prefix}.{linear.name}"] = LinearPart.of(cut, order_K)
        cuts.append(cut)
    return cuts


def _fused(weights: Any, prefix: str, E: int, here: Sequence[int] | None) -> dict[str, Any]:
    """Read experts from stacked tensors: float [E, K, N], or MXFP4 [E, N, K / 32, 16].

    The even outputs of gate_up belong to gate. `here`: experts that this rank has whole; None: it
    has a shard of each expert.
    """
    C = weights.config.hidden_size
    tp_plan, down = weights.tp_plan, weights.family.experts.down
    stem = f"{prefix}.{weights.family.experts.stem}"
    (inner,) = weights.shape(((down.inputs,),))
    ours, is_mxfp4 = slice(None), f"{stem}.down_proj_blocks" in weights.source
    divides = not tp_plan.is_whole and here is None
    if divides:
        shard = tp_plan.features(stem, down.inputs, MXFP4 if is_mxfp4 else None)
        ours = slice(*shard)
        weights.parts |= _parts(weights, prefix, shard)
    found: dict[str, Any] = {}
    for name, N, K in (("gate_up", 2 * inner, C), ("down", C, inner)):
        stored = f"{stem}.{name}_proj"
        cut = partial(_inputs, ours) if name == "down" and divides else _all
        order = torch.arange(N)
        if name == "gate_up":
            order = torch.cat([order[0::2][ours], order[1::2][ours]])
        bias_EN = weights.tensor(f"{stored}_bias", (E, N), here)
        if name == "gate_up" or not divides or tp_plan.communicator.rank == 0:
            found[f"{name}_bias_EN"] = bias_EN[:, order.to(bias_EN.device)]
        if f"{stored}_blocks" in weights.source:
            groups = K // mxfp4.GROUP
            shape = E, N, groups, mxfp4.GROUP // 2
            blocks = weights.source.tensor(f"{stored}_blocks", shape, here, integers=True)
            scales = weights.source.tensor(f"{stored}_scales", (E, N, groups), here, integers=True)
            found[name] = [
                cut(mxfp4.decode(blocks[i][order], scales[i][order], f"{stored} {e}"))
                for i, e in enumerate(range(E) if here is None else here)
            ]
        else:
            whole_EKN = weights.tensor(stored, (E, K, N), here)
            order = order.to(whole_EKN.device)
            found[name] = [cut(whole_KN.t()[order]).contiguous() for whole_KN in whole_EKN]
    return found


def _parts(weights: Any, prefix: str, shard: Shard) -> dict[str, LinearPart]:
    """Return the parts of all experts' linears on a rank that has a shard of the inner size."""
    experts, found = weights.family.experts, {}
    for number in range(num_experts(weights.config.values)):
        for projection in (experts.gate_up.expert(number), experts.down.expert(number)):
            is_down = projection.inputs == experts.down.inputs
            part = LinearPart(inputs=(shard,)) if is_down else LinearPart(rows=(shard,))
            found |= {f"{prefix}.{linear.name}": part for linear in projection.linears}
    return found


def _inputs(ours: slice, matrix: ExpertMatrix) -> ExpertMatrix:
    if isinstance(matrix, torch.Tensor):
        return matrix[:, ours]
    return take_inputs(matrix, ours.start, ours.stop)


def _all(matrix: ExpertMatrix) -> ExpertMatrix:
    return matrix


def _matrix(weights: Any, prefix: str, projection: Projection, number: int) -> ExpertMatrix:
    """Read an expert's matrix, with the linears of its projection stacked.

    Raises CheckpointError if a linear is missing, or if the linears are not all quantized alike.
    """
    linears, cuts = projection.linears, _cuts(weights, prefix, projection, number)
    places = {f"{prefix}.{linear.name}": weights.shape(linear.shape) for linear in linears}
    weights.source.check_has_experts(prefix, places)
    quantized = [weights.source.is_quantized(name) for name in places]
    members = zip(places.items(), cuts, strict=True)
    if not any(quantized):
        parts = [cut.tensor(weights.tensor(f"{n}.weight", shape)) for (n, shape), cut in members]
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    if not all(quantized):
        raise CheckpointError(
            ", ".join(places),
            "run as one matrix, but only some of them are quantized",
            "quantize all of them, or none",
        )
    parts = [cut.weight(weights.source.weight(n, shape), n) for (n, shape), cut in members]
    return merge(parts, next(iter(places))) if len(parts) > 1 else parts[0]
