"""WholeSteps: decode steps whose CUDA graphs include the input copy and sampling.

For few requests the host is slower than the device: for a step of a 0.5B model the graph takes
0.49 ms on an H200 and Python 0.68 ms. A whole step needs only a copy within host memory and one
graph replay. The graph reads its inputs from a ring of pinned memory, takes pending tokens from the
samples of the previous step, and writes the sampled tokens to a second ring
(qkernels/gpu/rings.py).

A step can run as a whole step if all its rows sample and no row has biases, masks, penalties or log
probabilities.

D: entries of a ring. B: words of an entry. R: rows. S: rows that sample.
"""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from qkernels import ops
from qkernels.sampling.settings import SampleSettings
from qkernels.sampling.words import HISTORY_ROW, NUM_LOGPROBS
from qserve.engine.step.step_input import StepInput
from qserve.engine.step.transfer import HostCopy, to_device

# Entries of each ring: more than the steps in flight, whose tokens the host has not read.
DEPTH = 16
# With more rows the device is slower than the host, also for a 0.5B model.
MAX_ROWS = 64


def is_whole(step: StepInput) -> bool:
    """Return True if the step can run as a whole step."""
    words_SP = step.sample_words_SP
    return (
        step.num_tokens == step.num_sampled <= MAX_ROWS
        and step.max_query_len == 1
        and step.draft_rows is None
        and step.adapter_slots_T is None
        and not step.has_media
        and not (step.awaits_masks or step.history_fills or len(step.sample_bias_E))
        and int(words_SP[:, (NUM_LOGPROBS, HISTORY_ROW)].max()) < 0
    )


def launch_rings(device: torch.device) -> None:
    """Launch the ring kernels once. Only steps in graphs launch them otherwise."""
    whole = WholeSteps(1, device)
    whole.receive_(torch.zeros(1, dtype=torch.int64, device=device), 1)
    whole.deliver_(torch.zeros(1, dtype=torch.int64, device=device))


class WholeSteps:
    """The rings of captured whole steps on one device."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        """`num_words`: size of the largest step's inputs, in int64 words."""
        pinned = {"dtype": torch.int64, "pin_memory": device.type == "cuda"}
        self._device = device
        self._in_DB = torch.zeros(DEPTH, num_words, **pinned)
        self._out_DR = torch.zeros(DEPTH, MAX_ROWS, **pinned)
        self._entries = self._in_DB.numpy()
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.samples_R = torch.zeros(MAX_ROWS, dtype=torch.int64, device=device)
        self._bias_E = torch.zeros(1, dtype=torch.int64, device=device)
        self._num_sent = 0
        self._done = [torch.cuda.Event() for _ in range(DEPTH)] if device.type == "cuda" else []

    def entry(self) -> np.ndarray:
        """Return the ring entry of the next step. Waits until the device has read it.

        The caller fills the entry before it launches the step.
        """
        slot = self._num_sent % DEPTH
        if self._num_sent >= DEPTH and self._done:
            self._done[slot].synchronize()
        return self._entries[slot]

    def receive_(self, inputs_B: torch.Tensor, num_tokens: int) -> None:
        """Start a step on the device: copy its entry to `inputs_B` and fill in pending tokens."""
        from qkernels.gpu.rings import receive_  # imports triton, which a CPU may lack

        receive_(inputs_B, self._in_DB, self._counter, self.samples_R, num_tokens)

    def sample_(self, logits_SV: torch.Tensor, words_SP: torch.Tensor) -> None:
        """End a step on the device: sample its tokens and deliver them."""
        settings = SampleSettings(
            words_SP=words_SP,
            bias_E=self._bias_E,
            any_random=True,
            any_filter=True,
            num_logprobs=-1,
        )
        self.deliver_(ops.sample_(logits_SV, settings).tokens_S)

    def deliver_(self, tokens_S: torch.Tensor) -> None:
        """Write the tokens of the current step to its entry of the output ring; end the step."""
        from qkernels.gpu.rings import deliver_

        deliver_(tokens_S, self.samples_R, self._out_DR, self._counter)

    @contextlib.contextmanager
    def kept_samples(self) -> Iterator[None]:
        """Context for a padding step. Preserves the samples that the next step may read."""
        kept_R = self.samples_R.clone()
        yield
        self.samples_R.copy_(kept_R)

    def launched(self, num_rows: int) -> HostCopy:
        """Record that the step of the filled entry was launched. Returns its tokens' host copy."""
        slot = self._num_sent % DEPTH
        self._num_sent += 1
        tokens_S = self._out_DR[slot, :num_rows]
        if not self._done:
            return HostCopy(tokens_S)
        self._done[slot].record()
        return HostCopy.under_way(tokens_S, self._done[slot])

    def token_ids(self, step: StepInput, last_samples: torch.Tensor | None) -> np.ndarray:
        """Return a step's token ids; -1 - r for a pending token that is in row r of `samples_R`."""
        rows = step.pending_row
        if not len(rows):
            return step.token_ids_T
        if last_samples is None or last_samples.data_ptr() != self.samples_R.data_ptr():
            # the previous step was not a whole step
            drawn = last_samples[to_device(rows, self._device)]
            self.samples_R[: len(rows)] = drawn
            rows = np.arange(len(rows))
        token_ids_T = step.token_ids_T.copy()
        token_ids_T[step.pending_index] = -1 - rows
        return token_ids_T
