"""Loss of drafts against the target's distribution.

Legend: V target vocabulary, U draft vocabulary.
"""

import torch


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, draft_ids_U: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy of logits [..., U] with the target's distribution, and the accuracy.

    `target`: logits [..., V]. Accuracy is the fraction of rows whose most likely token equals the
    target's. If the target's most likely token is not in the draft vocabulary, the row has no loss.
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
