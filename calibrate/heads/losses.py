"""Loss of drafts against the target's distribution.

Legend: B windows, A anchors, V target vocabulary, U draft vocabulary.
"""

import torch


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    draft_ids_U: torch.Tensor | None,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy of logits [..., U] with the target's distribution, and the accuracy.

    `target`: logits [..., V]. Accuracy is the fraction of rows whose most likely token equals the
    target's. If the target's most likely token is not in the draft vocabulary, the row has no loss.
    `weights`: factors of the rows' losses; None: 1. The sum is divided by the number of rows.
    """
    best = target.argmax(-1)
    inside = torch.ones_like(best, dtype=torch.bool)
    drawn = logits.argmax(-1)
    if draft_ids_U is not None:
        inside = torch.isin(best, draft_ids_U)
        target, drawn = target[..., draft_ids_U], draft_ids_U[drawn]
    wanted = target.float().softmax(-1)
    entropy = -(wanted * logits.float().log_softmax(-1)).sum(-1)
    entropy = entropy if weights is None else entropy * weights
    loss = (entropy * inside).sum() / inside.sum().clamp(min=1)
    return loss, (drawn == best).float().mean()


@torch.no_grad()
def weights_after(
    weights_BA: torch.Tensor,
    logits_BAU: torch.Tensor,
    ids_BA: torch.Tensor,
    draft_ids_U: torch.Tensor | None,
    after_errors: float,
) -> torch.Tensor:
    """Return the weights of the next draft of each block.

    A server discards all drafts after a wrong one. If the most likely token of `logits_BAU` is not
    the text's token `ids_BA`, the next drafts of the block have the weight `after_errors`.
    """
    drawn_BA = logits_BAU.argmax(-1)
    drawn_BA = drawn_BA if draft_ids_U is None else draft_ids_U[drawn_BA]
    return torch.where(drawn_BA == ids_BA, weights_BA, after_errors)
