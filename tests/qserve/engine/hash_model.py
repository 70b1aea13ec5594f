"""A language model of hashes on a device of its own: each token depends on every key before it.

It replaces an engine's workers, so that steps cost little. Its output tokens show whether every KV
page has the right contents: a wrong, lost or overwritten key anywhere changes the sampled tokens.
"""

import numpy as np

MASK = 2**64 - 1


def key_of(token, position, total):
    """The key of a token, which depends on the sum of all keys before it."""
    return ((total ^ (token * 0x9E3779B97F4A7C15 & MASK)) * 0xBF58476D1CE4E5B9 + position) & MASK


def draw(total, vocab_size):
    return (total >> 17) % (vocab_size - 3) + 3


def continuation(prompt, num_tokens, vocab_size):
    """The model's output after a prompt: the reference, independent of the engine."""
    total, position, output = 0, 0, []
    for token in prompt:
        total = (total + key_of(token, position, total)) & MASK
        position += 1
    for _ in range(num_tokens):
        output.append(draw(total, vocab_size))
        total = (total + key_of(output[-1], position, total)) & MASK
        position += 1
    return output


class Handle:
    prompts = None

    def __init__(self, tokens):
        self._tokens = tokens

    def result(self):
        return self._tokens

    def logprobs(self):
        return None


class HashDevice:
    """Takes StepInputs as WorkerGroup does."""

    def __init__(self, num_pages, page_size, num_slots, vocab_size):
        self._size, self._vocab_size = page_size, vocab_size
        self._keys = np.zeros((num_pages, page_size), np.uint64)
        self._host = np.zeros((num_slots, page_size), np.uint64)
        self._last = np.zeros(0, np.int64)
        self.num_tokens = 0

    def check(self):
        """There are no ranks of which one could be missing."""

    def launch(self, step):
        moves = step.page_moves
        if moves is not None:
            self._host[moves.stored_slots] = self._keys[moves.stored_pages]
            self._keys[moves.loaded_pages] = self._host[moves.loaded_slots]
        tokens = step.token_ids_T.copy()
        tokens[step.pending_index] = self._last[step.pending_row]
        flat = self._keys.reshape(-1)
        ends = np.full(step.num_tokens, -1, object)
        starts = step.query_starts_R1.tolist()
        for row, (first, last) in enumerate(zip(starts, starts[1:], strict=False)):
            position = int(step.positions_T[first])
            table = step.block_tables_RX[row].astype(np.int64)
            places = np.arange(position)
            before = flat[table[places // self._size] * self._size + places % self._size]
            total = int(before.sum(dtype=np.uint64))
            for index in range(first, last):
                assert step.positions_T[index] == position
                key = key_of(int(tokens[index]), position, total)
                flat[step.slots_T[index]] = key
                total = (total + key) & MASK
                position += 1
                ends[index] = total
            assert step.context_lengths_R[row] == position
        self.num_tokens += step.num_tokens
        drawn = [draw(ends[row], self._vocab_size) for row in step.logits_rows_S.tolist()]
        self._last = np.array(drawn, np.int64)
        return Handle(drawn)
