"""Data sets: lengths, likeness, and the formats of published traces."""

import json

import pytest

from formats.errors import InputError
from qserve.bench.requests.dataset import load_samples
from qserve.bench.requests.dataset_settings import DatasetSettings
from qserve.bench.requests.token_text import TokenText
from qserve.bench.requests.trace import read_trace

MODEL = "examples/models/docs-5m"
MOONCAKE = [
    {"timestamp": 5000, "input_length": 1030, "output_length": 3, "hash_ids": [4, 5, 6]},
    {"timestamp": 6500, "input_length": 1100, "output_length": 2, "hash_ids": [4, 5, 7]},
]
TRACES = {
    "burst.csv": (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,GPT-4,10,3,13,API log\n5.5,ChatGPT,9,9,18,API log\n6,GPT-4,8,0,8,API log\n"
        "6.5,GPT-4,11,2,13,API log\n"
    ),
    "azure.csv": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,10,3\n"
        "2023-11-16 18:15:48.1805900,11,2\n"
    ),
    "vidur.csv": "arrived_at,num_prefill_tokens,num_decode_tokens\n1.0,10,3\n2.5,11,2\n",
    "mooncake.jsonl": "".join(json.dumps(row) + "\n" for row in MOONCAKE),
}


def samples(tmp_path=None, text=None, **settings):
    settings = {"num_prompts": 5, "random_vocab_size": 500, **settings}
    return load_samples(DatasetSettings(**settings), text or TokenText(None, 500), seed=1)


@pytest.mark.parametrize("name", TRACES)
def test_trace_format_is_detected_by_first_line(tmp_path, name):
    path = tmp_path / name
    path.write_text(TRACES[name])
    first, second = read_trace(str(path))
    assert first.arrival == 0 and second.arrival == pytest.approx(1.5)
    assert (first.output_len, second.output_len) == (3, 2)
    assert second.input_len in (11, 1100)


def test_equal_hashes_are_equal_prefixes(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACES["mooncake.jsonl"])
    first, second = samples(dataset_name="timed_trace", dataset_path=str(path), num_prompts=2)
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.prompt[1024:1030] != second.prompt[1024:1030]
    assert (first.prompt_len, second.prompt_len) == (1030, 1100)


def test_range_ratio_equals_vllm():
    found = samples(random_input_len=100, random_range_ratio=0.25, num_prompts=300)
    lengths = {sample.prompt_len for sample in found}
    assert min(lengths) == 75 and max(lengths) == 125
    assert {each.prompt_len for each in samples(random_input_len=100)} == {100}


def test_random_prompts_share_only_the_prefix():
    found = samples(random_input_len=20, random_prefix_len=8)
    assert len({tuple(each.prompt[:8]) for each in found}) == 1
    assert len({tuple(each.prompt[8:]) for each in found}) == 5
    assert {each.prompt_len for each in found} == {28}


def test_prefix_repetition_number_of_prefixes():
    found = samples(
        dataset_name="prefix_repetition",
        prefix_repetition_num_prefixes=3,
        prefix_repetition_prefix_len=6,
        prefix_repetition_suffix_len=4,
        num_prompts=60,
    )
    assert len({tuple(each.prompt[:6]) for each in found}) == 3
    assert len({tuple(each.prompt) for each in found}) == 60


def test_texts_have_requested_number_of_tokens():
    text = TokenText(MODEL)
    for sample in samples(text=text, random_input_len=40):
        assert isinstance(sample.prompt, str)
        assert len(text.encode(sample.prompt)) == sample.prompt_len
        assert abs(sample.prompt_len - 40) <= 2


def test_sonnet_shares_its_first_lines():
    text = TokenText(MODEL)
    first, second, *_ = samples(text=text, dataset_name="sonnet")
    shared = len(text.encode(first.prompt[: _common(first.prompt, second.prompt)]))
    assert shared > 100 and first.prompt != second.prompt and first.output_len == 150


def _common(a, b):
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def test_sharegpt_drops_long_conversations(tmp_path):
    def talk(prompt, answer):
        return {"conversations": [{"value": "a " * prompt}, {"value": "b " * answer}]}

    path = tmp_path / "share.json"
    path.write_text(json.dumps([talk(10, 7), talk(2, 9), talk(1025, 9), talk(1000, 1100), {}]))
    found = samples(dataset_name="sharegpt", dataset_path=str(path), num_prompts=2)
    assert [(each.prompt_len, each.output_len) for each in found] == [(10, 7)] * 2


def test_custom_dataset_lines(tmp_path):
    path = tmp_path / "custom.jsonl"
    path.write_text('{"prompt": "a b c", "output_tokens": 3}\n{"prompt": "d"}\n')
    found = samples(dataset_name="custom", dataset_path=str(path), num_prompts=2)
    assert [(each.prompt, each.output_len) for each in found] == [("a b c", 3), ("d", 256)]
    path.write_text('{"prompts": "a"}\n')
    with pytest.raises(InputError, match="line 1"):
        samples(dataset_name="custom", dataset_path=str(path))


@pytest.mark.parametrize("name", ["rows.json", "ROWS.JSONL", "rows.txt"])
def test_rows_are_read_from_any_file_name(tmp_path, name):
    rows = [{"prompt": "a b c", "output_tokens": 3}, {"prompt": ["d\u2028", "e"]}]
    path = tmp_path / name
    for content in (json.dumps(rows), "\n".join(map(json.dumps, rows)), json.dumps({"data": rows})):
        path.write_text(content)
        found = samples(dataset_name="custom", dataset_path=str(path), num_prompts=2)
        assert [each.prompt for each in found] == ["a b c", ["d\u2028", "e"]]
    talk = {"conversations": [{"value": "a " * 9}, {"value": "b " * 5}]}
    path.write_text("\n".join(json.dumps(talk) for _ in range(3)))
    found = samples(dataset_name="sharegpt", dataset_path=str(path), num_prompts=1)
    assert (found[0].prompt_len, found[0].output_len) == (9, 5)
    path.write_text(json.dumps([{"text": "one line\nanother line"}]))
    found = samples(dataset_name="sonnet", dataset_path=str(path), num_prompts=1)
    assert set(found[0].prompt.splitlines()[1:]) <= {"one line", "another line"}


def test_file_of_other_format_is_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="first line"):
        read_trace(str(path))
    with pytest.raises(InputError, match="--dataset-path"):
        samples(dataset_name="sharegpt")
