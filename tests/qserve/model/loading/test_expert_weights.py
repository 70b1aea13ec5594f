"""Tests of qserve/model/loading/expert_weights.py."""

from formats.families import FAMILIES
from qkernels.moe.routing import Glu
from qserve.model.loading.expert_weights import glu_of


def test_gpt_oss_needs_no_key_that_its_published_config_lacks():
    published = {"model_type": "gpt_oss", "hidden_act": "silu"}
    experts = FAMILIES["GptOssForCausalLM"].experts
    assert glu_of(experts, "silu", published | {"swiglu_limit": 5.0}) == Glu(
        alpha=1.702, offset=1.0, limit=5.0
    )
    assert glu_of(experts, "silu", published).limit == 7.0
    assert glu_of(experts, "silu", published | {"swiglu_alpha": 1.5}).alpha == 1.5
