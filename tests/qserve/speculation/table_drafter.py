"""A device drafter for tests that looks the next token up in known answers, and errs sometimes."""

import torch

from qserve.speculation.drafter import DEVICE_DRAFTERS


class TableDrafter:
    """A DeviceDrafter without a model: the token after each pair of a position and its token."""

    aux_layers = ()
    attentions = ()
    looks_ahead = reads_images = False
    first_kv_heads = ()
    extra_positions = 0
    share = 0.25  # of drafts that are wrong

    def __init__(self, texts):
        self._next = {}
        for text in texts:
            for position, token in enumerate(text[:-1]):
                self._next[position, token] = text[position + 1]
        self._generator = torch.Generator().manual_seed(1)

    def propose(self, step):
        tokens = step.tokens_D.tolist()
        drafts = []
        for index in range(step.num_drafts):
            positions = step.draft_positions.positions_KD[index].tolist()
            tokens = [self._next.get(each, 5) for each in zip(positions, tokens, strict=True)]
            wrong = torch.rand(len(tokens), generator=self._generator) < self.share
            tokens = [
                (token + 7) % 500 if is_wrong else token
                for token, is_wrong in zip(tokens, wrong.tolist(), strict=True)
            ]
            drafts.append(torch.tensor(tokens, dtype=torch.int64).to(step.tokens_D.device))
        if not drafts:
            return step.tokens_D.new_empty(len(tokens), 0)
        return torch.stack(drafts, 1)


def install(monkeypatch, texts):
    """Draft by the texts wherever a draft model is asked for."""
    monkeypatch.setitem(DEVICE_DRAFTERS, "draft_model", f"{__name__}:build_installed")
    monkeypatch.setattr("tests.qserve.speculation.table_drafter.TEXTS", texts)


TEXTS = ()


def build_installed(context):
    return TableDrafter(TEXTS)
