"""StepInputs for tests of their readers."""

import numpy as np

from qkernels.sampling.words import NUM_WORDS, SampleRow, pack_row
from qserve.engine.step.step_input import StepInput

PER_TOKEN = ("token_ids_T", "positions_T", "slots_T")


def make_step(counts, *, width=1, seed=0, num_sampled=None, **fields):
    """A step of chunks of `counts` tokens with random contents. `num_sampled` rows of each."""
    generator = np.random.default_rng(seed)
    ends = np.cumsum(counts)
    sampled = [1] * len(counts) if num_sampled is None else num_sampled
    rows = [np.arange(end - n, end) for end, n in zip(ends, sampled, strict=True)]
    made = {name: generator.integers(1, 1000, sum(counts)) for name in PER_TOKEN} | {
        "block_tables_RX": generator.integers(1, 99, (len(counts), width), np.int32),
        "query_starts_R1": np.array([0, *ends], np.int32),
        "context_lengths_R": generator.integers(1, 99, len(counts), np.int32),
        "state_slots_R": np.full(len(counts), -1, np.int32),
        "logits_rows_S": np.concatenate(rows),
        "max_query_len": max(counts),
        "max_context_len": 99,
        "pending_index": np.zeros(0, np.int64),
        "pending_row": np.zeros(0, np.int64),
        "sample_words_SP": np.array([(*pack_row(SampleRow()), 0, 0)] * sum(sampled)).reshape(
            -1, NUM_WORDS
        ),
        "sample_bias_E": np.zeros(0, np.int64),
    }
    return StepInput(**made | fields)
