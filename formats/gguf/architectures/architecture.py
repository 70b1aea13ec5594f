"""Architecture: a row of the table of llama.cpp's architectures. Needs no torch."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from formats.architecture.family import Family
from formats.architecture.flags import Flag, is_set
from formats.families import FAMILIES
from formats.gguf.architectures.converted import ConvertedTensor
from formats.gguf.architectures.parts import BEFORE


class Variant(NamedTuple):
    """Fields of a row that differ in some files of the architecture."""

    tensor: str  # a file with this tensor (name below layer 0) is of the variant
    flag: Flag  # a config.json with this flag is of the variant
    fields: Mapping[str, Any]
    without: Collection[str] = ()  # a file without any of these metadata is of the variant, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One value of `general.architecture`: how its files differ from a family's checkpoints."""

    name: str
    family: str  # architecture of the family's row
    norms: Mapping[str, str] = field(default_factory=lambda: BEFORE)
    # True: files have rows of q and k in the order of rotated pairs (2 i, 2 i + 1), not of halves
    permuted: bool = False
    # config.json key -> metadata key below the architecture; optional in files
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keys with one value in all models
    # Layers with a sliding window. "": none; "all": all; "pattern": all except every n-th layer
    window: Literal["", "all", "pattern"] = ""
    pattern: int = 0  # n, unless the file states a pattern; 0: the file must state it
    bias_keys: Mapping[str, str] = field(default_factory=dict)  # config.json key -> a layer's bias
    # Families of files with this architecture that have
    with_experts: str = ""  # experts
    with_window: str = ""  # a sliding window
    with_sigmoid: str = ""  # experts that are chosen by sigmoid
    with_shared: str = ""  # shared experts
    without_experts: str = ""  # no experts
    with_norms: tuple[str, str] = ("", "")  # (metadata key, family of files in which it is true)
    has_attention: bool = True  # False: no layer has attention, and files state no heads
    inner_key: str = ""  # metadata key of a width that files have instead of feed_forward_length
    also: tuple[str, ...] = ()  # more families that are written as this architecture
    variants: tuple[Variant, ...] = ()
    # Additional tensors of a layer: GGUF's full name below the layer -> the family's name
    tensors: Mapping[str, str | ConvertedTensor] = field(default_factory=dict)
    # Additional linears of a layer: names as for tensors, without ".weight"
    linears: Mapping[str, str] = field(default_factory=dict)
    # Linears of layers with a state; they take precedence over `linears` in these layers
    state_linears: Mapping[str, str] = field(default_factory=dict)
    output_norm: str = "output_norm"  # GGUF's name of the last norm
    # Tensors with one number per layer, which files hold as a list: key of the metadata -> the
    # family's name below the layer
    scalars: Mapping[str, str] = field(default_factory=dict)
    # Metadata that llama.cpp needs and config.json does not state. A file that is read must state
    # the same value or none. Value None: such a key is not written.
    constants: Mapping[str, Any] = field(default_factory=dict)
    # Values that config.json must have, so that llama.cpp can read the written file
    needs: Mapping[str, Any] = field(default_factory=dict)
    needs_all_kv_heads: bool = False  # it also needs as many KV heads as heads
    needs_square_output: bool = False  # it also needs heads * head dim = hidden size
    # canonical key of rotary embeddings -> key in the family's config class, and its defaults
    rope_names: Mapping[str, str] = field(default_factory=dict)
    default_theta: float | None = None
    default_part: float = 1.0  # fraction of a head that has RoPE
    states_head_dim: bool = True  # False: the config class computes head_dim and refuses others
    # "own": llama.cpp always reads a separate head; "tied": it always uses the embedding; "": the
    # head is separate if the file has one.
    head: Literal["", "own", "tied"] = ""
    # Factors that files include in the weights. The function gets GGUF's name of a tensor, without
    # ".weight", and config.json; it returns (number of rows, factor) of each range of rows, where
    # 0 rows means all.
    factors: Callable[[str, Mapping[str, Any]], list[tuple[int, float]]] | None = None
    # Keys of config.json that check_states does not compare, because GGUF has no such form
    uncompared: tuple[str, ...] = ()
    # Metadata -> additional keys of config.json that select the family's variant
    stated: Callable[[Any], Mapping[str, Any]] | None = None
    value_width: str = ""  # config.json key of the width of values; "": the same as of keys
    joins_kv_b: bool = False  # files have kv_b_proj of latent attention in one tensor
    # True: files have gate and up of all experts in one stack, each expert's gate first. Separate
    # stacks are read, too.
    joins_gate_up: bool = False
    # True: files need k and v projections also in layers that reuse another layer's keys
    fills_shared_layers: bool = False
    # True: sizes may be lists by layer, which more_config and more_metadata read and write
    sizes_by_layer: bool = False
    # Functions for unusual rotary embeddings: Metadata -> keys of config.json, and config.json ->
    # (metadata, tensors of divisors by name)
    rope_config: Callable[[Any], Mapping[str, Any]] | None = None
    rope_metadata: (
        Callable[[Mapping[str, Any]], tuple[dict[str, Any], dict[str, list[float]]]] | None
    ) = None
    # Functions for additional keys: (Metadata, config.json so far) -> keys of config.json, and
    # config.json -> metadata. The second raises CheckpointError for values that the architecture
    # cannot express.
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
        """Return the row of the family that a file with these features has.

        `has_norms`: the metadata value that `with_norms` names is true.
        """
        name = (has_experts and self.with_experts) or (has_window and self.with_window)
        name = (by_sigmoid and self.with_sigmoid) or (has_shared and self.with_shared) or name
        name = self.with_norms[1] if has_norms else name
        name = (not has_experts and self.without_experts) or name
        return FAMILIES[name or self.family]

    def variant_of_file(self, names: Collection[str], keys: Collection[str]) -> "Architecture":
        """Return the row for a file with these tensors and metadata keys."""
        for tensor, _, different, without in self.variants:
            lacks = without and not any(f"{self.name}.{key}" in keys for key in without)
            if lacks or f"blk.0.{tensor}" in names:
                return replace(self, **different)
        return self

    def variant_of_config(self, config: Mapping[str, Any]) -> "Architecture":
        """Return the row for the file that is written from a config.json."""
        for _, flag, different, _ in self.variants:
            if is_set(flag, config):
                return replace(self, **different)
        return self

    @property
    def is_latent(self) -> bool:
        """Return True for latent attention."""
        return bool(FAMILIES[self.family].latent)
