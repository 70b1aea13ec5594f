"""Calls of the operations of drafts: a verification, a draft head's input and logits."""

import torch

from qkernels import ops
from qkernels.drafts.chunks import DraftChunks, DraftTables
from qkernels.operands.limbs import LimbForm
from qkernels.sampling.words import NUM_WORDS
from tests.qkernels.compile.cards import empty
from tests.qkernels.compile.cases.case import ASYMMETRIC, SM90, SYMMETRIC, Case


def drafts(R: int, num_drafts: int, rule: str = "drawn") -> None:
    """Both kernels, for R requests that each verify and draft so many."""
    count, D = 1 + num_drafts, R
    T = R * count
    of_T, of_R = (torch.zeros(size, dtype=torch.int64) for size in (T, R))
    chunks = DraftChunks(
        token_ids_T=of_T,
        positions_T=of_T,
        slots_T=of_T,
        context_lengths_R=of_R.int(),
        query_starts_R1=torch.zeros(R + 1, dtype=torch.int32),
        block_tables_RX=torch.zeros(R, 32, dtype=torch.int32),
        **dict.fromkeys(("rows_R", "known_R", "next_R", "capacity_R", "place_R"), of_R),
        **dict.fromkeys(("chunk_D", "first_D", "count_D"), of_R),
        max_sampled=count,
    )
    tables = DraftTables(
        tokens_NK1=torch.zeros(R + 1, count, dtype=torch.int64),
        rejected_N=torch.zeros(R + 1, dtype=torch.int64),
    )
    words = torch.zeros(T, NUM_WORDS, dtype=torch.int64)
    whole = rule == "drawn"
    ops.fill_drafts_(
        *(chunks, tables),
        page_size=16,
        words_TP=words if whole else None,
        fills_tokens=whole,
    )
    rules = {
        "drawn": {},
        "by chance": {"passes_DK": torch.zeros(D, num_drafts, dtype=torch.bool)},
        "known": {"accepted_D": of_R},
    }
    ops.settle_drafts_(
        *(of_T, words, chunks, tables),
        num_drafts=num_drafts,
        page_size=16,
        max_model_len=2048,
        **rules[rule],
    )


def draft_input(M: int, C: int, form: LimbForm | None = None) -> None:
    """Make a draft head's inputs from M tokens and states, and spread its logits."""
    tokens = torch.zeros(M, dtype=torch.int64)
    inputs = tokens, empty(64, C), empty(C), empty(M, C), empty(C), 1e-5
    ops.embed_norms(*inputs, form)
    ops.spread_logits(empty(M, 32000), torch.zeros(128256, dtype=torch.int32))


DRAFTS: dict[str, Case] = {
    "drafts of 1": Case(run=lambda: drafts(1, 3), quick=SM90),
    "drafts of 64, by chance": Case(run=lambda: drafts(64, 5, "by chance")),
    "drafts of 8, known": Case(run=lambda: drafts(8, 128, "known")),
    "draft input": Case(run=lambda: draft_input(64, 4096)),
    "draft input as limbs": Case(run=lambda: draft_input(1, 4096, SYMMETRIC), quick=SM90),
    "draft input as limbs, asymmetric": Case(run=lambda: draft_input(4, 5120, ASYMMETRIC)),
}
