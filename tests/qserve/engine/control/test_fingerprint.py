"""system_fingerprint: changes if bits may differ, and only then."""

import pytest
import torch

import qserve
from qserve.config import EngineConfig
from qserve.engine.control.fingerprint import settings_of
from qserve.llm import LLM
from qserve.lora.request import LoRARequest
from qserve.model.resident.checksum import checksum
from qserve.params.sampling_params import SamplingParams
from tests.adapters import write_adapter
from tests.qserve.model.variants import edited

ONE_TOKEN = SamplingParams(max_tokens=1, detokenize=False)
SMALL = {"device": "cpu", "max_model_len": 64, "num_gpu_blocks_override": 32}


def fingerprint(folder, **settings):
    return LLM(folder, **{**SMALL, **settings}).system_fingerprint


def one_bit(tensors):
    """The last bit of the last weight of the last linear."""
    name = sorted(name for name in tensors if name.endswith("down_proj.weight"))[-1]
    bits = tensors[name].view(torch.int16)
    bits[-1, -1] ^= 1


def test_fingerprint_depends_on_weights_not_path(tiny_model, tmp_path):
    folder = tiny_model("qwen3")
    first = fingerprint(folder)
    assert first == fingerprint(folder) and len(first) == 19
    assert first != fingerprint(edited(folder, tmp_path / "other", one_bit))
    copy = edited(folder, tmp_path / "copy")
    assert first == fingerprint(copy), "a copy in another folder is the same model"


def test_fingerprint_includes_batch_settings_unless_batch_invariant(tiny_model):
    folder = tiny_model("qwen3")
    assert fingerprint(folder) != fingerprint(folder, max_num_seqs=3)
    both = [fingerprint(folder, batch_invariant=True, max_num_seqs=n) for n in (3, 4)]
    assert both[0] == both[1] != fingerprint(folder)
    assert fingerprint(folder) == fingerprint(folder, gpu_memory_utilization=0.5)
    assert fingerprint(folder) != fingerprint(folder, kv_cache_dtype="int8")


def test_fingerprint_includes_placement_file_contents(tmp_path):
    """Its path does not."""

    def found(name, text):
        (tmp_path / name).write_text(text)
        strategy = {"expert_placement_strategy": str(tmp_path / name)}
        ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
        return settings_of(EngineConfig(model="x", **ranks, **strategy))

    first = found("a.json", "[[1, 2]]")
    assert found("b.json", "[[1, 2]]") == first != found("a.json", "[[2, 1]]")


def test_fingerprint_includes_adapters(tiny_model, tmp_path):
    """Outputs of an adapter have another fingerprint, which follows from its weights."""
    folder = tiny_model("qwen3")
    llm = LLM(folder, **SMALL, enable_lora=True)
    for number, (name, seed) in enumerate({"a": 1, "b": 2, "again": 1}.items(), start=1):
        path = str(write_adapter(folder, tmp_path / name, seed=seed))
        llm.generate([[1, 2]], ONE_TOKEN, False, lora_request=LoRARequest(name, number, path))
    a, b, again = (llm.adapter_fingerprint(name) for name in ("a", "b", "again"))
    assert a == again and len({a, b, llm.system_fingerprint, fingerprint(folder)}) == 4


def test_fingerprint_includes_versions(tiny_model, monkeypatch):
    before = fingerprint(tiny_model("qwen3"))
    monkeypatch.setattr(qserve, "__version__", "0.0.1")
    assert fingerprint(tiny_model("qwen3")) != before


def test_update_changes_fingerprint_and_old_weights_restore_it(tiny_model, tmp_path):
    folder = tiny_model("qwen3")
    llm = LLM(folder, **SMALL)
    before = llm.system_fingerprint
    llm.update_weights(edited(folder, tmp_path / "other", one_bit))
    other = llm.system_fingerprint
    assert other == fingerprint(tmp_path / "other") != before
    llm.sleep(1)
    llm.wake_up()
    assert llm.system_fingerprint == other
    llm.update_weights(folder)
    assert llm.system_fingerprint == before


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("count", [1, 7, 8, 4099])
def test_checksum_depends_on_every_bit_and_position(dtype, count):
    generator = torch.Generator().manual_seed(count)
    flat = torch.randint(-128, 127, (count + 1,), generator=generator).to(dtype)
    whole, shifted = flat[:-1].clone(), flat[1:].clone()
    assert checksum([whole]) == checksum([flat[:-1]]), "wherever its memory begins"
    assert checksum([shifted]) == checksum([flat[1:]])
    data = whole.view(torch.uint8)
    seen = {checksum([whole])}
    places = sorted({0, 1 % len(data), len(data) // 2, len(data) - 1})
    for place in places:
        for bit in (0, 7):
            data[place] ^= 1 << bit
            seen.add(checksum([whole]))
            data[place] ^= 1 << bit
    assert len(seen) == 1 + 2 * len(places)
    if count > 8 and not torch.equal(whole[:8], whole[8:16]):
        swapped = whole.clone()
        swapped[:8], swapped[8:16] = whole[8:16], whole[:8]
        assert checksum([swapped]) not in seen
    assert checksum([whole.view(1, -1)]) not in seen, "another shape"


def test_checksum_pieces_are_ordered(monkeypatch):
    monkeypatch.setattr("qserve.model.resident.checksum.WORDS", 4)
    numbers = torch.arange(24, dtype=torch.int64)
    found = {checksum([each]) for each in (numbers, numbers.roll(4), numbers.flip(0))}
    assert len(found) == 3
