"""All families compute in bfloat16, the dtype of most published checkpoints."""

import pytest

from qserve.llm import LLM
from tests.qserve.model.variants import TOKENS, relative
from tests.tiny_families import TINY_FAMILIES

FEW = ("llama", "inkling", "qwen3_5")
# Rounding in a tiny random model changes logits by some percent. A token that is routed to other
# experts changes more.
LIMIT = 0.3


@pytest.mark.parametrize(
    "family",
    [
        family if family in FEW else pytest.param(family, marks=pytest.mark.exhaustive)
        for family in TINY_FAMILIES
    ],
)
def test_bfloat16_is_close_to_float32(family, tiny_model):
    settings = {"device": "cpu", "max_model_len": 64}
    folder = str(tiny_model(family))
    want = LLM(folder, dtype="float32", **settings).logits(TOKENS)
    found = LLM(folder, dtype="bfloat16", **settings).logits(TOKENS)
    assert relative(found.float(), want.float()) < LIMIT
