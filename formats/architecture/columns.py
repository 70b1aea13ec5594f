"""Values of a family's row besides projections, experts and states: norms, blocks, positions."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from formats.architecture.flags import Flag

ATTENTION = "self_attn"  # module of a layer that holds its KV scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """Norm of a layer. Its kind, and whether it has a bias, are fields of the family."""

    name: str
    size: str = "hidden_size"
    # the projection or module that reads it (the first one in a parallel block); empty: after
    # one
    feeds: str = ""
    present: Flag = True

    @property
    def of_attention(self) -> bool:
        return self.name.startswith(f"{ATTENTION}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks of one layer."""

    attention: bool = True
    state: bool = False  # a mixer with a state, instead of or next to attention
    dense: bool = False  # a feed-forward without experts
    experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Learned position embeddings, in a table with `offset` rows before position 0."""

    name: str  # name of the table
    offset: int = 0
    length_key: str = "max_position_embeddings"  # key of config.json: rows without the offset


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRules:
    """transformers' rules for keys that a config.json leaves out."""

    may_be_null: tuple[str, ...] = ()
    # Default by key. Without one, KV heads equal heads and head_dim is hidden_size / heads.
    defaults: Mapping[str, int] = field(default_factory=dict)
