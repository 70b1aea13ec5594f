"""Loss of drafts against their target's distribution. Legend: V target vocabulary, U draft's."""

import torch


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, draft_ids_U: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean cross entropy of logits [..., U] with the target's distribution, share of rows whose
    most likely token is the target's).

    `target`: logits [..., V]. Rows whose most likely token the head lacks have no loss.
    """
    best = target.argmax(-1)
    inside = torch.ones_like(best, dtype=torch.bool)
    drawn = logits.argmax(-1)
    if draft_ids_U is not None:
        inside = torch.isin(best, draft_ids_U)
        target, drawn = target[..., draft_ids_U], draft_ids_U[drawn]
    wanted = target.float().softmax(-1)
    entropy = -(wanted * logits.float().log_softmax(-1)).sum(-1)
    loss = (entropy * inside).sum() / inside.sum().clamp(min=1)
    return loss, (drawn == best).float().mean()
