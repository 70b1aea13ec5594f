"""Adapters of a model: the results equal PEFT's, alone and mixed in one batch, in float32."""

import copy
import dataclasses

import pytest
import torch

from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.peft.lora import adapted_shapes, read_adapter
from qserve.llm import LLM
from qserve.lora.request import LoRARequest
from qserve.model.model_config import family_of
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams
from tests.adapters import write_adapter

PROMPT = [5, 60, 7, 8, 90, 10, 11, 12, 13, 14, 300, 16, 17, 18, 19, 20, 21, 22]
PARAMS = SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=0, detokenize=False)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# PEFT takes the feed-forward's names in these families for those of fused experts.
FUSED_IN_PEFT = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe")
EXPERTS = (*FUSED_IN_PEFT, "gpt_oss")
LATENT = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def engine(model, **settings):
    settings = {"enable_lora": True, "device": "cpu", "max_loras": 3, **settings}
    return LLM(str(model), num_gpu_blocks_override=64, **settings)


def readable(prompt_logprobs):
    """The log probability of each prompt token but the first."""
    return [each.logprob for entry in prompt_logprobs[1:] for each in entry.values()]


def run(llm, loras, prompt=PROMPT, params=PARAMS):
    outputs = llm.generate([prompt] * len(loras), params, False, lora_request=loras)
    return [(output.outputs[0].token_ids, readable(output.prompt_logprobs)) for output in outputs]


def assert_is(model, found, prompt=PROMPT):
    """The log probabilities and the greedy tokens are those of transformers' model."""
    tokens, logprobs = found
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.inference_mode():
        logits = model(ids).logits[0].float()
    want = logits.log_softmax(-1)
    got = torch.tensor(logprobs)
    torch.testing.assert_close(
        want[range(len(prompt) - 1), ids[0, 1 : len(prompt)]], got, atol=2e-4, rtol=1e-4
    )
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == list(tokens)


def merged(model, folder, adapter):
    """transformers' model of a folder with an adapter in its weights."""
    reader = CheckpointReader(folder)
    shapes = adapted_shapes(family_of(reader.config), reader.config)
    with torch.no_grad():
        for name, pair in read_adapter(adapter, shapes).pairs.items():
            model.get_parameter(f"{name}.weight").add_(pair.delta())
    return model


def float_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    "family",
    [
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "glm4", "olmo2")
        ),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in EXPERTS),
        pytest.param("minicpm3", marks=pytest.mark.exhaustive),
        *("deepseek_v2", "deepseek_v3"),  # queries directly, and from latents
    ],
)
def test_logits_equal_peft(tiny_model, tmp_path, family):
    peft = pytest.importorskip("peft")
    model, is_latent = tiny_model(family), family in ("deepseek_v2", "deepseek_v3", "minicpm3")
    only = ATTENTION if family in EXPERTS else LATENT if is_latent else ()
    patterns = {"rank_pattern": {"o_proj": 5}, "alpha_pattern": {r"1\..*": 3.5}}
    some = ATTENTION[2:] if only else ("v_proj", "o_proj", "up_proj", "qkv_proj")
    some = ("kv_b_proj", "o_proj") if is_latent else some
    folders = [
        write_adapter(model, tmp_path / "plain", rank=1, only=only),
        write_adapter(model, tmp_path / "large", rank=16, seed=1, only=only, use_rslora=True),
        write_adapter(model, tmp_path / "mixed", rank=5, seed=2, only=some, **patterns),
    ]
    llm = engine(model)
    loras = [LoRARequest(path.name, n, str(path)) for n, path in enumerate(folders, start=1)]
    found = run(llm, [*loras, None])
    for folder, each in zip(folders, found, strict=False):
        theirs = peft.PeftModel.from_pretrained(float_model(model), folder).eval()
        assert_is(theirs, each)
    assert_is(float_model(model), found[-1])


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen2_moe", 11),  # attention, the dense feed-forward, the shared expert and its gate
        ("deepseek_v3", 11),
        pytest.param("glm4_moe", 10, marks=pytest.mark.exhaustive),
        pytest.param("gemma4_moe", 7, marks=pytest.mark.exhaustive),
        pytest.param("gemma3n", 9, marks=pytest.mark.exhaustive),
        pytest.param("gemma4_shared", 9, marks=pytest.mark.exhaustive),  # with inputs of layers
    ],
)
def test_every_target_module_separately(tiny_model, tmp_path, family, targets):
    """Each linear's adapter reaches that linear, of shared experts and dense layers, too."""
    model = tiny_model(family)
    reader = CheckpointReader(model)
    shapes = adapted_shapes(family_of(reader.config), reader.config)
    kinds = sorted({name.split(".", 3)[3] for name in shapes})
    assert len(kinds) == targets
    llm = engine(model, max_loras=12)
    loras = []
    for number, kind in enumerate(kinds, start=1):
        folder = write_adapter(model, tmp_path / kind, rank=2, seed=number, only=[kind])
        loras.append(LoRARequest(kind, number, str(folder)))
    base = float_model(model)
    for lora, found in zip(loras, run(llm, loras), strict=True):
        assert_is(merged(copy.deepcopy(base), model, lora.lora_path), found)


def test_latents_in_a_fixed_order(tiny_model, tmp_path):
    """Adapters of kv_b_proj also reach the products of the kernel that --kernel asks for."""
    model = tiny_model("deepseek_v3")
    folder = write_adapter(model, tmp_path / "up", rank=3, only=["kv_b_proj"])
    lora = LoRARequest("up", 1, str(folder))
    (found,) = run(engine(model, kernel=["attention=fixed_order"]), [lora])
    assert_is(merged(float_model(model), model, folder), found)


def test_quantized_base(quantized_5m, transformers_model, tmp_path):
    """The adapter is separate from the product, whatever the base's numbers are."""
    model = quantized_5m
    folders = [write_adapter(model, tmp_path / f"{n}", rank=2 + n, seed=n) for n in range(2)]
    loras = [LoRARequest(f"a{n}", n + 1, str(folder)) for n, folder in enumerate(folders)]
    found = run(engine(model), [*loras, None])
    for folder, each in zip(folders, found, strict=False):
        assert_is(merged(transformers_model(model), model, folder), each)
    assert_is(transformers_model(model), found[-1])


@pytest.fixture(scope="module")
def llama(tiny_model, tmp_path_factory):
    """The model and adapters of it."""
    model, folder = tiny_model("llama"), tmp_path_factory.mktemp("adapters")
    return model, [
        LoRARequest(f"a{n}", n + 1, str(write_adapter(model, folder / f"{n}", seed=n, rank=1 + n)))
        for n in range(4)
    ]


@pytest.mark.exhaustive
def test_mixed_batches_equal_separate_requests(llama):
    """With any other requests in the step, in prompt chunks, and with fewer slots than adapters."""
    model, loras = llama
    alone = engine(model, max_loras=4)
    want = {lora: run(alone, [lora])[0] for lora in (*loras, None)}
    crowd = [loras[n] if n < 4 else None for n in (0, 4, 1, 2, 0, 3, 4, 3, 1, 0, 2, 2)]
    for settings in ({}, {"max_num_batched_tokens": 7, "max_num_seqs": 5, "max_loras": 2}):
        for lora, (tokens, logprobs) in zip(
            crowd, run(engine(model, **settings), crowd), strict=True
        ):
            assert tokens == want[lora][0]
            assert logprobs == pytest.approx(want[lora][1], abs=1e-4)


def test_zero_adapter_changes_no_bit(llama, tmp_path):
    model, _ = llama
    folder = write_adapter(model, tmp_path / "zeros", size=0.0)
    llm = engine(model)
    # Each alone: the rounding of a matrix product depends on the other rows.
    assert run(llm, [LoRARequest("zeros", 1, str(folder))]) == run(llm, [None])


def test_pages_are_shared_only_within_an_adapter(llama):
    model, loras = llama
    llm = engine(model, block_size=4)
    params = dataclasses.replace(PARAMS, prompt_logprobs=None)

    def cached(lora):
        outputs = llm.generate([PROMPT], params, False, lora_request=lora)
        return outputs[0].num_cached_tokens

    assert [cached(lora) for lora in (None, loras[0], loras[1])] == [0, 0, 0]
    assert [cached(lora) for lora in (None, loras[0], loras[1])] == [16, 16, 16]
    table = llm.engine.adapters
    table.put("a0", loras[0].lora_path, table.read(loras[2].lora_path))  # other numbers there
    assert [cached(lora) for lora in (loras[0], loras[1])] == [0, 16]
    table.put("a0", loras[0].lora_path, table.read(loras[0].lora_path))
    assert cached(loras[0]) == 16


@pytest.mark.exhaustive
def test_many_rotating_adapters_keep_memory_flat(llama, tmp_path):
    """64 adapters through 3 slots, with room for 5 on the host: memory stays what it was."""
    model, _ = llama
    small = {"rank": 1, "only": ("2.mlp.down_proj",), "size": 3.0}
    loras = [
        LoRARequest(f"r{n}", n + 1, str(write_adapter(model, tmp_path / f"{n}", **small, seed=n)))
        for n in range(64)
    ]
    llm = engine(model, max_cpu_loras=5)
    params = SamplingParams(temperature=0, max_tokens=2, detokenize=False)
    slots = llm.engine.runner.adapters.memory
    before = slots.data_ptr(), slots.nbytes
    first = {}
    for turn in range(2):
        for start in range(0, 64, 8):
            of_turn = loras[start : start + 8]
            outputs = llm.generate([[3, 4]] * 8, params, False, lora_request=of_turn)
            tokens = [output.outputs[0].token_ids for output in outputs]
            assert tokens == first.setdefault(start, tokens), turn
    assert len({tuple(tokens) for of in first.values() for tokens in of}) > 40
    known = llm.engine.adapters._known.values()
    assert sum(each.packed is not None for each in known) <= 5
    assert (slots.data_ptr(), slots.nbytes) == before
    pool = llm.engine.scheduler.pool
    assert pool.num_free == pool.num_pages and not llm.engine.has_work()


def test_adapters_are_configured_at_start_and_requested_by_name(llama):
    model, loras = llama
    llm = engine(model, lora_modules=[f"{lora.lora_name}={lora.lora_path}" for lora in loras[:2]])
    found = run(llm, [LoRARequest("a0", 1), LoRARequest("a1", 2)])
    assert found == run(engine(model), loras[:2])


def test_abort_and_deadline_while_waiting_for_adapter(llama):
    """No request waits for a dropped one, wherever it was."""
    model, loras = llama
    llm = engine(model, max_loras=1)
    for number, lora in enumerate(loras):
        llm.llm_engine.add_request(str(number), PROMPT, PARAMS, lora_request=lora)
    llm.llm_engine.step()
    llm.llm_engine.abort_request(["1", "2", "3"])
    assert llm.engine.adapters.num_waiting <= 1
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert not llm.engine.has_work()


def test_drafts_are_verified_with_adapter(llama):
    """Speculation changes no token; the accepted drafts depend on the adapter's own text."""
    model, loras = llama
    crowd, params = (
        [*loras[:2], None],
        SamplingParams(temperature=0, max_tokens=24, detokenize=False),
    )
    drafting = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
    found = []
    for settings in ({}, {"speculative_config": drafting}):
        llm = engine(model, **settings)
        outputs = llm.generate([PROMPT * 2] * 3, params, False, lora_request=crowd)
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0]}) == 3


def test_all_outputs_of_a_prompt_use_its_adapter(llama):
    model, loras = llama
    params = SamplingParams(temperature=1, max_tokens=6, n=3, seed=5, detokenize=False)
    llm = engine(model)

    def texts(lora):
        (output,) = llm.generate([PROMPT], params, False, lora_request=lora)
        return [each.token_ids for each in output.outputs]

    assert texts(loras[0]) == texts(loras[0]) != texts(None)


def test_adapter_request_without_enable_lora_is_refused(llama):
    model, loras = llama
    llm = LLM(str(model), device="cpu", num_gpu_blocks_override=64)
    with pytest.raises(InputError, match="are not enabled .start the engine with --enable-lora"):
        run(llm, loras[:1])
    with pytest.raises(InputError, match="expected one or 1, found 2"):
        llm.generate([PROMPT], PARAMS, False, lora_request=loras[:2])


def test_outputs_of_one_request_use_one_adapter_during_reload(tiny_model, tmp_path):
    """From the same folder, whose numbers are others by then; in between the first has ended."""
    model = tiny_model("llama")
    folder = str(write_adapter(model, tmp_path / "a", seed=1, size=4.0))
    core = engine(model, max_loras=1).engine

    def tokens_with(name, number):
        lora = LoRARequest("a", number, folder)
        core.add_request(name, PROMPT, GREEDY, options=RequestOptions(lora=lora))
        found = []
        while core.has_work():
            found += [token for event in core.step() for token in event.token_ids]
        return found

    core.adapters.put("a", folder, core.adapters.read(folder), 1)
    first = tokens_with("request-0", 1)
    write_adapter(model, tmp_path / "a", seed=2, size=4.0)
    core.adapters.put("a", folder, core.adapters.read(folder), 2)
    new = tokens_with("another-0", 2)
    assert new != first
    assert tokens_with("request-1", 1) == first
    assert tokens_with("another-1", 2) == new
