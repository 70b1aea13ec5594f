"""A random step with drafts, for tests of qkernels/drafts. Legend as there in chunks.py."""

import random

import torch

from qkernels.drafts.chunks import DraftChunks, DraftTables
from qkernels.sampling.words import NUM_WORDS

PAGE = 5  # no power of two
MAX_LEN = 64


def draft_case(
    kinds, device, *, seed=0, most=3, num_rows=9, padding=2
) -> tuple[DraftChunks, DraftTables, torch.Tensor, torch.Tensor]:
    """Chunks of these kinds, tables, what each row draws, and its words.

    A kind is (rows, rows that sample, known). Half of the drafts agree with what is drawn.
    """
    rng = random.Random(seed)
    counts, sampled, known = (torch.tensor(column) for column in zip(*kinds, strict=True))
    R, T = len(kinds), int(counts.sum())
    X = MAX_LEN // PAGE + 1
    starts = [rng.randint(most, MAX_LEN - 2 - count) for count in counts.tolist()]
    starts[0] = MAX_LEN - 2 - int(counts[0])  # later drafts would pass the model's maximum length
    positions = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
    tables = torch.tensor([[rng.randrange(99) for _ in range(X)] for _ in range(R)])
    tokens = torch.tensor([rng.randrange(9) for _ in range(T + padding)])
    slots = torch.tensor([rng.choice([-1, 7, 8]) for _ in range(T + padding)])
    generator = torch.Generator().manual_seed(seed)
    ends_R = counts.cumsum(0)
    drawn, begins = [], (ends_R - sampled).tolist()
    for begin, count in zip(begins, sampled.tolist(), strict=True):
        for row in range(count):
            draft = int(tokens[begin + row + 1]) if row + 1 < count else 8
            drawn.append(draft if rng.random() < 0.7 else -1 if rng.random() < 0.3 else 8)
    words = torch.randint(-(2**40), 2**40, (T + padding, NUM_WORDS), generator=generator)
    chunk_D = sampled.nonzero()[:, 0]
    count_D = sampled[chunk_D]
    chunks = DraftChunks(
        token_ids_T=tokens,
        positions_T=torch.nn.functional.pad(positions, (0, padding)),
        slots_T=slots,
        context_lengths_R=torch.tensor(starts).add(counts).to(torch.int32),
        query_starts_R1=torch.nn.functional.pad(ends_R, (1, 1)).to(torch.int32),
        block_tables_RX=tables.to(torch.int32),
        rows_R=torch.randperm(num_rows - 1, generator=generator)[:R],
        known_R=known,
        next_R=torch.randint(0, 99, (R,), generator=generator),
        capacity_R=torch.tensor([rng.randint(1, X) * PAGE for _ in range(R)]),
        place_R=torch.where(sampled > 0, (sampled > 0).cumsum(0) - 1, -1),
        chunk_D=chunk_D,
        first_D=count_D.cumsum(0) - count_D,
        count_D=count_D,
        max_sampled=max(1, int(sampled.max())),
    )
    tables = DraftTables(
        tokens_NK1=torch.randint(100, 200, (num_rows, 1 + most), generator=generator),
        rejected_N=torch.randint(0, 4, (num_rows,), generator=generator),
    )
    drawn = torch.tensor(drawn, dtype=torch.int64)
    return moved(chunks, device), moved(tables, device), drawn.to(device), words.to(device)


def moved(values, device):
    """A copy whose tensors are on a device."""
    fields = {name: getattr(values, name) for name in type(values).__dataclass_fields__}
    return type(values)(
        **{k: v.clone().to(device) if torch.is_tensor(v) else v for k, v in fields.items()}
    )
