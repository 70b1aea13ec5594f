"""Prompts of other types than the Python API takes are refused by what they are."""

import numpy as np
import pytest
import torch

from formats.errors import InputError
from qserve import LLM, SamplingParams
from qserve.library.prompts import as_batch, as_conversations, read_prompt

USER = {"role": "user", "content": "Hi"}


def ids_of(prompt):
    (only,) = as_batch(prompt)
    return read_prompt(only, pytest.fail)


@pytest.mark.parametrize("ids", [[3, 5], (3, 5), np.array([3, 5]), {"prompt_token_ids": (3, 5)}])
def test_token_ids_of_any_sequence(ids):
    assert ids_of(ids) == (None, [3, 5])


def test_token_ids_of_a_tensor():
    assert ids_of({"prompt_token_ids": torch.tensor([3, 5])}) == (None, [3, 5])


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, "prompts: expected a prompt or a list of prompts, found None"),
        (7, "prompts: expected a prompt or a list of prompts, found 7"),
        (b"abc", "prompt: expected a text or a list of token ids, found b'abc'"),
        ([None], "prompt: expected a text or a list of token ids, found None"),
        ([[1.5]], r"prompt: expected a text or a list of token ids, found \[1.5\]"),
        (
            {"prompt_token_ids": "abc"},
            "prompt: expected a list of token ids, found 'abc'",
        ),
        ({"prompt_token_ids": [3, -1]}, "prompt: token id -1 is not in the vocabulary"),
        ([2**40], f"prompt: token id {2**40} is not in the vocabulary"),
    ],
)
def test_invalid_prompts_are_refused(prompt, words):
    with pytest.raises(InputError, match=f"^{words}"):
        ids_of(prompt)


def test_conversations():
    assert as_conversations([USER]) == [[USER]] and as_conversations([[USER]]) == [[USER]]
    assert as_conversations([]) == []
    for wrong in (None, "Hi", USER, ["Hi"], [[USER, "Hi"]], [USER, "Hi"]):
        with pytest.raises(InputError, match="^messages: expected a list of messages, or a list"):
            as_conversations(wrong)


def test_unsupported_arguments_are_refused_by_name(docs_5m):
    llm = LLM(docs_5m, device="cpu", max_model_len=64)
    with pytest.raises(InputError, match="sampling_params: expected SamplingParams, found dict"):
        llm.generate("Hi", {"max_tokens": 3})
    with pytest.raises(InputError, match="sampling_params: expected SamplingParams, found int"):
        llm.generate(["a", "b"], [SamplingParams(), 3])
    with pytest.raises(InputError, match=r"sequence: token id 8192 is not in 0\.\.8191"):
        llm.logits([3, 8192])
    with pytest.raises(InputError, match="prompt: expected a list of token ids, found 'abc'"):
        llm.logits("abc")
    assert llm.logits(np.array([3, 5])).shape == (2, 8192)
