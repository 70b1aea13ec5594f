"""Sleep and new weights of a model on ranks: tokens and digests are those of one rank."""

from concurrent.futures import Future

import pytest
import torch

from formats.errors import InputError
from qserve.engine.distributed import shared_residence
from qserve.engine.runner.rank_residence import RankResidence
from tests.qserve.engine.control.new_weights import changed, stored, written
from tests.qserve.parallel.engines import make_prompts, start, tokens

SETTINGS = {"num_gpu_blocks_override": 64, "block_size": 8}
PROMPTS = make_prompts()[4:8]
SLOW = pytest.mark.exhaustive
CASES = [
    ("llama", 2, 1, None),
    *(
        pytest.param(*each, marks=pytest.mark.exhaustive)
        for each in (
            ("llama", 1, 2, None),
            ("qwen2_moe", 2, 1, None),
            ("gemma3", 2, 1, "w8a8"),
            ("qwen3", 2, 2, None),
            ("qwen3_next", 2, 1, None),
            ("granite_hybrid", 4, 1, None),
            ("nemotron_h_latent", 2, 1, None),
        )
    ),
]


def reference(folder, **settings):
    alone = start(folder, **SETTINGS, **settings)
    digests = alone.weight_digests()
    return tokens(alone, PROMPTS), {name: digests[name] for name in sorted(digests)}


def digests_of(llm):
    found = llm.weight_digests()
    return {name: found[name] for name in sorted(found)}


@pytest.mark.parametrize(("family", "tensor", "stages", "scheme"), CASES)
def test_sleep_and_updates(family, tensor, stages, scheme, tiny_model, many, tmp_path):
    folder, settings = tiny_model(family), {} if scheme is None else {"quantization": scheme}
    new = changed(folder)
    other = written(new, folder, tmp_path / "new")
    old_tokens, old_digests = reference(folder, **settings)
    new_tokens, new_digests = reference(other, **settings)
    assert old_tokens != new_tokens
    llm = many(folder, tensor, stages, **SETTINGS, **settings)
    assert tokens(llm, PROMPTS) == old_tokens and digests_of(llm) == old_digests
    for level in (1, 2):
        llm.sleep(level)
        assert llm.is_sleeping
        llm.wake_up()
        assert tokens(llm, PROMPTS) == old_tokens
    llm.update_weights(str(other))
    assert tokens(llm, PROMPTS) == new_tokens and digests_of(llm) == new_digests
    llm.sleep(2)
    llm.wake_up()  # from the folder of the update
    assert tokens(llm, PROMPTS) == new_tokens
    llm.update_weights(stored(folder), version="9")
    assert tokens(llm, PROMPTS) == old_tokens and digests_of(llm) == old_digests
    with pytest.raises(InputError, match="surplus"):
        llm.update_weights({**new, "surplus": torch.zeros(1)})
    name = next(name for name, each in new.items() if each.ndim == 2)
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        llm.update_weights({**new, name: new[name][:-1]})
    assert tokens(llm, PROMPTS) == old_tokens and llm.weight_version == "9"


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), pytest.param(2, 2, marks=SLOW)])
def test_remote_ranks_receive_tensors_over_connection(
    tensor, stages, tiny_model, many, monkeypatch
):
    folder = tiny_model("llama")
    new = changed(folder)
    llm = many(folder, tensor, stages, **SETTINGS)
    before = tokens(llm, PROMPTS)
    monkeypatch.setattr(llm.engine.workers.residence, "_shares_memory", False)
    monkeypatch.setattr(shared_residence, "PIECE_BYTES", 1000)
    monkeypatch.setattr(shared_residence, "shared_tensors", None)
    empty = {"surplus": torch.zeros(0, 4)}
    with pytest.raises(InputError, match="surplus"):
        llm.update_weights({**new, **empty})
    assert tokens(llm, PROMPTS) == before
    llm.update_weights(new)
    alone = start(folder, **SETTINGS)
    alone.update_weights(new)
    assert tokens(llm, PROMPTS) == tokens(alone, PROMPTS) != before
    assert digests_of(llm) == digests_of(alone)


def test_failed_transfer_leaves_ranks_unchanged(monkeypatch):
    monkeypatch.setattr(shared_residence, "PIECE_BYTES", 8)
    ranks = [RankResidence(None), RankResidence(None)]

    class Group:
        def begin(self, call, name, *values):
            begun = [Future() for _ in ranks]
            for rank, future in zip(ranks, begun, strict=True):
                try:
                    future.set_result(rank.call(name, *values))
                except InputError as error:
                    future.set_exception(error)
            return begun

    shared = shared_residence.SharedResidence(None, Group(), None, shares_memory=False)
    good = ("good", torch.arange(6.0))
    shared._send([good])
    for rank in ranks:
        assert torch.equal(rank._received.pop("good"), good[1])
    with pytest.raises(InputError, match="tensor bad: has the dtype complex64"):
        shared._send([good, ("bad", torch.zeros(3, dtype=torch.complex64))])
    assert all(not rank._received for rank in ranks)


def test_unreadable_update_on_one_rank_is_refused_on_all(tiny_model, many, tmp_path, monkeypatch):
    """Only the other rank sees a folder that is gone by the time it reads."""
    folder = tiny_model("llama")
    other = written(changed(folder), folder, tmp_path / "new")
    llm = many(folder, 2, **SETTINGS)
    before = tokens(llm, PROMPTS)
    residence = llm.engine.workers.residence
    begin = residence._rank_group.begin

    def begin_elsewhere(call, name, *values):
        values = (str(tmp_path / "gone"), *values[1:]) if name == "stage_folder" else values
        return begin(call, name, *values)

    monkeypatch.setattr(residence._rank_group, "begin", begin_elsewhere)
    with pytest.raises(InputError, match="rank 1: .*gone"):
        llm.update_weights(str(other))
    monkeypatch.undo()
    assert tokens(llm, PROMPTS) == before and llm.weight_version == "0"
    llm.update_weights(str(other))
    assert tokens(llm, PROMPTS) == tokens(start(other, **SETTINGS), PROMPTS)
