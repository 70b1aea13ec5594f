"""Tensors of checkpoints merged as transformers' modules have them."""

import re

import torch

EXPERT = re.compile(
    r"(.*\.(?:mlp|block_sparse_moe|feed_forward|mixer|\d+))\.experts\.(\d+)\.(\w+)\.weight"
)


def with_stacked_experts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as transformers' modules have them: a tensor for all of a layer, by one name."""
    found: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    rest = {}
    for name, tensor in state.items():
        match = EXPERT.fullmatch(name)
        if match is None:
            is_granite = ".router.layer." in name
            own = name if is_granite else name.replace(".block_sparse_moe.", ".mlp.")
            rest[own.replace(".router.layer.", ".router.")] = tensor
        else:
            is_mixtral = match[3].startswith("w") and "block_sparse_moe" in match[1]
            module = match[1].replace(".block_sparse_moe", ".mlp") if is_mixtral else match[1]
            found.setdefault(module, {})[int(match[2]), match[3]] = tensor
    for module, each in found.items():
        if (0, "up_proj") in each and (0, "gate_proj") not in each:
            for leaf in ("up_proj", "down_proj"):
                of_leaf = [each[number, leaf] for number in range(len(each) // 2)]
                rest[f"{module}.experts.{leaf}"] = torch.stack(of_leaf)
            continue
        is_short = (0, "w1") in each
        gate, up, down = ("w1", "w3", "w2") if is_short else ("gate_proj", "up_proj", "down_proj")
        numbers = range(len(each) // 3)
        both = [torch.cat([each[number, gate], each[number, up]]) for number in numbers]
        rest[f"{module}.experts.gate_up_proj"] = torch.stack(both)
        rest[f"{module}.experts.down_proj"] = torch.stack([each[n, down] for n in numbers])
    return rest


def with_merged_gates(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Feed-forwards with one matrix for gate and up."""
    gate, both = ".gate_proj.weight", ".gate_up_proj.weight"
    found = {name: x for name, x in state.items() if not name.endswith((gate, ".up_proj.weight"))}
    for name in state:
        if name.endswith(gate):
            up = state[name.replace(gate, ".up_proj.weight")]
            found[name.replace(gate, both)] = torch.cat([state[name], up])
    return found
