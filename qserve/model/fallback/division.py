"""Tensor parallelism for models that transformers runs, if their layers are plain.

Attention with linears q, k, v and o is sharded by heads; an MLP with gate, up and down (or two
linears) is sharded by features. All other tensors of a layer must be one-dimensional and belong to
the residual stream; they are replicated, like embeddings and head. A model with other modules is
refused with the name of the module. The attention code takes the number of heads from the outputs
of its linears.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from formats.errors import InputError
from formats.in_memory.shards import HeadShard, shard_features, shard_heads
from formats.in_memory.slices import take_rows
from formats.scheme import Scheme
from qserve.model.fallback.support import config_of, model_class
from qserve.model.tp_plan import LinearShard
from qserve.parallel.communicator import Communicator

ATTENTION = ("q_proj", "k_proj", "v_proj")
OUTPUTS = ("o_proj", "out_proj", "dense")  # names of attention's output linear
FEED_FORWARDS = ((("gate_proj", "up_proj"), "down_proj"), (("up_proj",), "down_proj"))
FEED_FORWARDS += ((("fc1",), "fc2"), (("c_fc",), "c_proj"))
SINKS = "sinks"  # tensor with one number per head
# Attributes of attention modules that count query heads and KV heads
HEADS = ("num_heads", "num_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
GROUPS = "num_key_value_groups"
SchemeOf = Callable[[str], Scheme | None]  # name of a linear -> scheme; None: it is float


class SummedLinear(torch.nn.Module):
    """A linear whose inputs are sharded over ranks. The result is summed over the ranks."""

    def __init__(self, inner: torch.nn.Module, communicator: Communicator) -> None:
        super().__init__()
        self.inner, self.communicator = inner, communicator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return self.communicator.all_reduce(y.reshape(-1, y.shape[-1])).view(y.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Describes one rank's shard of a model."""

    layers: str  # name of the list of layers
    cuts: Mapping[str, LinearShard]  # name of a linear -> its shard
    sinks: Mapping[str, tuple[int, int]]  # name of a sinks tensor -> heads of this rank
    heads: Mapping[str, HeadShard]  # name of an attention module -> heads of this rank

    def in_first_layer(self, name: str) -> bool:
        """Return True for names in the first layer."""
        return name.startswith(f"{self.layers}.0.")


def divide(
    model: torch.nn.Module, architecture: str, rank: int, size: int, scheme_of: SchemeOf
) -> Division:
    """Return a rank's shard. Raises InputError with the module's name if layers are not plain."""
    layers = _layers(model, architecture)
    cuts: dict[str, LinearShard] = {}
    sinks: dict[str, tuple[int, int]] = {}
    heads: dict[str, HeadShard] = {}
    inside: list[str] = []  # name prefixes of sharded modules
    for name, module in _within(model, layers):
        parts = dict(module.named_children())
        out = next((o for o in OUTPUTS if o in parts), None)
        if out and all(_is_linear(parts.get(each)) for each in (*ATTENTION, out)):
            width = getattr(module, "head_dim", None)
            q, k, v = (parts[each].out_features for each in ATTENTION)
            if type(width) is not int or q % width or k % width or k != v:
                raise _refused(architecture, name, "heads of one width")
            shards = shard_heads(q // width, k // width, width, size, [scheme_of(f"{name}.{out}")])
            shard = heads[name] = shards[rank]
            rows = {"q_proj": shard.heads, "k_proj": shard.kv_heads, "v_proj": shard.kv_heads}
            for each, (first, last) in rows.items():
                cuts[f"{name}.{each}"] = LinearShard(rows=((first * width, last * width),))
            columns = shard.heads[0] * width, shard.heads[1] * width
            cuts[f"{name}.{out}"] = LinearShard(columns=columns, has_bias=rank == 0)
            if isinstance(getattr(module, SINKS, None), torch.Tensor):
                sinks[f"{name}.{SINKS}"] = shard.heads
            inside.append(f"{name}.")
            _check_rest(architecture, module, name, {*ATTENTION, out}, width)
        for first, down in FEED_FORWARDS:
            if not all(_is_linear(parts.get(each)) for each in (*first, down)):
                continue
            full = f"{name}.{down}"
            shard = shard_features(full, parts[down].in_features, size, scheme_of(full))[rank]
            cuts |= {f"{name}.{each}": LinearShard(rows=(shard,)) for each in first}
            cuts[full] = LinearShard(columns=shard, has_bias=rank == 0)
            if name != layers and not name.removeprefix(f"{layers}.").isdecimal():
                inside.append(f"{name}.")
                _check_rest(architecture, module, name, {*first, down}, 0)
            break
    _check_others(architecture, model, layers, cuts, inside)
    return Division(layers=layers, cuts=cuts, sinks=sinks, heads=heads)


def check_division(raw: Mapping[str, Any], architecture: str, size: int) -> None:
    """Raise InputError if a model cannot be sharded. Reads no weights."""
    cls = model_class(raw)
    with torch.device("meta"):
        model = cls(config_of(cls, raw))
    divide(model, architecture, 0, size, lambda name: None)


def first_layer_states(
    model: Any, division: Division, ids_T: torch.Tensor, positions_T: torch.Tensor
) -> torch.Tensor:
    """Return hidden states [T, C] of the model with only its first layer.

    Uses transformers' own attention.
    """
    layers = model.get_submodule(division.layers)
    model.set_submodule(division.layers, torch.nn.ModuleList([layers[0]]))
    try:
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            return model.base_model(
                input_ids=ids_T[None],
                position_ids=positions_T[None],
                use_cache=False,
                return_dict=True,
            ).last_hidden_state[0]
    finally:
        model.set_submodule(division.layers, layers)


def cut_(model: torch.nn.Module, division: Division, communicator: Communicator) -> None:
    """Replace each float linear with this rank's shard, and sum outputs over ranks where needed.

    Quantized linears in the division are already sharded.
    """
    for name, cut in division.cuts.items():
        linear = model.get_submodule(name)
        if isinstance(linear, torch.nn.Linear):
            linear.weight.data = cut.tensor(linear.weight.data).contiguous()
            linear.out_features, linear.in_features = linear.weight.shape
            if linear.bias is not None:
                bias = cut.bias(linear.bias.data)
                linear.bias = None if bias is None else torch.nn.Parameter(bias, False)
        if cut.columns is not None:
            model.set_submodule(name, SummedLinear(linear, communicator))
    for name, shard in division.sinks.items():
        sinks = model.get_parameter(name)
        sinks.data = take_rows(sinks.data, (shard,)).contiguous()
    for name, shard in division.heads.items():
        attention = model.get_submodule(name)
        counts = {**dict.fromkeys(HEADS, shard.num_heads)}
        counts |= dict.fromkeys(KV_HEADS, shard.num_kv_heads)
        counts[GROUPS] = shard.num_heads // shard.num_kv_heads
        for attribute, count in counts.items():
            if type(getattr(attention, attribute, None)) is int:
                setattr(attention, attribute, count)


def _layers(model: torch.nn.Module, architecture: str) -> str:
    """Return the name of the list of layers."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module):
            return name
    raise _refused(architecture, "the model", "a list of layers")


def _within(model: torch.nn.Module, layers: str) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in model.named_modules():
        if name.startswith(f"{layers}."):
            yield name, module


def _is_linear(module: torch.nn.Module | None) -> bool:
    return type(module) is torch.nn.Linear


def _check_rest(
    architecture: str, module: torch.nn.Module, name: str, linears: set[str], width: int
) -> None:
    """Refuse a tensor of a sharded module that is not in a linear and not the same per head."""
    for local, tensor in (*module.named_parameters(), *module.named_buffers()):
        known = local.partition(".")[0] in linears or local == SINKS
        if not (known or tensor.numel() == 1 or tuple(tensor.shape) == (width,)):
            raise _refused(architecture, f"{name}.{local}")


def _check_others(
    architecture: str,
    model: torch.nn.Module,
    layers: str,
    cuts: Mapping[str, LinearShard],
    inside: list[str],
) -> None:
    """Refuse matrices in layers that are not sharded."""
    for name, tensor in model.named_parameters():
        module = name.rpartition(".")[0]
        if not name.startswith(f"{layers}.") or module in cuts or name.startswith(tuple(inside)):
            continue
        if tensor.ndim > 1:
            raise _refused(architecture, name)
    if not cuts:
        raise _refused(architecture, "the model", "attention of q_proj, k_proj, v_proj")


def _refused(
    architecture: str, name: str, expected: str = "q, k, v, o, gate, up, down"
) -> InputError:
    return InputError(
        "--tensor-parallel-size",
        f"does not work with {architecture}, which runs through transformers: expected {expected},"
        f" found {name}",
        "serve it on one GPU",
    )
