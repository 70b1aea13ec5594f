"""New weights in place: the tokens of a fresh engine with them, or a refusal and no change."""

import pytest
import torch

from formats import weight_digest
from formats.errors import InputError
from qserve import LLM, BeamSearchParams, SamplingParams
from qserve.engine.runner import residence
from qserve.model.resident.leaves import leaves
from qserve.model.resident.staged import stage
from qserve.model.resident.update_source import UpdateSource
from tests.qserve.engine.control.new_weights import changed, stored, written
from tests.tiny_families import TINY_FAMILIES

PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 6, 7, 8, 9, 10, 11, 12, 13], [400, 3, 77])]
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, detokenize=False)
SETTINGS = {"max_num_seqs": 4, "num_gpu_blocks_override": 64, "block_size": 4}
# settings of the running engine: float weights, codes, fused experts, experts, recurrent states
CASES = [
    ("llama", {}),
    ("qwen3", {"quantization": "w4a16-auto"}),
    ("qwen2_moe", {"quantization": "w4a16-auto"}),
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in [
            *((family, {"quantization": "w8a8"}) for family in ("llama", "phi3")),
            *((family, {}) for family in sorted(TINY_FAMILIES)),
            ("qwen3", {"quantization": "fp8"}),
            *((family, {"lm_head_quantization": "w8a16"}) for family in ("llama", "qwen3")),
            ("qwen3_moe", {"enable_lora": True, "lora_experts": True}),
            ("deepseek_v3", {"enable_lora": True}),  # adapters of latents
        ]
    ),
]


def start(folder, **settings) -> LLM:
    return LLM(str(folder), **SETTINGS, **settings)


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def contents(llm: LLM) -> list[torch.Tensor]:
    decoder = llm.engine.runner.decoder
    return [leaf for _, leaf in leaves(decoder) if isinstance(leaf, torch.Tensor)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("family, settings", CASES)
def test_updated_engine_equals_fresh_engine(family, settings, tiny_model, tmp_path):
    folder, new = tiny_model(family), changed(tiny_model(family))
    other = written(new, folder, tmp_path / "new")
    fresh = start(other, **settings)
    llm = start(folder, **settings)
    before, addresses = tokens(llm), [each.data_ptr() for each in contents(llm)]
    assert before != tokens(fresh), "the weights must matter"
    llm.update_weights(new.items())
    assert tokens(llm) == tokens(fresh) and llm.weight_version == "1"
    assert [each.data_ptr() for each in contents(llm)] == addresses  # as CUDA graphs need it
    for own, expected in zip(contents(llm), contents(fresh), strict=True):
        assert torch.equal(own.view(torch.uint8), expected.view(torch.uint8))
    digests = llm.weight_digests()
    assert digests == fresh.weight_digests()  # of tensors, of a folder
    llm.update_weights(folder, version="back")
    assert tokens(llm) == before and llm.weight_version == "back"
    assert llm.weight_digests() != digests


def test_trainer_computes_the_digest_with_formats_alone(tiny_model):
    new = changed(tiny_model("qwen3"))
    llm = start(tiny_model("qwen3"), quantization="w4a16-auto")
    llm.update_weights(new, version=7)
    stated = llm.engine.operations.weight_digests()
    own = weight_digest.digests(new, stated.schemes)
    assert weight_digest.differing(own, stated.tensors) == [] and stated.version == "7"
    assert weight_digest.total_digest(own) == stated.total
    # a trainer whose linear was not rounded, or rounded elsewhere, sees which
    linear = next(iter(stated.schemes))
    del stated.schemes[linear]
    wrong = weight_digest.digests(new, stated.schemes)
    assert weight_digest.differing(wrong, stated.tensors) == [f"{linear}.weight"]


def test_float_weights_are_rounded_to_the_checkpoint_scheme(quantized_5m, docs_5m, tmp_path):
    """Its linears are rounded as it states; the codes of the file itself are accepted, too."""
    llm = start(quantized_5m)
    fresh = start(docs_5m, quantization="w4a16-auto")
    own = tokens(llm)
    llm.update_weights(docs_5m)
    assert tokens(llm) == tokens(fresh)
    assert llm.weight_digests() == fresh.weight_digests()
    with pytest.raises(InputError, match="is missing from tensors of the update \\("):
        llm.update_weights({})
    llm.update_weights(quantized_5m)
    assert tokens(llm) == own


WRONG = {
    "missing": (lambda new: new.pop("model.norm.weight"), "model.norm.weight: is missing"),
    "extra": (lambda new: new.update(surplus=torch.zeros(3)), "such as surplus"),
    "misshapen": (
        lambda new: new.update({"model.norm.weight": torch.zeros(3)}),
        r"model.norm.weight: expected \[64\]",
    ),
    "no tensor": (lambda new: new.update({"model.norm.weight": 1.0}), "expected a tensor"),
    "not finite": (
        lambda new: new["model.layers.2.mlp.down_proj.weight"].fill_(torch.nan),
        "down_proj",
    ),
    "not finite, not rounded": (
        lambda new: new["model.norm.weight"].fill_(torch.inf),
        "model.norm.weight: NaN or infinity among the weights",
    ),
}


@pytest.fixture(scope="module")
def rounded(tiny_model):
    return start(tiny_model("llama"), quantization="w4a16-auto")


@pytest.mark.parametrize("case", WRONG)
def test_wrong_update_changes_nothing(case, rounded, tiny_model):
    spoil, message = WRONG[case]
    new = {name: tensor.clone() for name, tensor in changed(tiny_model("llama")).items()}
    before = tokens(rounded), [each.clone() for each in contents(rounded)]
    spoil(new)
    with pytest.raises(InputError, match=message):
        rounded.update_weights(new)
    assert rounded.weight_version == "0" and tokens(rounded) == before[0]
    for own, expected in zip(contents(rounded), before[1], strict=True):
        assert torch.equal(own, expected)


def test_duplicate_tensor_name_is_refused(rounded, tiny_model):
    new = list(changed(tiny_model("llama")).items())
    with pytest.raises(InputError, match="comes twice"):
        rounded.update_weights([*new, new[0]])


def test_other_model_is_refused(rounded, tiny_model, quantized_5m):
    for folder, message in (
        (tiny_model("qwen3"), "config.json family: expected LlamaForCausalLM"),
        (quantized_5m, "config.json vocab_size: expected 512"),
        ("/nowhere", "nowhere"),
    ):
        with pytest.raises(InputError, match=message):
            rounded.update_weights(folder)


def test_collective_rpc_methods(rounded, tiny_model):
    before = tokens(rounded)
    assert rounded.collective_rpc("reload_weights") == [None]
    rounded.collective_rpc("sleep", kwargs={"level": 2})
    assert rounded.is_sleeping()
    rounded.collective_rpc("wake_up", kwargs={"tags": ["weights", "kv_cache"]})
    assert not rounded.is_sleeping()
    assert tokens(rounded) == before
    with pytest.raises(InputError, match="save_sharded_state.*known: reload_weights"):
        rounded.collective_rpc("save_sharded_state")


def held_bytes(llm: LLM) -> int:
    return sum(each.untyped_storage().nbytes() for each in contents(llm))


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_memory_and_wake_restores_weights(level, tiny_model):
    llm = start(tiny_model("qwen3"), quantization="w4a16-auto")
    before = tokens(llm)
    pages = [t for c in llm.engine.runner.caches for t in c.page_tensors]
    total = held_bytes(llm)
    llm.sleep(level)
    assert llm.is_sleeping()
    assert not any(each.untyped_storage().nbytes() for each in pages)
    # on a CPU the host's memory is where weights are kept at level 1
    # (torch cannot free the embedding there, which was read through NumPy)
    assert held_bytes(llm) == total if level == 1 else held_bytes(llm) < total / 2
    with pytest.raises(InputError, match="is asleep"):
        tokens(llm)
    llm.sleep(level)  # again: nothing
    llm.wake_up("weights")  # one tag may be a text
    assert llm.is_sleeping()
    llm.wake_up(["kv_cache"])
    assert not llm.is_sleeping() and tokens(llm) == before
    with pytest.raises(InputError, match="tags: expected weights"):
        llm.wake_up(["graphs"])
    with pytest.raises(InputError, match="level: expected 0, 1 or 2"):
        llm.sleep(3)


def test_llm_calls_on_paused_model_are_refused(tiny_model):
    """The calls of LLM would wait forever."""
    llm = start(tiny_model("llama"))
    llm.sleep(0)
    assert not llm.is_sleeping()
    for call in (
        lambda: tokens(llm),
        lambda: llm.encode(PROMPTS, use_tqdm=False),
        lambda: llm.beam_search(PROMPTS, BeamSearchParams(beam_width=2, max_tokens=2)),
    ):
        with pytest.raises(InputError, match="is asleep"):
            call()
    llm.wake_up()
    assert len(tokens(llm)) == len(PROMPTS)


def test_failed_sleep_keeps_model_awake(tiny_model, monkeypatch):
    llm = start(tiny_model("llama"))
    before = tokens(llm)

    def has_no_room(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(residence, "SleepingMemory", has_no_room)
        with pytest.raises(InputError, match="keeping the weights on the host.*level 2"):
            llm.sleep(1)
    assert not llm.is_sleeping() and tokens(llm) == before


def test_update_restores_weights_dropped_by_sleep(tiny_model, tmp_path):
    """The order of colocated trainers: sleep(2), wake weights, new weights, wake the pages."""
    folder, new = tiny_model("llama"), changed(tiny_model("llama"))
    llm = start(folder)
    llm.update_weights(new)
    wanted = tokens(llm)
    llm.update_weights(stored(folder))
    llm.sleep(2)
    llm.update_weights(new)
    llm.wake_up(["kv_cache"])
    assert tokens(llm) == wanted and llm.weight_version == "3"


def test_lost_tensors_are_reported(tiny_model, caplog):
    """A sleep of level 2 drops tensors that no folder has: the version goes back with them."""
    llm = start(tiny_model("llama"))
    before = tokens(llm)
    llm.update_weights(changed(tiny_model("llama")))
    llm.sleep(2)
    llm.wake_up()
    assert tokens(llm) == before and llm.weight_version == "0"
    assert "tensors of the last update are lost" in caplog.text


def test_page_exchange_refuses_updates(tiny_model, tmp_path):
    extra = {"path": str(tmp_path), "max_gb": 0.1}
    kv = {"kv_connector": "folder", "kv_connector_extra_config": extra}
    llm = start(tiny_model("llama"), kv_transfer_config=kv)
    with pytest.raises(InputError, match="--kv-transfer-config"):
        llm.update_weights(tiny_model("llama"))
    llm.close()


def test_staging_moves_layers_to_the_host(tiny_model):
    """As on a GPU: a layer's device memory is free before the next is read."""
    folder = tiny_model("qwen3")
    llm = start(folder, quantization="w4a16-auto")
    decoder = llm.engine.runner.decoder
    update = UpdateSource.of_folder(llm.engine.model_config, folder, torch.device("cpu"))
    staged = stage(
        decoder,
        update.config,
        update.source,
        device=torch.device("cpu"),
        max_model_len=llm.engine.max_model_len,
        kernels=None,
        offload=True,
    )
    assert staged.pairs
    for old, new in staged.pairs:
        assert torch.equal(old, new)
