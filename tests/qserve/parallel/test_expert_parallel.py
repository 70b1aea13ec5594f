"""Experts that ranks hold whole: what ranks compute together is what one computes alone."""


import pytest

from qkernels.moe.experts import PreparedExperts
from qserve.model.blocks.moe import MoeMlp
from tests.qserve.parallel.test_sharing import assert_shared_out
from tests.tiny_families import TINY_FAMILIES, WITHOUT_RANKS

WHOLE = {"enable_expert_parallel": True}
KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
FAMILIES = [
    family
    for family, (_, config) in TINY_FAMILIES.items()
    if any(key in config for key in KEYS) and family not in WITHOUT_RANKS
]
FEW = ("gpt_oss", "qwen2_moe")


def settings_of(size, strategy="linear"):
    return {
        **WHOLE,
        "tensor_parallel_size": size,
        "expert_placement_strategy": strategy,
    }


def experts_of(decoder):
    """Prepared experts of each layer that has any."""
    return [
        module.experts
        for layer in decoder.layers
        for module in layer.modules()
        if isinstance(module, MoeMlp)
    ]


def assert_whole_experts(folder, size, limit=1e-5, strategy="linear"):
    decoders = assert_shared_out(folder, size, limit, **settings_of(size, strategy))
    layers = list(zip(*(experts_of(decoder) for decoder in decoders), strict=True))
    assert layers
    for ranks in layers:
        assert all(isinstance(each, PreparedExperts) for each in ranks)
        (routed,) = {each.problem.routed_experts for each in ranks}
        assert sum(each.problem.num_experts for each in ranks) == routed
        assert all(each.problem.is_partial for each in ranks)
    return decoders


@pytest.mark.parametrize(
    ("family", "size"),
    [(family, 2) for family in FEW]
    + [
        pytest.param(family, size, marks=pytest.mark.exhaustive)
        for family in FAMILIES
        for size in (2, 4)
        if (family, size) not in [(few, 2) for few in FEW]
    ],
)
def test_every_family(family, size, tiny_model):
    assert_whole_experts(tiny_model(family), size)
