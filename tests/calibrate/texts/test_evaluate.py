"""Perplexity: which tokens make a window, which are counted, and what a bad model gives."""

import math
import os

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from calibrate.texts.data import read_calibration
from calibrate.texts.documents import read_texts
from calibrate.texts.evaluate import make_windows, perplexity, text_opening
from formats.errors import InputError
from formats.files import json_rows
from qserve.text.tokenizer import Tokenizer


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_each_text_is_preceded_by_bos_and_windows_do_not_overlap():
    windows = make_windows(["abc", "", "defg"], encode, 1, 4)
    assert windows.dtype == torch.int64
    a = ord("a")
    assert windows.tolist() == [[1, a, a + 1, a + 2], [1, 1, a + 3, a + 4]]


def test_windows_of_model_without_bos():
    assert make_windows(["ab", "cd"], encode, None, 4).tolist() == [encode("abcd")]


def test_only_needed_text_is_encoded():
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


def test_short_text_error_gives_length():
    with pytest.raises(InputError, match="has 3 tokens, too few for one window of 4"):
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
def test_nonfinite_logits_error_names_window(bad):
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


def test_huge_loss_gives_infinite_perplexity():
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


def test_pipe_is_refused_before_it_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name in ("pipe.txt", "pipe.jsonl"):
        with pytest.raises(InputError, match="is a pipe or a device"):
            read_texts(tmp_path / name)


def test_file_beyond_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(json_rows, "MAX_FILE_BYTES", 2**20)
    path = tmp_path / "long.txt"
    path.touch()
    os.truncate(path, 2**20 + 2**20)
    with pytest.raises(InputError, match="more than 1 MiB, which is the limit"):
        read_texts(path)


@pytest.mark.parametrize("width", [1, 4, 9])
def test_only_the_start_of_a_long_line_is_encoded(width):
    """Tokens of `width` characters; 30 MB take minutes."""
    text = "".join(chr(97 + i % 26) for i in range(1_000_000))
    num_encoded = []

    def encode_wide(text):
        num_encoded.append(len(text))
        return [sum(map(ord, text[i : i + width])) for i in range(0, len(text), width)]

    windows = make_windows([text, "never read"], encode_wide, None, 100, max_windows=20)
    assert sum(num_encoded) < 100_000
    assert windows.flatten().tolist() == encode_wide(text)[:2000]


def test_windows_start_with_tokenizer_prefix():
    a, long = ord("a"), [ord(c) for c in "bcdefghij"]
    windows = make_windows(["a", "bcdefghij"], encode, 1, 4, opening=[1])
    # the second text starts inside the first window; later windows begin with BOS again
    assert windows.tolist() == [[1, a, 1, long[0]], [1, *long[1:4]], [1, *long[4:7]]]
    # a text that starts where a window starts gets one BOS, not two
    windows = make_windows(["abc", "def"], encode, 1, 4, opening=[1])
    assert windows.tolist() == [[1, *encode("abc")], [1, *encode("def")]]


def test_tokenizer_prefix_of_several_tokens_is_not_split():
    windows = make_windows(["abc", "defghij"], encode, None, 6, opening=[7, 8])
    # the second opening begins at the last token of the first window
    assert windows.tolist() == [[7, 8, *encode("abc"), 7], [7, 8, *encode("defg")]]
    with pytest.raises(InputError, match="sequence length of 3 or more"):
        make_windows(["abc"], encode, None, 2, opening=[7, 8])


def test_tokens_added_by_tokenizer_are_not_scored():
    windows = torch.tensor([[1, 3, 4, 1], [1, 1, 3, 4]])
    flat = perplexity(windows, lambda ids: torch.zeros(len(ids), 5), False, given=[1])
    assert flat.tokens == 4 and flat.value == pytest.approx(5)
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    found = perplexity(windows, lambda ids: table[ids], False, given=[1])
    log_p = table.double().log_softmax(-1)
    pairs = [(1, 3), (3, 4), (1, 3), (3, 4)]
    expected = -sum(float(log_p[a, b]) for a, b in pairs) / 4
    assert found.mean_nll == pytest.approx(expected, rel=1e-6)


def with_bos(folder, target):
    """Copy of a folder's tokenizer that begins every text with its BOS token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(target)
    return AutoTokenizer.from_pretrained(target)


def test_text_prefix_equals_tokenizer_prefix(docs_5m, tmp_path):
    """docs-5m has a BOS token, which its tokenizer does not add."""
    plain, adds = AutoTokenizer.from_pretrained(docs_5m), with_bos(docs_5m, tmp_path)
    assert plain.bos_token_id is not None and text_opening(plain) == ()
    assert text_opening(adds) == (adds.bos_token_id,)
    assert text_opening(Tokenizer(tmp_path)) == (adds.bos_token_id,)
    text = "A borrow is a reference. " * 60
    for tokenizer, opening, bos in ((plain, (), 1), (adds, text_opening(adds), 6), (adds, (), 1)):
        windows = make_windows(
            [text],
            lambda text, own=tokenizer: own.encode(text, add_special_tokens=False),
            tokenizer.bos_token_id,
            32,
            6,
            opening=opening,
        )
        assert windows.shape == (6, 32)
        assert int((windows == tokenizer.bos_token_id).sum()) == bos
        assert int((windows[:, 0] == tokenizer.bos_token_id).sum()) == bos


def test_calibration_windows_start_with_tokenizer_prefix(docs_5m, tmp_path):
    tokenizer = with_bos(docs_5m, tmp_path)
    with_opening, without = (
        read_calibration(None, tokenizer, samples=12, sequence_length=64, bos=bos).ids_WS
        for bos in (True, False)
    )
    assert (with_opening[:, 0] == tokenizer.bos_token_id).all()
    assert int((without == tokenizer.bos_token_id).sum()) < 12
    assert with_opening.shape == without.shape == (12, 64)
