"""The calls of public operations that are compiled for every card, by name.

A call launches what the card would run: its default config, the kernels that make the operand, the
reduction.
"""

from tests.qkernels.compile.cases.adapted_experts import ADAPTED_EXPERTS
from tests.qkernels.compile.cases.attention import ATTENTION
from tests.qkernels.compile.cases.case import Case
from tests.qkernels.compile.cases.drafts import DRAFTS
from tests.qkernels.compile.cases.experts import EXPERTS
from tests.qkernels.compile.cases.latent import LATENT_ATTENTION
from tests.qkernels.compile.cases.lora import LORA
from tests.qkernels.compile.cases.products import PRODUCTS
from tests.qkernels.compile.cases.ranks import RANKS
from tests.qkernels.compile.cases.rowwise import ROWWISE
from tests.qkernels.compile.cases.states import STATES

CASES: dict[str, Case] = {
    **PRODUCTS,
    **ATTENTION,
    **LATENT_ATTENTION,
    **ROWWISE,
    **EXPERTS,
    **STATES,
    **LORA,
    **ADAPTED_EXPERTS,
    **DRAFTS,
    **RANKS,
}
