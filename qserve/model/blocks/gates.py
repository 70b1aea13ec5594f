"""Gates that multiply whole heads or rows of a block's output."""

import torch


def repeated(gate: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return gates [..., 1] repeated to the shape of `like`, what they multiply.

    For a CPU: the bits of an activation there depend on its index in a SIMD vector, so those of a
    single gate would depend on the other rows of the step.
    """
    return gate.expand_as(like).contiguous()
