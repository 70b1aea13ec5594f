"""Drafters for tests: they know the answer and err at a given rate."""

import random

import torch

from qserve.speculation.draft_model import DraftModelDrafter, build
from qserve.speculation.drafter import DEVICE_DRAFTERS


class Oracle:
    """A host drafter that knows what comes, errs in a third of its drafts, and repeats nothing."""

    def __init__(self, answers, seed, vocab_size):
        self._answers, self._rng, self._vocab_size = answers, random.Random(seed), vocab_size
        self.finished = []

    def propose(self, request_id, token_ids, most):
        answer = self._answers[request_id]
        drafts = answer[len(token_ids) : len(token_ids) + self._rng.randint(0, most)]
        return [
            self._rng.randrange(self._vocab_size) if self._rng.random() < 0.3 else token
            for token in drafts
        ]

    def finish(self, request_id, token_ids, num_prompt_tokens):
        self.finished.append(request_id)


class NoisyDraftModel(DraftModelDrafter):
    """A draft model some of whose drafts are replaced by chance, before the next is drawn."""

    share = 0.3

    def propose(self, step):
        generator = torch.Generator().manual_seed(len(step.next_tokens_T))
        drafts_DK = super().propose(step)
        wrong = torch.rand(drafts_DK.shape, generator=generator) < self.share
        return torch.where(wrong, (drafts_DK + 7) % self._vocab_size, drafts_DK)


def build_erring(context):
    drafter = build(context)
    drafter.__class__ = NoisyDraftModel
    return drafter


ERRING = f"{__name__}:build_erring"
assert "draft_model" in DEVICE_DRAFTERS
