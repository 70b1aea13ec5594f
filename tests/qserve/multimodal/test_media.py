"""Media items of a prompt: what is valid, which models take them, and how they key KV pages."""

from dataclasses import replace
from hashlib import sha256

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.engine.kv_cache.prefix_cache import extend_keys, root_key
from qserve.errors import ParameterError
from qserve.multimodal.media import Feature, MediaItem, check_media
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams

PAGE = 4
PROMPT = list(range(100, 124))  # six pages


def item(offset: int, length: int, content: str = "a cat", kind: str = "image") -> MediaItem:
    digest = sha256(content.encode()).hexdigest()
    return MediaItem(kind=kind, digest=digest, offset=offset, length=length)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "smell"}, "expected image, video, audio, found 'smell'"),
        ({"digest": "ab"}, "64 hex digits"),
        ({"digest": "A" * 64}, "64 hex digits"),
        ({"offset": -1}, "offset of at least 0"),
        ({"length": 0}, "length of at least 1"),
        ({"is_embed": b"\1\1"}, "expected 5 bytes of 0 or 1"),
        ({"is_embed": b"\0" * 5}, "not all of them 0"),
        ({"is_embed": b"\1\2\1\1\1"}, "expected 5 bytes of 0 or 1"),
    ],
)
def test_invalid_item_is_refused(change, words):
    with pytest.raises(ParameterError, match=words):
        replace(item(3, 5), **change)


def test_features_travel_as_bytes_and_do_not_count_in_comparisons():
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    given = replace(item(3, 5), features=(Feature.of("pixel_values", pixels),))
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=MediaItem)
    assert np.array_equal(found.features[0].array(), pixels) and found == item(3, 5)
    for change, words in (
        ({"dtype": "object"}, "found 'object'"),
        ({"shape": (3, 2)}, "expected 6 bytes"),
        ({"shape": (-3, -4)}, "expected 12 bytes"),
    ):
        with pytest.raises(ParameterError, match=words):
            replace(given.features[0], **change)


def test_embeddings_stand_at_the_positions_of_the_mask():
    rows = replace(item(3, 5), is_embed=b"\1\1\0\1\0")
    assert rows.num_embeds == 3 and rows.embed_positions().tolist() == [3, 4, 6]
    assert item(3, 5).num_embeds == 5 and item(3, 5).embed_positions().tolist() == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([item(0, 4), item(3, 2)], "item 1: begins at token 3, before the end .* 4"),
        ([item(8, 2), item(0, 2)], "item 1: begins at token 0"),
        ([item(20, 5)], "item 0: ends at token 25; the prompt has 24 tokens"),
    ],
)
def test_items_outside_the_prompt_or_over_each_other_are_refused(items, words):
    with pytest.raises(InputError, match=words):
        check_media("request r", items, len(PROMPT))
    check_media("request r", [item(0, 4), item(4, 20)], len(PROMPT))


def keys(media=(), tokens=PROMPT) -> list[bytes]:
    found = []
    extend_keys(found, tokens, page_size=PAGE, last=root_key(), media=media)
    return found


def num_shared(a: list[bytes], b: list[bytes]) -> int:
    return next((n for n, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))


def test_page_keys_differ_from_the_first_page_with_another_item():
    cat = keys([item(6, 9)])
    assert num_shared(cat, keys([item(6, 9)])) == 6
    assert num_shared(cat, keys()) == 1, "tokens 4 to 7 hold the first embeddings"
    assert num_shared(cat, keys([item(6, 9, "a dog")])) == 1
    assert num_shared(cat, keys([item(6, 9, kind="video")])) == 1
    assert num_shared(cat, keys([item(7, 9)])) == 1, "the same pages, one token later"
    assert num_shared(cat, keys([item(6, 9), item(15, 2)])) == 3


def test_page_inside_an_item_depends_on_its_place_in_the_item():
    """Two items with different rows have different keys after equal tokens."""
    tokens = [5] * len(PROMPT)
    a, b = keys([item(4, 16)], tokens), keys([item(4, 8), item(12, 8)], tokens)
    assert num_shared(a, b) == 3


@given(
    cut=st.integers(0, 24), media=st.sampled_from([(), (item(6, 9),), (item(0, 3), item(3, 21))])
)
def test_keys_made_in_pieces_are_those_made_at_once(cut, media):
    found = []
    for end in (cut, len(PROMPT)):
        last = found[-1] if found else root_key()
        extend_keys(found, PROMPT[:end], page_size=PAGE, last=last, media=media)
    assert found == keys(media)


@pytest.fixture
def engine(docs_5m):
    config = EngineConfig(
        model=str(docs_5m), device="cpu", block_size=PAGE, num_gpu_blocks_override=50
    )
    return Engine(config)


def cached(engine, name: str, *media: MediaItem) -> int:
    """Cached prompt tokens of a request, which runs to its end."""
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    options = msgspec.msgpack.decode(  # as between the processes
        msgspec.msgpack.encode(RequestOptions(media=media)), type=RequestOptions
    )
    engine.add_request(name, PROMPT, params, options=options)
    while engine.has_work():
        (event,) = engine.step() or (None,)
    return event.facts.num_cached


def test_model_without_an_encoder_refuses_media(engine):
    with pytest.raises(InputError, match=r"request r: has a media item of kind 'image'; .* text"):
        cached(engine, "r", item(4, 4))
    assert cached(engine, "text") == 0


def test_pages_are_reused_up_to_an_item_that_differs(engine):
    inputs = engine._input_processor
    inputs._model = replace(inputs._model, media_kinds=frozenset({"image"}))
    with pytest.raises(InputError, match=r"kind 'audio'; .* takes text, image"):
        cached(engine, "sound", item(4, 4, kind="audio"))
    assert cached(engine, "first", item(8, 6)) == 0
    assert cached(engine, "again", item(8, 6)) == 20
    assert cached(engine, "other", item(8, 6, "a dog")) == 8
    assert cached(engine, "text") == 8
