"""Benchmarks of sampling with Llama-3's vocabulary and logits with one likely token among noise."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from qkernels import ops
from qkernels.bench.measure import Baselines, BenchedOp, Call, Case, copies_needed
from qkernels.sampling import reference as reference_sampling
from qkernels.sampling.settings import SampleSettings
from qkernels.sampling.words import SampleRow

VOCABULARY = 128256
SAMPLING_M = (1, 8, 32, 128, 256)
ROWS = {
    "greedy": SampleRow(),
    "temperature": SampleRow(temperature=0.8),
    "top-k-top-p": SampleRow(temperature=0.8, top_k=50, top_p=0.95),
    # in these logits some thousand tokens share the last 5 %
    "flat-top-p": SampleRow(temperature=0.8, top_p=0.95),
    "penalties": SampleRow(
        temperature=0.8,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        history_row=0,
        num_logprobs=5,
    ),
}


def _sample(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    generator = torch.Generator("cuda").manual_seed(0)
    for m in ms:
        logits = torch.randn(
            copies_needed(2 * m * VOCABULARY),
            m,
            VOCABULARY,
            device="cuda",
            dtype=torch.bfloat16,
            generator=generator,
        )
        logits *= 2.5
        logits[:, :, 7] += 6
        yield _case(shape, logits, baselines)


def _case(shape: str, logits: torch.Tensor, baselines: Baselines) -> Case:
    m, kind = logits.shape[1], ROWS[shape]
    penalized = kind.history_row >= 0
    rows = [replace(kind, seed=i, position=i, history_row=i if penalized else -1) for i in range(m)]
    settings, history = SampleSettings.of(rows).to(logits.device), None
    num_bytes = 2 * m * VOCABULARY
    if penalized:
        history = torch.zeros(m, VOCABULARY, dtype=torch.int32, device=logits.device)
        history[:, ::20] = 3
        num_bytes += 4 * m * VOCABULARY
    others: dict[str, list[Call]] = {}
    if "torch" in baselines:
        others["torch"] = [
            lambda x=x: reference_sampling.sample_(x, settings, history) for x in logits[:4]
        ]
    # drawing changes the token counts
    before = None if history is None else history.clone()
    return Case(
        op="sample_",
        shape=shape,
        m=m,
        num_bytes=num_bytes,
        operations=m * VOCABULARY,
        calls=[lambda x=x: ops.sample_(x, settings, history) for x in logits],
        want=reference_sampling.sample_(logits[0], settings, before).tokens_S.double(),
        allowed_error=0.0,
        values=lambda samples: samples.tokens_S,
        baselines=others,
    )


OPS: dict[str, BenchedOp] = {
    "sample_": BenchedOp(
        cases=_sample,
        shapes=dict.fromkeys(ROWS, VOCABULARY),
        default_m=dict.fromkeys(ROWS, SAMPLING_M),
        baselines=("torch",),
    )
}
