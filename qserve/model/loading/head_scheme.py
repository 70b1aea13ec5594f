"""Scheme of an output head that is rounded while it loads: the setting --lm-head-quantization."""

from dataclasses import replace

from formats.errors import InputError
from formats.scheme import CHANNEL, Scheme, fitting_group_size
from qserve.model.model_config import ModelConfig

FLAG = "--lm-head-quantization"


def with_head_scheme(model: ModelConfig, name: str | None) -> ModelConfig:
    """Return the config with the scheme of the head; `name`: w8a16 or w4a16, None: no change.

    Groups have 128 inputs, or the largest smaller size that divides the hidden size. Raises
    InputError if the model has no head.
    """
    if name is None:
        return model
    if model.instead_of_head:
        problem = f"the model has {model.instead_of_head} in place of a head"
        raise InputError(f"{FLAG} {name}", problem, "remove the flag")
    size = fitting_group_size([model.hidden_size])
    groups = "channel" if size == CHANNEL else f"g{size}"
    return replace(model, head_scheme=Scheme.parse(f"{name}-sym-{groups}"))
