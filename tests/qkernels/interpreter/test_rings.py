"""Inputs and tokens of captured steps on their way through rings of pinned memory."""

import pytest
import torch

from qkernels.gpu.rings import deliver_, receive_

ON_GPU = torch.cuda.is_available()
DEPTH = 4


def ring(width):
    values = torch.arange(DEPTH * width).reshape(DEPTH, width) * 2**33 + 5
    return values.pin_memory() if ON_GPU else values


@pytest.mark.parametrize(("count", "num_tokens"), [(1, 1), (9, 3), (300, 8), (600, 2)])
def test_ring_entry_arrives_with_pending_tokens(device, count, num_tokens):
    inputs, samples = ring(count + 3), torch.tensor([70, 71, 72, 73], device=device)
    for number in (0, 1, 3, 4, 9):
        entry = inputs[number % DEPTH]
        entry[num_tokens - 1] = -1 - (number % 4)  # drawn by row `number % 4` of the step before
        want = entry[:count].clone()
        want[num_tokens - 1] = 70 + number % 4
        if count > num_tokens:
            entry[num_tokens] = want[num_tokens] = -2  # no token id: stays
        counter = torch.tensor([number], device=device)
        to = torch.full((count + 2,), -7, device=device)
        receive_(to[:count], inputs, counter, samples, num_tokens)
        assert to[:count].tolist() == want.tolist()
        assert to[count:].tolist() == [-7, -7] and counter.item() == number


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_tokens_are_delivered_and_kept_for_the_next_step(device, rows):
    out, samples = ring(8), torch.full((8,), 99, device=device)
    counter = torch.zeros(1, dtype=torch.int64, device=device)
    for number in range(DEPTH + 2):
        before = out.clone()
        tokens = torch.arange(rows, device=device) + 100 * number
        tokens[-1] = -1  # its logits hold NaN
        deliver_(tokens, samples, out, counter)
        if ON_GPU:
            torch.cuda.synchronize()
        assert out[number % DEPTH, :rows].tolist() == tokens.tolist()
        before[number % DEPTH, :rows] = out[number % DEPTH, :rows]
        assert torch.equal(out, before), "no other entry changes"
        assert samples.tolist() == [*tokens[:-1].tolist(), 0] + [99] * (8 - rows)
        assert counter.item() == number + 1
