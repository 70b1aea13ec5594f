"""Perplexity: which tokens make a window, which are counted, and what a bad model gives."""

import json
import math

import pytest
import torch

from calibrate.evaluate import make_windows, perplexity, read_texts
from formats.errors import InputError


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_jsonl_gives_its_text_fields_and_other_files_one_text(tmp_path):
    lines = [{"text": "one\u2028still one"}, {"text": "two", "more": 1}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n")
    assert read_texts(path) == ["one\u2028still one", "two"]
    plain = tmp_path / "a.txt"
    plain.write_text("one\n\ntwo\n")
    assert read_texts(plain) == ["one\n\ntwo\n"]
    plain.write_bytes("\ufeffone".encode())
    assert read_texts(plain) == ["one"]


@pytest.mark.parametrize(
    "line", ['{"text": 3}', '{"txt": ""}', "[]", "3", "{", "null", "[" * 10**5]
)
def test_bad_jsonl_line_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n' + line)
    with pytest.raises(InputError, match="line 2"):
        read_texts(path)
    path.write_text('{"text": "\\ud83d"}')
    with pytest.raises(InputError, match="line 1: has half a character"):
        read_texts(path)


def test_file_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_texts(tmp_path / "nothing.txt")
    with pytest.raises(InputError, match="directory"):
        read_texts(tmp_path)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        read_texts(tmp_path / "binary.txt")


def test_each_text_is_preceded_by_bos_and_windows_do_not_overlap():
    windows = make_windows(["abc", "", "defg"], encode, 1, 4)
    assert windows.dtype == torch.int64
    a = ord("a")
    assert windows.tolist() == [[1, a, a + 1, a + 2], [1, 1, a + 3, a + 4]]


def test_model_without_bos():
    assert make_windows(["ab", "cd"], encode, None, 4).tolist() == [encode("abcd")]


def test_no_more_is_encoded_than_is_asked_for():
    def texts():
        yield "abc"
        yield "defgh"
        raise AssertionError("read a text too many")

    windows = make_windows(texts(), encode, 1, 4, max_windows=2)
    assert windows.shape == (2, 4)
    assert windows[1].tolist() == [1, *encode("def")]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_window_limit_cuts_a_long_text(limit):
    assert len(make_windows(["a" * 11], encode, 1, 4, max_windows=limit)) == limit


def test_text_too_short_says_how_short():
    with pytest.raises(InputError, match="3 tokens do not fill one window of 4"):
        make_windows(["ab"], encode, 1, 4)
    for length, limit in ((1, None), (0, None), (4, 0)):
        with pytest.raises(InputError, match="windows"):
            make_windows(["abcdefgh"], encode, 1, length, limit)


def test_uniform_model_has_the_vocabulary_as_perplexity():
    result = perplexity(torch.randint(0, 50, (3, 8)), lambda ids: torch.zeros(len(ids), 50), False)
    assert result.value == pytest.approx(50)
    assert (result.windows, result.tokens) == (3, 3 * 7)
    assert result.mean_nll == pytest.approx(math.log(50))


def test_logits_at_a_position_predict_the_next_token():
    windows = torch.tensor([[3, 1, 4, 1], [5, 2, 6, 5]])
    follow = {3: 1, 1: 4, 4: 1, 5: 2, 2: 6, 6: 5}

    def sees_ahead(ids):
        assert ids.shape == (4,)
        return 30 * torch.nn.functional.one_hot(torch.tensor([follow[int(i)] for i in ids]), 7)

    assert perplexity(windows, sees_ahead, False).value == pytest.approx(1, abs=1e-6)
    assert perplexity(windows, lambda ids: sees_ahead(ids).roll(1, 0), False).value > 1e6


def test_mean_is_over_tokens_in_float64():
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(0, 11, (4, 6), generator=generator)
    table = torch.randn(11, 11, generator=generator)
    result = perplexity(windows, lambda ids: table[ids], False)
    log_p = table.double().log_softmax(-1)
    nll = [
        -float(log_p[int(a), int(b)]) for row in windows for a, b in zip(row, row[1:], strict=False)
    ]
    assert result.mean_nll == pytest.approx(sum(nll) / len(nll), rel=1e-6)
    assert result.value == pytest.approx(math.exp(sum(nll) / len(nll)), rel=1e-6)
    half = perplexity(windows, lambda ids: table[ids].bfloat16(), False)
    assert half.value == pytest.approx(result.value, rel=0.02)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_raise_with_the_window(bad):
    windows = torch.zeros(3, 4, dtype=torch.long)
    calls = []

    def logits(ids):
        calls.append(ids)
        values = torch.zeros(4, 5)
        if len(calls) == 2:
            values[1, 0] = bad
        return values

    with pytest.raises(InputError, match="window 2"):
        perplexity(windows, logits, False)


def test_hopeless_model_is_infinite_instead_of_an_overflow():
    def wrong(ids):
        values = torch.zeros(len(ids), 5)
        values[:, 1] = 1e4
        return values

    assert perplexity(torch.zeros(1, 4, dtype=torch.long), wrong, False).value == math.inf


def test_progress_goes_to_stderr(capsys):
    windows = torch.zeros(2, 4, dtype=torch.long)
    perplexity(windows, lambda ids: torch.zeros(4, 5))
    out, err = capsys.readouterr()
    assert out == ""
    assert "2/2" in err


def test_progress_bar_ends_before_the_error(capsys):
    with pytest.raises(InputError, match="window 1: .*NaN") as error:
        perplexity(torch.zeros(2, 4, dtype=torch.long), lambda _: torch.full((4, 8), math.nan))
    shown = capsys.readouterr().err
    assert error.tb is not None, "its frames are alive, as they are when the error is printed"
    assert "window" in shown and shown.endswith("\n")
