"""Copies of states between slots of the device. Knows slots, no requests."""

from collections.abc import Sequence

import torch

from qkernels.delta_net.state import StateSlots
from qserve.engine.state_snapshots import StateMoves
from qserve.engine.transfer import to_device
from qserve.model.blocks.layer import Cache


def copy_states(caches: Sequence[Cache], moves: StateMoves, device: torch.device) -> None:
    """Keep states, then let requests begin from kept ones, before whatever is launched next."""
    for source, target in (
        (moves.saved_from, moves.saved_to),
        (moves.restored_from, moves.restored_to),
    ):
        if not len(target):
            continue
        source_N, target_N = to_device(source, device), to_device(target, device)
        for cache in caches:
            if isinstance(cache, StateSlots):
                for part in (cache.conv_PCW, cache.memory_PHKV):
                    part[target_N] = part[source_N]
