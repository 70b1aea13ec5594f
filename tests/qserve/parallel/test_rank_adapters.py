"""Adapters of ranks in processes: the tokens of one rank alone, and what one rank cannot read."""

import pytest

from formats.errors import InputError
from qserve.engine.distributed import executors
from qserve.lora.request import LoRARequest
from tests.adapters import write_adapter
from tests.qserve.parallel.engines import SMALL, make_prompts, start, tokens

exhaustive = pytest.mark.exhaustive
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4, "max_cpu_loras": 2}


def make_adapters(folder, where, count=3, **options):
    options = {"size": 1.0, **options}
    return [
        LoRARequest(
            f"a{n}",
            n + 1,
            str(write_adapter(folder, where / f"{n}", rank=1 + n, seed=n, **options)),
        )
        for n in range(count)
    ]


def adapted(llm, prompts, loras, **sampling):
    """Greedy tokens of the prompts, each with one of the adapters or none."""
    crowd = [[*loras, None][n % (len(loras) + 1)] for n in range(len(prompts))]
    return tokens(llm, prompts, crowd, **sampling)


def assert_same(folder, tmp_path, many, tensor, stages, num_prompts=12):
    """More adapters than slots, in chunks of prompts, and again after some were forgotten."""
    loras, prompts = make_adapters(folder, tmp_path), make_prompts(num_prompts)
    alone, several = start(folder, **LORA, **SMALL), many(folder, tensor, stages, **LORA, **SMALL)
    want = adapted(alone, prompts, loras)
    assert len({tuple(each) for each in adapted(alone, prompts[3:4] * 4, loras)}) == 4
    for _ in range(2):
        assert adapted(several, prompts, loras) == want


@pytest.mark.exhaustive
def test_adapters_are_sharded_over_ranks(tiny_model, tmp_path, many):
    assert_same(tiny_model("llama"), tmp_path, many, 2, 1, num_prompts=6)


@exhaustive
@pytest.mark.parametrize(
    ("family", "tensor", "stages"),
    [
        ("phi3", 2, 1),
        *(("qwen2_moe", 2, 1), ("mimo_v2", 2, 1), ("gemma4", 2, 1)),
        ("llama", 4, 1),
        ("llama", 1, 2),
        ("gemma2", 1, 3),
        ("llama", 2, 2),
    ],
)
def test_families_and_stages(family, tensor, stages, tiny_model, tmp_path, many):
    assert_same(tiny_model(family), tmp_path, many, tensor, stages)


@pytest.mark.parametrize(
    ("family", "tensor", "stages", "whole"),
    [
        pytest.param("qwen3_moe", 2, 1, True),  # ranks have whole experts
        pytest.param("gpt_oss", 2, 1, False),  # slices of all experts
        *(
            pytest.param(*case, marks=exhaustive)
            for case in (
                *(("qwen3_moe", 2, 1, False), ("gpt_oss", 2, 1, True), ("qwen2_moe", 2, 2, False)),
                *(("deepseek_v3", 1, 2, False), ("nemotron_h_latent", 2, 1, True)),
            )
        ),
    ],
)
def test_adapters_of_experts(family, tensor, stages, whole, tiny_model, tmp_path, many):
    """Each rank has the adapters of its experts, or of its slices of them."""
    folder, settings = tiny_model(family), {**LORA, "lora_experts": True, **SMALL}
    loras = make_adapters(folder, tmp_path, experts=True, size=0.5)
    prompts = make_prompts(6)
    alone = start(folder, **settings)
    several = many(folder, tensor, stages, **settings, enable_expert_parallel=whole)
    want = adapted(alone, prompts, loras)
    assert len({tuple(each) for each in adapted(alone, prompts[3:4] * 4, loras)}) == 4
    assert adapted(several, prompts, loras) == want


@exhaustive
def test_pipeline_microbatches_use_their_adapters(tiny_model, tmp_path, many):
    """Two parts of 300 tokens, of which the second begins inside of an adapter's prompt."""
    folder = tiny_model("llama")
    loras, settings = make_adapters(folder, tmp_path, 2), {**LORA, "max_num_batched_tokens": 600}
    prompts = [[3 + n, *range(10, 109)] for n in range(6)]
    want = adapted(start(folder, **settings), prompts, loras)
    assert adapted(many(folder, 1, 2, **settings), prompts, loras) == want


@exhaustive
def test_adapter_unreadable_on_one_rank_is_dropped_on_all(tiny_model, tmp_path, many, monkeypatch):
    """A rank without the folder, then one with another folder; the engine continues."""
    monkeypatch.setattr(executors, "MODULE", "tests.qserve.parallel.rank_without_folder")
    folder = tiny_model("llama")
    loras = make_adapters(folder, tmp_path, 2)
    two, prompt = many(folder, 2, **LORA), [[5, 6, 7]]
    want = tokens(start(folder, **LORA), prompt, loras[:1])
    table, hidden = two.engine.adapters, tmp_path / "hidden"
    for name, problem in (("missing", "is not a folder"), ("other", "read other numbers")):
        (tmp_path / "hidden").write_text(f"{loras[1].lora_path} {tmp_path / name}")
        write_adapter(folder, tmp_path / "other", rank=2, seed=9)
        for ask in (lambda: table.read(loras[1].lora_path), lambda: tokens(two, prompt, loras[1:])):
            with pytest.raises(InputError, match=f"rank 1.*{problem}"):
                ask()
        assert tokens(two, prompt, loras[:1]) == want
    hidden.unlink()
    assert tokens(two, prompt, loras[1:])[0], "it can be read again"
    assert set(two.engine.workers._ours.adapters._packed) == {
        each.packed.number for each in table._known.values() if each.packed is not None
    }
