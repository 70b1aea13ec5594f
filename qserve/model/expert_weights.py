"""The routers and experts of a layer as blocks take them, from the family's row and the weights.

Legend: E experts, C hidden size, I inner size.
"""

from collections.abc import Mapping
from typing import Any

import torch

from formats.errors import CheckpointError
from formats.family import Experts, Projection, is_set, num_experts
from formats.weights import merge
from qkernels.moe.experts import ExpertMatrix
from qkernels.moe.routing import Routing


def routing_of(experts: Experts, config: Mapping[str, Any]) -> Routing:
    """A row's rule with the numbers of config.json."""
    rule = experts.routing
    groups = {}
    if rule.group_score:
        groups = {
            "num_groups": config["n_group"],
            "top_groups": config["topk_group"],
            "group_score": rule.group_score,
        }
    return Routing(
        num_experts=num_experts(config),
        top_k=config["num_experts_per_tok"],
        scores=rule.scores,
        normalized=is_set(rule.normalized, config),
        factor=config.get(rule.factor_key, 1.0),
        rounded=rule.rounded,
        **groups,
    )


def expert_matrix(weights: Any, prefix: str, projection: Projection, number: int) -> ExpertMatrix:
    """One expert's matrix of a projection, its members above each other.

    `weights`: qserve.model.weights.Weights. Raises CheckpointError where only some of the members
    are quantized, or differently.
    """
    linears = projection.expert(number).linears
    places = {f"{prefix}.{linear.name}": weights.shape(linear.shape) for linear in linears}
    quantized = [weights.source.is_quantized(name) for name in places]
    if not any(quantized):
        parts = [weights.tensor(f"{name}.weight", shape) for name, shape in places.items()]
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    if not all(quantized):
        raise CheckpointError(", ".join(places), "only some of these are quantized")
    parts = [weights.source.weight(name, shape) for name, shape in places.items()]
    return merge(parts, next(iter(places))) if len(parts) > 1 else parts[0]
