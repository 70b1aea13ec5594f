"""Tensors of a GGUF file under the names of the family's checkpoint. Needs no torch.

A stack of experts is presented as one tensor per expert. Names of linears come from the family's
row, names of norms from the architecture's row.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from formats.architecture.family import STREAMS, Family
from formats.architecture.projection import Projection
from formats.architecture.sizes import num_experts
from formats.errors import CheckpointError
from formats.gguf.architectures.architecture import Architecture
from formats.gguf.architectures.converted import ConvertedTensor, Order, family_shape, order_of
from formats.gguf.architectures.parts import FREQUENCIES
from formats.gguf.container import StoredTensor
from formats.gguf.rope import LONG, SHORT

IN_CONFIG = (FREQUENCIES, LONG, SHORT)  # tensors whose numbers go into config.json
OF_A_LAYER = re.compile(r"blk\.(?P<number>\d{1,5})\.(?P<local>.+?)(?:\.(?P<kind>weight|bias))?")
KEY_UP, VALUE_UP, BOTH_UP = "attn_k_b", "attn_v_b", "attn_kv_b"  # latent attention
GATE, UP, GATE_UP = "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"  # stacks of experts
OLD_EXPERT = re.compile(r"(?P<local>ffn_(?:gate|up|down))\.(?P<number>\d{1,4})")
# start of the family's name of a projection of latent attention -> GGUF's name
LATENT_NAMES = {
    **{"q": "attn_q", "q_a": "attn_q_a", "q_b": "attn_q_b"},
    **{"kv_a": "attn_kv_a_mqa", "kv_b": BOTH_UP},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Presented:
    """A tensor under the family's name, and where and how the file stores it."""

    name: str
    stored: StoredTensor
    shape: tuple[int, ...]
    first_row: int = 0  # index of its first row in the stored tensor
    # Number of heads, if stored rows are in another order (row_orders.py): rotated pairs, or with
    # `kv_heads` all queries, then all keys, then all values. 0: the family's order.
    heads: int = 0
    kv_heads: int = 0
    offset: float = 0.0  # stored values minus the family's values
    # orders of rows and columns in recurrent layers (architectures/converted.py)
    rows: Order | None = None
    columns: Order | None = None
    exponent: bool = False  # stored values are -exp(the family's values)
    below: StoredTensor | None = None  # stored tensor with the rows after those of `stored`
    # kv_b_proj of latent attention in two tensors: `stored` holds the keys, transposed
    # [heads, latent, key], and this one the values [heads, value, latent]
    values: StoredTensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NameMap:
    """Map from the tensor names of a GGUF file to those of the family."""

    architecture: Architecture
    family: Family
    num_layers: int
    heads: int
    kv_heads: int
    config: Mapping[str, Any] = field(default_factory=dict)

    def present(self, tensors: Mapping[str, StoredTensor], subject: str) -> dict[str, Presented]:
        """Return every tensor by the family's name.

        Raises CheckpointError for an unknown tensor.
        """
        found: dict[str, Presented] = {}
        halves = self._halves(tensors, subject)
        for each in halves.values():
            found[each.name] = each
        for stored in tensors.values():
            if stored.name.rpartition(".")[0].endswith((KEY_UP, VALUE_UP)):
                continue
            for each in self._of(stored, tensors, subject):
                if each.name in found:
                    raise CheckpointError(
                        f"{subject}: {stored.name}",
                        f"is a second tensor for {each.name}",
                        "download another GGUF file of the model",
                    )
                found[each.name] = each
        return found

    def _halves(self, tensors: Mapping[str, StoredTensor], subject: str) -> dict[str, Presented]:
        """Return kv_b_proj of each layer that stores it in two tensors, by the layer's prefix."""
        found = {}
        for stored in tensors.values():
            prefix, is_half, kind = stored.name.partition(f"{KEY_UP}.")
            match = OF_A_LAYER.fullmatch(stored.name)
            if not is_half or kind != "weight" or match is None or not self.family.latent:
                continue
            number, values = int(match["number"]), tensors.get(f"{prefix}{VALUE_UP}.weight")
            if number >= self.num_layers or f"{prefix}{BOTH_UP}.weight" in tensors:
                continue
            keys_fit = len(stored.shape) == 3 and stored.shape[0] == self.heads
            if values is None or not keys_fit or values.shape[::2] != stored.shape[:2]:
                raise CheckpointError(
                    f"{subject}: {stored.name}",
                    f"expected [{self.heads}, latent, key] and {VALUE_UP} [{self.heads}, value,"
                    f" latent], found {list(stored.shape)} and"
                    f" {'none' if values is None else list(values.shape)}",
                    "convert the model again",
                )
            heads, latent, width = stored.shape
            layer = self.family.layer.format(i=number)
            found[prefix] = Presented(
                name=f"{layer}.{self._linears[BOTH_UP]}.weight",
                stored=stored,
                shape=(heads * (width + values.shape[1]), latent),
                values=values,
            )
        return found

    def _of(
        self, stored: StoredTensor, tensors: Mapping[str, StoredTensor], subject: str
    ) -> Iterator[Presented]:
        if stored.name in IN_CONFIG:
            return
        match = OF_A_LAYER.fullmatch(stored.name)
        stack = stream_names(self.family).get(stored.name.removesuffix(".weight"))
        if stack and len(stored.shape) == 3 and stored.shape[0] == len(stack):
            yield from _stacked(stored, stack)
            return
        if match is None:
            name = self._outer_names.get(stored.name)
            if name is None:
                raise _unplaced(stored, self.architecture, subject)
            is_norm = stored.name == f"{self.architecture.output_norm}.weight"
            yield self._whole(stored, name, offset=self.family.norm_offset * is_norm)
            return
        number, local, kind = int(match["number"]), match["local"], match["kind"] or ""
        if number >= self.num_layers:  # a layer that only drafts
            return
        if local in ("attn_rot_embd", "rope_freqs"):
            return
        layer, full = self.family.layer.format(i=number), stored.name.partition(f".{number}.")[2]
        target = self.architecture.tensors.get(full)
        if isinstance(target, ConvertedTensor):
            below = tensors.get(f"blk.{number}.{target.below}") if target.below else None
            yield self._converted(stored, below, layer, target, subject)
        elif isinstance(target, str):
            yield self._whole(stored, f"{layer}.{target}")
        elif full not in self._below:
            yield from self._in_layer(stored, number, local, kind, subject)

    def _converted(
        self,
        stored: StoredTensor,
        below: StoredTensor | None,
        layer: str,
        converted: ConvertedTensor,
        subject: str,
    ) -> Presented:
        """Return a tensor that files store in another form than the family."""
        shape = family_shape(converted.shape, stored.shape)
        fits = shape is not None and (below is None) == (not converted.below)
        if fits and below is not None:
            fits = below.shape[1:] == stored.shape[1:] and len(stored.shape) == 2
            shape = (stored.shape[0] + below.shape[0], *stored.shape[1:])
        rows, columns = (
            order_of(name, self.config) for name in (converted.rows, converted.columns)
        )
        for order, size in ((rows, shape and shape[0]), (columns, shape and shape[-1])):
            fits = fits and (order is None or order.count == size)
        if not fits:
            found = [list(each.shape) for each in (stored, below) if each]
            raise CheckpointError(
                f"{subject}: {stored.name}",
                f"does not fit the model's sizes, found {found}",
                "convert the model again",
            )
        return Presented(
            name=f"{layer}.{converted.name}",
            stored=stored,
            shape=shape,
            rows=rows,
            columns=columns,
            exponent=converted.exponent,
            below=below,
        )

    def _in_layer(
        self, stored: StoredTensor, number: int, local: str, kind: str, subject: str
    ) -> Iterator[Presented]:
        layer = self.family.layer.format(i=number)
        has_state = self.family.has_state(number, self.config)
        linears = linear_names(self.family, self.architecture, has_state)
        norm = self.architecture.norms.get(local)
        if norm is not None:
            offset = self.family.norm_offset if kind == "weight" else 0.0
            yield self._whole(stored, f"{layer}.{norm}.{kind}", offset=offset)
        elif local in linears:
            name = f"{layer}.{linears[local]}.{kind}"
            if local == "attn_qkv" and self.family.qkv.by_head:
                self._check_rows(stored, self.heads + 2 * self.kv_heads, subject)
                yield self._whole(stored, name, heads=self.heads, kv_heads=self.kv_heads)
            else:
                heads = self._permuted.get(local, 0)
                self._check_rows(stored, 2 * heads or 1, subject)
                yield self._whole(stored, name, heads=heads)
        elif local == "attn_qkv" and "attn_q" in linears and not self.architecture.value_width:
            yield from self._parts_of_qkv(stored, layer, kind, subject)
        elif self._others.get(f"{local}.{kind}") is not None:
            yield self._whole(stored, f"{layer}.{self._others[f'{local}.{kind}']}")
        elif local in self._experts and len(stored.shape) == (2 if kind == "bias" else 3):
            names = self._of_all_experts(stored, [self._experts[local]], subject)
            yield from _stacked(stored, [f"{layer}.{name}" for name in names], kind)
        elif stored.name.endswith(f".{GATE_UP}.weight") and GATE in self._experts:
            names = self._of_all_experts(stored, [self._experts[GATE], self._experts[UP]], subject)
            yield from _stacked(stored, [f"{layer}.{name}" for name in names], kind)
        elif (old := OLD_EXPERT.fullmatch(local)) and f"{old['local']}_exps" in self._experts:
            name = self._experts[f"{old['local']}_exps"].format(e=int(old["number"]))
            yield self._whole(stored, f"{layer}.{name}.{kind}")
        else:
            raise _unplaced(stored, self.architecture, subject)

    def _of_all_experts(self, stored: StoredTensor, names: list[str], subject: str) -> list[str]:
        """Return the linears in a stack [experts, rows, ...]: those of `names` of each expert.

        Raises CheckpointError for a stack of another number of experts than the model has.
        """
        count, (found, *rows) = num_experts(self.config), stored.shape
        if found != count or not rows or rows[0] % len(names):
            raise CheckpointError(
                f"{subject}: {stored.name}",
                f"expected matrices of {count} experts, found {list(stored.shape)}",
                "download the file again",
            )
        return [name.format(e=number) for number in range(found) for name in names]

    def _parts_of_qkv(
        self, stored: StoredTensor, layer: str, kind: str, subject: str
    ) -> Iterator[Presented]:
        """Yield q, k and v of a file that stores them as one matrix, unlike the family."""
        counts = (self.heads, self.kv_heads, self.kv_heads)
        self._check_rows(stored, sum(counts), subject)
        width, first = stored.shape[0] // sum(counts), 0
        for local, count in zip(("attn_q", "attn_k", "attn_v"), counts, strict=True):
            yield Presented(
                name=f"{layer}.{self._linears[local]}.{kind}",
                stored=stored,
                shape=(count * width, *stored.shape[1:]),
                first_row=first,
                heads=self._permuted.get(local, 0),
            )
            first += count * width

    def _check_rows(self, stored: StoredTensor, count: int, subject: str) -> None:
        """Raise CheckpointError unless `count` divides the rows, and KV heads divide the heads."""
        if stored.shape[0] % count or self.heads % self.kv_heads:
            raise CheckpointError(
                f"{subject}: {stored.name}",
                f"expected rows of {self.heads} heads and {self.kv_heads} KV heads, found"
                f" {stored.shape[0]}",
                "convert the model again",
            )

    def _whole(self, stored: StoredTensor, name: str, **different: float) -> Presented:
        whole = Presented(name=name, stored=stored, shape=stored.shape)
        shared = self.family.experts and self.family.experts.shared
        if shared and shared.gate and name.endswith(f"{shared.gate}.weight"):
            whole = replace(whole, shape=(1, stored.shape[-1]))
        routing = self.family.experts and self.family.experts.routing
        if routing and routing.correction_is_row and name.endswith(routing.correction):
            whole = replace(whole, shape=(1, stored.shape[-1]))
        return replace(whole, **different)

    @property
    def _below(self) -> frozenset[str]:
        """Names of stored tensors whose rows belong to another tensor of the family."""
        targets = self.architecture.tensors.values()
        return frozenset(each.below for each in targets if isinstance(each, ConvertedTensor))

    @property
    def _outer_names(self) -> dict[str, str]:
        return outer_names(self.family, self.architecture)

    @property
    def _permuted(self) -> dict[str, int]:
        if not self.architecture.permuted:
            return {}
        return {"attn_q": self.heads, "attn_k": self.kv_heads}

    @property
    def _linears(self) -> dict[str, str]:
        return linear_names(self.family, self.architecture)

    @property
    def _experts(self) -> dict[str, str]:
        return other_names(self.family, "{e}")

    @property
    def _others(self) -> dict[str, str]:
        """Full names of tensors that are neither norms nor linears of the dense layer."""
        experts = self.family.experts
        names = {}
        for key, name in other_names(self.family, "").items():
            if experts and experts.routing.correction and name.endswith(experts.routing.correction):
                names[f"{key}.bias"] = name
            elif name == self.family.sinks:
                names[f"{key}.weight"] = name
            else:
                names |= {f"{key}.{kind}": f"{name}.{kind}" for kind in ("weight", "bias")}
        return names


def _stacked(stored: StoredTensor, modules: list[str], kind: str = "weight") -> Iterator[Presented]:
    """Yield each matrix of a stack [modules, N, K], or each bias of a stack [modules, N].

    Several modules may share a part of the stack: N has the rows of all of them.
    """
    count, N, *inputs = stored.shape
    N = N * count // len(modules)
    for number, module in enumerate(modules):
        yield Presented(
            name=f"{module}.{kind}", stored=stored, shape=(N, *inputs), first_row=number * N
        )


def outer_names(family: Family, architecture: Architecture) -> dict[str, str]:
    """Return GGUF's names of the tensors outside of layers, mapped to the family's."""
    names = {"token_embd.weight": family.embedding, "output.weight": family.head}
    if family.norm_weights:
        names[f"{architecture.output_norm}.weight"] = family.last_norm
    if family.norm_bias:
        names["output_norm.bias"] = family.last_norm_bias
    if family.head_bias:
        names["output.bias"] = family.head_bias_name
    if family.positions is not None:
        names["position_embd.weight"] = family.positions.name
    if family.layer_inputs is not None:
        names |= {
            "per_layer_token_embd.weight": family.layer_inputs.table,
            "per_layer_model_proj.weight": f"{family.layer_inputs.model_projection}.weight",
            "per_layer_proj_norm.weight": family.layer_inputs.model_norm,
        }
    if family.embedding_norm and family.norm_weights:
        names["token_embd_norm.weight"] = family.embedding_norm
        if family.norm_bias:
            names["token_embd_norm.bias"] = family.embedding_norm_bias
    return names


def stream_names(family: Family) -> dict[str, list[str]]:
    """Return GGUF's names of stacks of linears, mapped to the family's names of the linears."""
    stacks = ("altup_proj", "altup_unembd_proj")
    return {
        stack: [f"{name}.{number}" for number in range(STREAMS - 1)]
        for stack, name in zip(stacks, family.streams, strict=False)
    }


def other_names(family: Family, of_experts: str) -> dict[str, str]:
    """Return GGUF's names of tensors that only some layers have, mapped to the family's.

    `of_experts` "{e}": tensors of one expert, with its number left open; "": all other tensors.
    """
    experts, names = family.experts, {}
    if of_experts:
        if experts is None:
            return {}
        return _feed_forward(experts.gate_up, experts.down, "_exps")
    if family.sinks:
        names["attn_sinks"] = family.sinks
    if experts is None:
        return names
    names["ffn_gate_inp"] = experts.router
    if experts.routing.correction:
        names["exp_probs_b"] = f"{experts.module}.{experts.routing.correction}"
    if experts.shared:
        names |= _feed_forward(experts.shared.gate_up, experts.shared.down, "_shexp")
        if experts.shared.gate:
            names["ffn_gate_inp_shexp"] = experts.shared.gate
    return names


def linear_names(
    family: Family, architecture: Architecture | None = None, has_state: bool = False
) -> dict[str, str]:
    """Return GGUF's names of a layer's linears, mapped to the family's, both below the layer.

    `architecture` adds its own names and removes linears that its files store in another form.
    `has_state` also adds names of recurrent layers.
    """
    if architecture is None:
        return _default_linears(family)
    converted = {
        each.name.removesuffix(".weight")
        for each in architecture.tensors.values()
        if isinstance(each, ConvertedTensor)
    }
    names = {**_default_linears(family), **architecture.linears}
    names |= architecture.state_linears if has_state else {}
    return {theirs: ours for theirs, ours in names.items() if ours not in converted}


def _default_linears(family: Family) -> dict[str, str]:
    """Return the names of the linears of attention and of a dense feed-forward."""
    qkv, o = family.qkv, family.o
    names = {"attn_output": o.linears[0].name}
    if qkv.stored_fused:
        names["attn_qkv"] = qkv.name
    elif family.latent:
        for projection in (qkv, *family.latent):
            for name, _ in projection.members:
                leaf = name.rpartition(".")[2].removesuffix("_with_mqa").removesuffix("_proj")
                names[LATENT_NAMES[leaf]] = name
    else:
        for name, _ in qkv.members:
            leaf = name.rpartition(".")[2].removesuffix("_proj")
            names[f"attn_{'gate' if leaf == 'g' else leaf}"] = name
        if family.head_gates is not None:
            names["attn_gate"] = family.head_gates.name
    if family.layer_inputs is not None:
        inputs = family.layer_inputs
        names |= {"inp_gate": inputs.gate.name, "proj": inputs.projection.name}
    shared = set(other_names(family, "").values())  # the dense feed-forward, without experts
    dense = _feed_forward(family.gate_up, family.down, "")
    return names | {theirs: ours for theirs, ours in dense.items() if ours not in shared}


def _feed_forward(gate_up: Projection, down: Projection, suffix: str) -> dict[str, str]:
    """Return the names of a feed-forward. GGUF's name for a fused matrix is `up`."""
    linears = gate_up.linears
    keys = ("ffn_gate", "ffn_up") if len(linears) == 2 else ("ffn_up",)
    names = {f"{key}{suffix}": each.name for key, each in zip(keys, linears, strict=True)}
    return {**names, f"ffn_down{suffix}": down.linears[0].name}


def _unplaced(stored: StoredTensor, architecture: Architecture, subject: str) -> CheckpointError:
    return CheckpointError(
        f"{subject}: {stored.name}",
        f"is not known as a tensor of {architecture.name}",
        "use the model's safetensors files: this variant of the architecture is not supported",
    )
