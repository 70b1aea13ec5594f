"""Sampling: `sample_` checks its arguments, then runs a kernel. Legend: see qkernels/ops.py."""

import torch

from qkernels import dispatch
from qkernels.checks import check_float, check_tensor, expect_ndim
from qkernels.errors import KernelError
from qkernels.sampling.rows import SAMPLE
from qkernels.sampling.settings import MAX_LOGPROBS, Samples, SampleSettings
from qkernels.sampling.words import NUM_WORDS


def sample_(
    logits_SV: torch.Tensor,
    settings: SampleSettings,
    history_WV: torch.Tensor | None = None,
    kernel: str | None = None,
) -> Samples:
    """Draw a token from each row of logits [S, V] by `settings` (sampling/settings.py).

    `settings` are on the logits' device. `history_WV`, int32, has for each row with penalties and
    each token: 2 * (occurrences in the output) + (1 if the token is in the prompt). Drawn tokens
    are added in place. A row's draw depends only on that row. A row that contains NaN gets
    settings.invalid_token. `kernel` requests a row of sampling/rows.py.
    """
    check_float("sample_ logits", logits_SV)
    rows, vocabulary = expect_ndim("sample_ logits", logits_SV, 2)
    if not 0 < vocabulary < 2**31 - 1:
        raise KernelError(
            "sample_ logits",
            f"expected at least one column, found {vocabulary}",
            "pass logits of the vocabulary",
        )
    int64 = (torch.int64,)
    check_tensor("sample_ settings", settings.words_SP, (rows, NUM_WORDS), int64, logits_SV)
    check_tensor("sample_ bias", settings.bias_E, (None,), int64, logits_SV)
    if settings.num_logprobs > MAX_LOGPROBS:
        found = settings.num_logprobs
        raise KernelError(
            "sample_ num_logprobs",
            f"expected at most {MAX_LOGPROBS}, found {found}",
            "ask for fewer",
        )
    if history_WV is not None:
        check_tensor("sample_ history", history_WV, (None, vocabulary), (torch.int32,), logits_SV)
        if not history_WV.is_contiguous():
            raise KernelError(
                "sample_ history", "expected a contiguous table", "make it contiguous"
            )
    run = dispatch.implementation(
        SAMPLE, device=logits_SV.device.type, dtype=logits_SV.dtype, requested=kernel
    )
    return run(logits_SV, settings, history_WV)
