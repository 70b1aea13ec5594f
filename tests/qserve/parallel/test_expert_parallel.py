"""Experts that ranks hold whole: what ranks compute together is what one computes alone."""

import asyncio
import json
import time

import pytest
import torch

from formats.errors import InputError
from qkernels.moe.experts import PreparedExperts
from qserve import AsyncLLM, SamplingParams
from qserve.config import EngineConfig
from qserve.model.blocks.moe import MoeMlp
from qserve.model.model_config import ModelConfig
from qserve.model.rank_shards import check_ranks
from qserve.model.tp_plan import place_experts
from qserve.parallel.expert_placement import COUNTS
from tests.conftest import make_tiny
from tests.qserve.engine.control.new_weights import changed, stored
from tests.qserve.engine.control.new_weights import written as written_folder
from tests.qserve.parallel.engines import SMALL, make_prompts, start, tokens
from tests.qserve.parallel.test_rank_adapters import LORA, adapted, make_adapters
from tests.qserve.parallel.test_rank_weights import PROMPTS, SETTINGS, digests_of, reference
from tests.qserve.parallel.test_sharing import assert_sharded
from tests.tiny_families import TINY_FAMILIES

WHOLE = {"enable_expert_parallel": True}
KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
FAMILIES = [
    family for family, (_, config) in TINY_FAMILIES.items() if any(config.get(key) for key in KEYS)
]
FEW = ("gpt_oss", "qwen2_moe")


def settings_of(size, strategy="linear"):
    return {
        **WHOLE,
        "tensor_parallel_size": size,
        "expert_placement_strategy": strategy,
    }


def experts_of(decoder):
    """Prepared experts of each layer that has any."""
    return [
        module.experts
        for layer in decoder.layers
        for module in layer.modules()
        if isinstance(module, MoeMlp)
    ]


def assert_whole_experts(folder, size, limit=1e-5, strategy="linear", **settings):
    decoders = assert_sharded(folder, size, limit, **settings_of(size, strategy), **settings)
    layers = list(zip(*(experts_of(decoder) for decoder in decoders), strict=True))
    assert layers
    for ranks in layers:
        assert all(isinstance(each, PreparedExperts) for each in ranks)
        (routed,) = {each.problem.routed_experts for each in ranks}
        assert sum(each.problem.num_experts for each in ranks) == routed
        assert all(each.problem.is_partial for each in ranks)
    return decoders


@pytest.mark.parametrize(
    ("family", "size"),
    [(family, 2) for family in FEW]
    + [
        pytest.param(family, size, marks=pytest.mark.exhaustive)
        for family in FAMILIES
        for size in (2, 4)
        if (family, size) not in [(few, 2) for few in FEW]
    ],
)
def test_every_family(family, size, tiny_model):
    assert_whole_experts(tiny_model(family), size)


# (scheme, layout, family): with slices, a rank's 16 inputs would end inside a group of 32
SCHEMES = [
    ("w4a16-sym-g32", "gptq", "qwen3_moe"),
    ("w3a16-sym-g32", "gptq", "qwen3_moe"),
    ("w4a16-mxfp4", "compressed-tensors", "qwen3_moe"),
    ("w8a8", "compressed-tensors", "qwen3_moe"),
    ("w8a8-fp8", "compressed-tensors", "qwen2_moe"),
    ("w4a16-asym-g32", "awq", "deepseek_v3"),
]
QUICK = SCHEMES[:3]


@pytest.mark.parametrize(
    ("scheme", "layout", "family"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in SCHEMES[3:])],
)
def test_quantized_experts(scheme, layout, family, written):
    """Attention of w8a8 rounds a slice of its inputs by a scale of its own: no exact sums."""
    limit = {"w8a8": 0.05, "w8a8-fp8": 0.3}.get(scheme, 1e-5)
    folder = written(scheme, layout, family)
    assert_whole_experts(folder, 2, limit)
    if scheme in ("w3a16-sym-g32", "w4a16-mxfp4"):
        with pytest.raises(InputError, match=r"cannot be divided.* --enable-expert-parallel"):
            assert_sharded(folder, 2)


def test_placement_does_not_change_outputs(tiny_model, tmp_path):
    """5 of 6 experts alternate; a file puts the two with the most tokens on different ranks."""
    folder = tiny_model("qwen3_moe")
    assert_whole_experts(folder, 2, strategy="round_robin")
    file = tmp_path / "loads.json"
    file.write_text(json.dumps({COUNTS: [[9, 8, 1, 1, 1, 1], [0] * 6, [1, 1, 1, 1, 8, 9]]}))
    decoders = assert_whole_experts(folder, 2, strategy=str(file))
    numbers = [[layer.mlp.numbers.tolist() for layer in decoder.layers] for decoder in decoders]
    assert numbers[0][0][0] < 3 == numbers[0][0][1], "experts 0 and 1 are on different ranks"
    assert numbers[1][0][1] < 3 == numbers[1][0][0]
    assert numbers[0][1] == [0, 1, 2, 3, 3, 3], "a layer without counts is placed in runs"


def test_unequal_numbers_of_experts(tmp_path):
    _, config = TINY_FAMILIES["qwen3_moe"]
    folder = make_tiny(tmp_path / "five", "Qwen3MoeConfig", {**config, "num_experts": 5})
    decoders = assert_whole_experts(folder, 2)
    assert [experts_of(each)[0].problem.num_experts for each in decoders] == [3, 2]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_rank_reads_only_its_experts(family, tiny_model, monkeypatch):
    """Linears by name, stacks by rows."""
    folder, read = tiny_model(family), []
    from qserve.model.loading.read_ahead import ReadAhead

    get, rows = ReadAhead.get, ReadAhead.rows
    monkeypatch.setattr(ReadAhead, "get", lambda s, n: read.append(n) or get(s, n))
    monkeypatch.setattr(
        ReadAhead, "rows", lambda s, n, numbers: read.append((n, *numbers)) or rows(s, n, numbers)
    )
    expected = []
    submit = ReadAhead.expect
    monkeypatch.setattr(
        ReadAhead,
        "expect",
        lambda s, prefix, without: (submit(s, prefix, without), expected.extend(s._expected)),
    )
    assert_whole_experts(folder, 2)
    of_experts = [name for name in read if isinstance(name, str) and ".experts." in name]
    if family == "gpt_oss":
        stacks = {each[1:] for each in read if isinstance(each, tuple)}
        assert stacks == {(0, 1, 2), (3, 4, 5)}
        whole = [name for name in of_experts if read.count(name) > 1]
        assert not whole, "the model on one rank alone reads whole stacks"
        return
    assert {read.count(name) for name in of_experts} == {2}, "on one rank alone, and on one of two"


def settings_config(folder, **settings):
    return EngineConfig(model=str(folder), device="cpu", **settings)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (None, WHOLE, "divides experts over the GPUs of --tensor-parallel-size, which is 1"),
        (None, {"expert_placement_strategy": "round_robin"}, "requires --enable-expert-parallel"),
        ("llama", settings_of(2), "LlamaForCausalLM.* has no experts"),
        ("mixtral", settings_of(8), "has 4 experts for 8 ranks"),
        ("mixtral", settings_of(2, "nowhere.json"), "cannot be read"),
        ("llama", {"record_expert_loads": "x.json"}, "has no experts"),
        ("mixtral", {"record_expert_loads": "/nowhere/x.json"}, "its folder does not exist"),
        (None, {"record_expert_loads": "x", "data_parallel_size": 2}, "--data-parallel-size is 2"),
        (
            None,
            {"record_expert_loads": "x", "prefill_context_parallel_size": 2},
            "--prefill-context-parallel-size is 2",
        ),
    ],
)
def test_unsupported_settings_are_refused_by_name(family, settings, message, tiny_model):
    """Before a weight is read, and before a process starts."""
    from qserve.engine.engine import Engine

    folder = "model" if family is None else tiny_model(family)
    with pytest.raises(InputError, match=message):
        Engine(settings_config(folder, **settings))


def test_size_check_accounts_for_whole_experts(written):
    folder = written("w3a16-sym-g32", "gptq", "qwen3_moe")
    model = ModelConfig.from_folder(folder)
    placement = place_experts(model, settings_config(folder, **settings_of(2)))
    check_ranks(model, 2, 1, placement)
    with pytest.raises(InputError, match="cannot be divided"):
        check_ranks(model, 2, 1)


@pytest.mark.exhaustive
def test_tokens_equal_one_rank_over_processes(tiny_model, many, tmp_path):
    """In chunks, with pages of others; loads are those of one rank."""
    folder, prompts = tiny_model("gpt_oss"), make_prompts()
    found = []
    for name, begin, settings in (
        ("alone", start, {}),
        ("ranks", lambda *args, **kwargs: many(folder, 2, **kwargs), WHOLE),
    ):
        file = tmp_path / f"{name}.json"
        llm = begin(folder, record_expert_loads=str(file), **SMALL, **settings)
        answers = tokens(llm, prompts)
        llm.close()
        found.append((answers, json.loads(file.read_text())[COUNTS]))
    assert found[0] == found[1]
    (answers, counts), top_k = found[0], 2
    assert len(counts) == 3 and all(sum(row) % top_k == 0 for row in counts)
    assert sum(counts[0]) >= top_k * sum(len(each) for each in prompts) // 2


@pytest.mark.exhaustive
def test_expert_loads_of_engine_process(docs_5m, tiny_model, tmp_path):
    """Its client leaves without a word. Only rows of requests are counted."""
    folder, file = tiny_model("qwen3_moe"), tmp_path / "loads.json"
    settings = {"device": "cpu", "max_model_len": 128, "record_expert_loads": str(file)}

    async def main():
        async with AsyncLLM(folder, tokenizer=docs_5m, **settings) as llm:
            params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
            async for _ in llm.generate(list(range(3, 23)), params, "a"):
                pass

    asyncio.run(main())
    for _ in range(200):
        if file.exists():
            break
        time.sleep(0.05)
    rows = json.loads(file.read_text())[COUNTS]
    assert [sum(row) for row in rows] == [2 * 24] * 3, "20 tokens of the prompt and 4 of the output"


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
@pytest.mark.parametrize("family", FAMILIES)
def test_family_tokens_equal_one_rank(family, strategy, tiny_model, many):
    folder, prompts = tiny_model(family), make_prompts()
    want = tokens(start(folder, **SMALL), prompts)
    settings = {**SMALL, **WHOLE, "expert_placement_strategy": strategy}
    assert tokens(many(folder, 2, **settings), prompts) == want


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_sleep_and_updates(family, tiny_model, many, tmp_path):
    folder = tiny_model(family)
    new = changed(folder)
    other = written_folder(new, folder, tmp_path / "new")
    (old_tokens, old_digests), (new_tokens, new_digests) = reference(folder), reference(other)
    llm = many(folder, 2, **SETTINGS, **WHOLE)
    assert tokens(llm, PROMPTS) == old_tokens and digests_of(llm) == old_digests
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert tokens(llm, PROMPTS) == old_tokens
    llm.update_weights(str(other))
    assert tokens(llm, PROMPTS) == new_tokens and digests_of(llm) == new_digests
    llm.update_weights(stored(folder), version="9")
    assert tokens(llm, PROMPTS) == old_tokens and digests_of(llm) == old_digests
    llm.update_weights(new, digests=False)  # which reads a rank's rows of stacks alone
    assert tokens(llm, PROMPTS) == new_tokens


@pytest.mark.exhaustive
def test_adapters(tiny_model, tmp_path, many):
    """Adapters of attention and of the shared expert, which stay divided."""
    folder, prompts = tiny_model("qwen2_moe"), make_prompts(6)
    loras = make_adapters(folder, tmp_path, 2)
    want = adapted(start(folder, **LORA, **SMALL), prompts, loras)
    assert adapted(many(folder, 2, **LORA, **SMALL, **WHOLE), prompts, loras) == want


@pytest.mark.exhaustive
def test_host_drafts(tiny_model, many):
    folder = tiny_model("qwen3_moe")
    config = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
    prompts = [prompt * 2 for prompt in make_prompts(6)]
    want = tokens(start(folder), prompts)
    assert tokens(many(folder, 2, speculative_config=config, **WHOLE), prompts) == want


@pytest.mark.exhaustive
def test_stages(tiny_model, many):
    folder, prompts = tiny_model("qwen3_moe"), make_prompts()
    want = tokens(start(folder, **SMALL), prompts)
    assert tokens(many(folder, 2, 2, **SMALL, **WHOLE), prompts) == want


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "scheme"), [("qwen3_moe", None), ("qwen3_moe", "w4a16-sym-g32")]
)
def test_ranks_on_one_gpu(family, scheme, tiny_model, written):
    """The GPU's kernels leave out the experts of the other rank."""
    folder = tiny_model(family) if scheme is None else written(scheme, "gptq", family)
    gpu = {"on": torch.device("cuda"), "dtype": torch.float16}
    decoders = assert_whole_experts(folder, 2, 0.03, **gpu)
    kernels = {each.problem.kernel for decoder in decoders for each in experts_of(decoder)}
    assert kernels == {"triton"}
