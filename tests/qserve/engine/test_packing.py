"""The leader's messages to other ranks arrive unchanged; other bytes decode to nothing else."""

import dataclasses
import json
import types
import typing

import numpy as np
import pytest

from qserve.config import EngineConfig
from qserve.engine.distributed.rank_channel import HEADER, KNOWN, pack, unpack
from qserve.engine.kv_cache.host_tier import PageMoves
from qserve.engine.kv_cache.state_snapshots import StateMoves
from qserve.engine.step.media_rows import ItemRows, MediaRows
from qserve.engine.step.step_input import HistoryFill, PoolRows, PromptRows, StepInput
from qserve.multimodal.media import Feature, MediaItem
from qserve.params.sampling_params import SamplingParams


def assert_same(found, given):
    if isinstance(given, np.ndarray):
        assert found.dtype == given.dtype and np.array_equal(found, given)
        assert found.flags.writeable, "torch takes no others"
    elif dataclasses.is_dataclass(given):
        assert type(found) is type(given)
        for field in dataclasses.fields(given):
            assert_same(getattr(found, field.name), getattr(given, field.name))
    elif isinstance(given, tuple | list):
        assert len(found) == len(given)
        for one, other in zip(found, given, strict=True):
            assert_same(one, other)
    else:
        assert found == given


def test_step_with_every_field_round_trips():
    step = StepInput.of_sequence(
        [3, 4, 5], [7], page_size=16, params=SamplingParams(logit_bias=((5, 1.5),))
    )
    ids = np.array([1, 2], np.int64)
    pixels = Feature.of("pixel_values", np.arange(6, dtype=np.float32).reshape(2, 3))
    item = MediaItem(
        kind="image", digest="a" * 64, offset=1, length=2, is_embed=b"\1\0", features=(pixels,)
    )
    step = dataclasses.replace(
        step,
        history_fills=(HistoryFill(row=1, prompt_token_ids=ids, output_token_ids=ids[:0]),),
        page_moves=PageMoves(
            stored_pages=ids, stored_slots=ids, loaded_slots=ids[:1], loaded_pages=ids[:1]
        ),
        state_moves=StateMoves(saved_from=ids, saved_to=ids),
        prompt_rows=PromptRows(rows=ids, targets=ids, num_alternatives=2),
        pool_rows=PoolRows(rows=ids, counts=ids, logit_rows=ids, logit_tokens=((), (4, 5))),
        media=MediaRows(
            dropped=("b" * 64,),
            encode=(item,),
            rows_M=ids,
            of_items=(ItemRows(item.digest, 0, 2),),
            before_M=ids[:0],
            of_next=(),
        ),
    )
    assert_same(unpack(pack(("launch", step))), ("launch", step))


@pytest.mark.parametrize(
    "value",
    [
        ("a", None, True, 2**62, 0.1, ()),
        [np.zeros((0, 3), np.int32), np.arange(5, dtype=np.uint8), np.float32([[1.5]])],
        EngineConfig(model="m", kernel=["w4a16=triton"]),
        np.int64(4),
    ],
)
def test_values_round_trip(value):
    assert_same(unpack(pack(value)), value)


def dataclasses_in(hint):
    if dataclasses.is_dataclass(hint):
        yield hint
        for each in typing.get_type_hints(hint).values():
            yield from dataclasses_in(each)
    elif isinstance(hint, types.UnionType) or typing.get_origin(hint):
        for each in typing.get_args(hint):
            yield from dataclasses_in(each)


def test_every_step_type_is_registered():
    assert set(dataclasses_in(StepInput)) == set(KNOWN.values()) - {EngineConfig}


def test_unknown_classes_are_refused():
    with pytest.raises(TypeError, match="SamplingParams is not in KNOWN"):
        pack(SamplingParams())
    tree = json.dumps({"class": "Popen", "fields": []}).encode()
    with pytest.raises(KeyError):
        unpack(len(tree).to_bytes(HEADER, "little") + tree)
