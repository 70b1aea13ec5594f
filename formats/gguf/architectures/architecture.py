"""The row of an architecture: one value of `general.architecture`. Needs no torch."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from formats.architecture.family import Family
from formats.architecture.flags import Flag, is_set
from formats.families import FAMILIES
from formats.gguf.architectures.held import Held
from formats.gguf.architectures.parts import BEFORE


class Variant(NamedTuple):
    """Fields of a row that differ in some files."""

    tensor: str  # the files that have it; its name below layer 0
    flag: Flag  # the same in config.json
    fields: Mapping[str, Any]
    without: Collection[str] = ()  # the files that state none of these metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Row of the table: one value of `general.architecture`."""

    name: str
    family: str  # architecture of the family's row
    norms: Mapping[str, str] = field(default_factory=lambda: BEFORE)
    # Rows of q and k are in the order of rotated pairs (2 i, 2 i + 1), not of halves.
    permuted: bool = False
    # config.json key -> metadata key below the architecture; left out where the file has none
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keys with one value in all models
    # Layers with a sliding window: "all", or every n-th layer has none; 0: no layer has one.
    window: Literal["", "all", "pattern"] = ""
    pattern: int = 0  # the usual n; the file may state its own
    bias_keys: Mapping[str, str] = field(default_factory=dict)  # config.json key -> a layer's bias
    # Families of files with experts, or with a window, under the same name
    with_experts: str = ""
    with_window: str = ""
    with_sigmoid: str = ""  # experts are chosen by sigmoid
    with_shared: str = ""  # there are shared experts
    without_experts: str = ""  # there are none
    with_norms: tuple[str, str] = ("", "")  # key of metadata that is true, and the family then
    has_attention: bool = True  # False: no layer has attention, and files state no heads
    inner_key: str = ""  # metadata key of a width that files have instead of feed_forward_length
    also: tuple[str, ...] = ()  # families with the same layers, which are written so
    variants: tuple[Variant, ...] = ()
    # Other tensors of a layer: GGUF's full name below the layer -> the family's
    tensors: Mapping[str, str | Held] = field(default_factory=dict)
    linears: Mapping[str, str] = field(default_factory=dict)  # other linears, without a leaf
    # The same in layers with a state, also where other layers have that name for another linear
    state_linears: Mapping[str, str] = field(default_factory=dict)
    output_norm: str = "output_norm"  # GGUF's name of the last norm
    # Tensors of one number in each layer, which files hold as a list: key of the metadata -> the
    # family's name below the layer
    scalars: Mapping[str, str] = field(default_factory=dict)
    # Metadata that llama.cpp needs although config.json does not state them; a file that is read
    # must state the same, or nothing. None: is not written.
    constants: Mapping[str, Any] = field(default_factory=dict)
    # What config.json must state, by key, for llama.cpp to read the file
    needs: Mapping[str, Any] = field(default_factory=dict)
    needs_all_kv_heads: bool = False  # the same: there are as many KV heads as heads
    needs_square_output: bool = False  # the same: heads times their width is the hidden size
    # The class's names for the usual keys of rotary embeddings, and its defaults
    rope_names: Mapping[str, str] = field(default_factory=dict)
    default_theta: float | None = None
    default_part: float = 1.0  # share of a head that rotates
    states_head_dim: bool = True  # False: the config class computes it and takes no other
    # llama.cpp reads a head of its own from the file ("own"), or always takes the embedding
    # ("tied"); "": either, as the file has it.
    head: Literal["", "own", "tied"] = ""
    # Factors that files have in the weights: function of GGUF's name of a tensor, without its
    # leaf, and config.json -> (rows, factor) of each run of rows; 0 rows: all
    factors: Callable[[str, Mapping[str, Any]], list[tuple[int, float]]] | None = None
    uncompared: tuple[str, ...] = ()  # keys of config.json that files have no form for
    # Metadata -> more keys of config.json that decide between the family's variants
    stated: Callable[[Any], Mapping[str, Any]] | None = None
    value_width: str = ""  # key of config.json; values are as wide as keys where it is empty
    joins_kv_b: bool = False  # files have kv_b_proj of latent attention in one tensor
    # Files have gate and up of all experts in one stack, each expert's gate first; apart they are
    # read, too.
    joins_gate_up: bool = False
    # llama.cpp reads keys and values also of layers that read those of an earlier one
    fills_shared_layers: bool = False
    # Sizes may be lists by layer; the functions below read and write them.
    sizes_by_layer: bool = False
    # The same for rotary embeddings that differ from the usual: Metadata -> keys of config.json,
    # and config.json -> metadata and tensors of divisors by name
    rope_config: Callable[[Any], Mapping[str, Any]] | None = None
    rope_metadata: (
        Callable[[Mapping[str, Any]], tuple[dict[str, Any], dict[str, list[float]]]] | None
    ) = None
    # Functions of this row: (Metadata, config.json so far) -> more keys, and config.json -> more
    # metadata. The latter raises CheckpointError for what the architecture has no form for.
    more_config: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] | None = None
    more_metadata: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None

    def family_of(
        self,
        *,
        has_experts: bool,
        has_window: bool,
        by_sigmoid: bool = False,
        has_shared: bool = False,
        has_norms: bool = False,
    ) -> Family:
        """Return the family's row for a file with experts, chosen by sigmoid, or a window.

        `has_norms`: the metadata that `with_norms` names are true.
        """
        name = (has_experts and self.with_experts) or (has_window and self.with_window)
        name = (by_sigmoid and self.with_sigmoid) or (has_shared and self.with_shared) or name
        name = self.with_norms[1] if has_norms else name
        name = (not has_experts and self.without_experts) or name
        return FAMILIES[name or self.family]

    def variant_of_file(self, names: Collection[str], keys: Collection[str]) -> "Architecture":
        """Return the row with the fields of a file with these tensors and keys of metadata."""
        for tensor, _, different, without in self.variants:
            lacks = without and not any(f"{self.name}.{key}" in keys for key in without)
            if lacks or f"blk.0.{tensor}" in names:
                return replace(self, **different)
        return self

    def variant_of_config(self, config: Mapping[str, Any]) -> "Architecture":
        """Return the row with the fields of the file that a config.json becomes."""
        for _, flag, different, _ in self.variants:
            if is_set(flag, config):
                return replace(self, **different)
        return self

    @property
    def is_latent(self) -> bool:
        """Return True for latent attention."""
        return bool(FAMILIES[self.family].latent)
