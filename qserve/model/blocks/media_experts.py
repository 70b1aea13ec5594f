"""Two mixtures of experts: one for text, the other for the tokens of images and videos (ERNIE).

T: tokens of the step. C: hidden size. E: experts of one mixture.
"""

from collections.abc import Iterator

import torch

from qkernels import ops
from qkernels.moe.experts import PreparedExperts
from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import LinearOutput, reduced
from qserve.model.blocks.linear import FLOAT_PLAN, LinearPlan, Product
from qserve.model.blocks.moe import Router, SharedExpert
from qserve.parallel.communicator import Communicator, RankPartial


class Mixture(torch.nn.Module):
    """Router and experts for some of the tokens. The id E means that a token has no expert here."""

    def __init__(self, router: Router, experts: PreparedExperts) -> None:
        super().__init__()
        self.router, self.experts = router, experts

    def forward(
        self, x_TC: torch.Tensor, others_T1: torch.Tensor | None, shared_TC: torch.Tensor | None
    ) -> LinearOutput:
        """Return the sum over the experts of each token, plus `shared_TC`.

        `others_T1`: True for tokens without an expert here; None: there are no such tokens.
        """
        routes = self.router(x_TC)
        if others_T1 is not None:
            ids_Tk = routes.ids_Mk.masked_fill(others_T1, self.router.routing.num_experts)
            routes = routes._replace(ids_Mk=ids_Tk)
        return ops.experts(x_TC, routes, self.experts, None, shared_TC)


class MediaExperts(torch.nn.Module):
    """The sum of the outputs of a token's experts and of the shared expert."""

    def __init__(
        self,
        *,
        text: Mixture,
        media: Mixture,
        shared: SharedExpert,
        communicator: Communicator | None = None,  # ranks that hold shards of each expert
    ) -> None:
        super().__init__()
        self.text, self.media, self.shared = text, media, shared
        self.communicator = communicator

    def products(self) -> Iterator[Product]:
        """Yield the products, each with the operation that consumes its result."""
        yield self.text.experts, "norm"
        yield self.media.experts, "norm"
        yield from self.shared.mlp.products()

    def plan(self, rows: int) -> LinearPlan:
        """Return a plan with a tensor as input, because the routers read the same norm."""
        return FLOAT_PLAN

    def forward(
        self, x_TC: LinearInput, plan: LinearPlan, is_media_T: torch.Tensor | None
    ) -> LinearOutput | RankPartial:
        """Return the block's result, the input of the next norm.

        `is_media_T`: True for tokens of media; None: the step has none, and the experts for media
        do not run.
        """
        shared_TC = self.shared(x_TC)
        if is_media_T is None:
            out_TC = self.text(x_TC, None, shared_TC)
        else:
            is_media_T1 = is_media_T[:, None]
            of_text_TC = reduced(self.text(x_TC, is_media_T1, shared_TC))
            out_TC = of_text_TC + reduced(self.media(x_TC, ~is_media_T1, None))
        if self.communicator is None:
            return out_TC
        return RankPartial(x=out_TC, communicator=self.communicator)
