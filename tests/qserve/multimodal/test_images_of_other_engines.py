"""KV pages of prompts with images reach another engine, which encodes nothing again."""

import json

import pytest

from qserve.engine.kv_cache import state_snapshots
from tests.qserve.multimodal.test_image_tokens import requests_of
from tests.tiny_vision import VISION_FAMILIES, picture

FAMILIES = [
    pytest.param(name, marks=() if name == "gemma3" else pytest.mark.exhaustive)
    for name in VISION_FAMILIES
]
GUARD = 60  # seconds, against hanging


@pytest.mark.parametrize("family", FAMILIES)
def test_second_engine_finds_the_pages(family, vision, tmp_path, monkeypatch):
    monkeypatch.setattr(state_snapshots, "MIN_GAIN", 4)  # these prompts are short
    model = vision(family)
    given = {"kv_connector": "folder", "kv_connector_extra_config": {"path": str(tmp_path)}}
    requests = requests_of(model)

    def engine():
        return model.engine(kv_transfer_config=json.dumps(given))

    first, second = engine(), engine()
    wanted = [model.expected(*request) for request in requests]
    assert model.run(first, *requests)[0] == wanted
    for write in list(first._remote_kv._writes):
        write.result(GUARD)
    encoded, tower = [], second.runner.encoder.tower
    encode = tower.encode
    monkeypatch.setattr(tower, "encode", lambda items: encoded.extend(items) or encode(items))
    text, images = requests[1]
    # All tokens of a mutual prompt see each other, so a longer prompt shares no keys with it.
    is_mutual = model.processor.config.family.has_mutual_prompt
    longer = text if is_mutual else f"{text} and then"
    (found,), (event,) = model.run(second, (longer, images))
    assert found == model.expected(longer, images)
    media_end = model.prompt(longer, images)[1][-1].end
    if not is_mutual:
        assert event.facts.num_cached >= media_end - 4
    assert not encoded or event.facts.num_cached < media_end
    other = (picture(*images[0].size, 77),)  # as many tokens, another picture
    assert model.run(second, (longer, other))[0] == [model.expected(longer, other)]
