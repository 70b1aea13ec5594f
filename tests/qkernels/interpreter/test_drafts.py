"""Kernels that fill and settle drafts: every number equals that of the torch reference."""

import pytest
import torch

from qkernels import ops
from qkernels.drafts import reference
from qkernels.drafts.triton_fill import fill_drafts_
from qkernels.drafts.triton_settle import settle_drafts_
from tests.qkernels.draft_case import MAX_LEN, PAGE, draft_case, moved

# (rows, rows that sample, known) of each chunk
STEPS = {
    "one verify": [(4, 4, 0)],
    "verifies, known and not": [(4, 4, 1), (4, 4, 0), (4, 4, 0)],
    "decodes": [(1, 1, 0), (1, 1, 1), (1, 1, 0)],
    "a prompt amid decodes": [(3, 3, 0), (17, 0, 17), (2, 2, 2), (9, 1, 9), (1, 1, 0)],
    "prompts alone": [(5, 0, 5), (2, 0, 2)],
}
SEEDS = range(4)


def numbers(value):
    """All tensors of a result or a state, by name."""
    if isinstance(value, torch.Tensor):
        return {"": value}
    if hasattr(value, "_asdict"):
        fields = value._asdict()
    else:
        fields = {name: getattr(value, name) for name in type(value).__dataclass_fields__}
    return {
        f"{name}.{inner}": tensor
        for name, found in fields.items()
        if not isinstance(found, int)
        for inner, tensor in numbers(found).items()
    }


def assert_equal(want, got):
    want, got = numbers(want), numbers(got)
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        assert got[name].dtype is tensor.dtype, name
        assert torch.equal(got[name], tensor), (name, tensor, got[name])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fills_tokens", [True, False])
def test_filled_tokens_and_positions_equal_the_reference(device, step, fills_tokens):
    for seed in SEEDS:
        chunks, tables, _, words = draft_case(STEPS[step], device, seed=seed)
        results = []
        for run in (reference.fill_drafts_, fill_drafts_):
            own, own_words = moved(chunks, device), words.clone()
            back = run(
                *(own, tables),
                page_size=PAGE,
                words_TP=own_words if step == "one verify" else None,
                fills_tokens=fills_tokens,
            )
            results.append((own, back, own_words))
        for want, got in zip(*results, strict=True):
            assert_equal(want, got)
        changed = not torch.equal(results[1][0].token_ids_T, chunks.token_ids_T)
        assert changed == (fills_tokens and (chunks.known_R < 4).any().item()) or step in (
            "a prompt amid decodes",
            "prompts alone",
            "decodes",
        )


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("rule", ["drawn", "by chance", "known"])
def test_settled_drafts_equal_the_reference(device, step, rule):
    accepted = []
    for seed in SEEDS:
        chunks, tables, tokens, words = draft_case(STEPS[step], device, seed=seed)
        samples = len(tokens) > 0
        generator = torch.Generator().manual_seed(seed)
        rules, D = {}, len(chunks.chunk_D)
        if rule == "by chance" and samples:
            passes = torch.rand(D, chunks.max_sampled - 1, generator=generator) < 0.7
            rules["passes_DK"] = passes.to(device)
        if rule == "known":
            rules["accepted_D"] = (chunks.count_D - 1).clamp(max=1)
        results = []
        for run in (reference.settle_drafts_, settle_drafts_):
            own_tables, own_tokens = moved(tables, device), tokens.clone()
            settled = run(
                own_tokens if samples else None,
                words[: len(tokens)].contiguous() if samples else None,
                *(chunks, own_tables),
                num_drafts=3 - seed % 3,
                page_size=PAGE,
                max_model_len=MAX_LEN,
                **rules,
            )
            results.append((settled, own_tables, own_tokens))
        for want, got in zip(*results, strict=True):
            assert_equal(want, got)
        accepted += (settled.emitted_D - 1).tolist()
    if "verif" in step and rule != "known":
        assert {0, 1, 3} <= set(accepted), accepted  # none, some, all were accepted


@pytest.mark.parametrize("V", [77, 2500])
def test_draft_logits_are_mapped_to_model_token_ids(device, half, poison, V):
    U = V // 3
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(V))[:U].to(device)
    columns = torch.full((V,), -1, dtype=torch.int32, device=device)
    columns[ids] = torch.arange(U, dtype=torch.int32, device=device)
    logits = torch.randn(3, U + 5, generator=torch.Generator().manual_seed(1)).to(half).to(device)
    want = torch.full((3, V), float("-inf"), dtype=half, device=device)
    want[:, ids] = logits[:, :U]
    for given in (logits[:, :U], logits[:, :U].contiguous()):
        assert torch.equal(ops.spread_logits(given, columns, kernel="triton"), want)
        assert torch.equal(reference.spread_logits(given, columns), want)


@pytest.mark.parametrize("step", STEPS)
def test_outputs_for_other_kernels_are_aligned(device, step):
    """For an address not divisible by 16 Triton would compile another kernel while serving."""
    chunks, tables, tokens, words = draft_case(STEPS[step], device)
    samples = len(tokens) > 0
    settled = settle_drafts_(
        tokens if samples else None,
        words[: len(tokens)].contiguous() if samples else None,
        *(chunks, tables),
        num_drafts=3,
        page_size=PAGE,
        max_model_len=MAX_LEN,
    )
    for index in range(3):
        for each in (*settled.draft_positions, settled.words_KDP):
            assert (each[index].data_ptr() - each.data_ptr()) % 16 == 0
            assert each[index].is_contiguous()
