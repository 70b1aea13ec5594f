"""The offline API: prompts in any form, sampling that repeats, settings and errors."""

import shutil
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from formats.errors import InputError
from qserve import LLM, SamplingParams
from qserve.engine.engine import Engine
from qserve.params.sampling_params import ParameterError


@pytest.fixture(scope="module")
def llm(quantized_5m):
    return LLM(quantized_5m, device="cpu", max_num_batched_tokens=64, max_num_seqs=16)


def texts(outputs):
    return [[completion.text for completion in output.outputs] for output in outputs]


def test_graphs_are_captured_on_request(quantized_5m, monkeypatch):
    """A start leaves them to the steps that need them; a measurement asks for all."""
    pieces = [True] * 3
    monkeypatch.setattr(Engine, "use_idle_time", lambda _: bool(pieces) and pieces.pop())
    llm = LLM(quantized_5m, device="cpu", num_gpu_blocks_override=8, admission="fits")
    assert len(pieces) == 3
    llm.capture_graphs()
    assert not pieces


def test_text_ids_and_batches_are_the_same_prompt(llm):
    params = SamplingParams(temperature=0, max_tokens=8)
    ids = llm.get_tokenizer().encode("A process is")
    from_text, from_ids = (llm.generate(p, params, use_tqdm=False) for p in ("A process is", ids))
    both = llm.generate(["A process is", ids], params, use_tqdm=False)
    assert texts(from_text) * 2 == texts(from_ids) * 2 == texts(both)
    assert from_text[0].prompt == "A process is"
    assert from_ids[0].prompt is None
    assert from_ids[0].prompt_token_ids == ids


def test_outputs_come_in_the_order_of_prompts(llm):
    prompts = ["one " * n for n in (30, 1, 12, 5)]
    params = [SamplingParams(temperature=0, max_tokens=m) for m in (2, 9, 4, 1)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 9, 4, 1]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_seed_is_reproducible_in_any_batch(llm):
    params = SamplingParams(temperature=1, seed=7, max_tokens=12, ignore_eos=True)
    alone = llm.generate("The standard library", params, use_tqdm=False)
    crowd = [SamplingParams(temperature=1.3, max_tokens=20, ignore_eos=True)] * 6
    together = llm.generate(
        ["The standard library", *["Noise"] * 6], [params, *crowd], use_tqdm=False
    )
    assert texts(alone)[0] == texts(together)[0]
    other = SamplingParams(temperature=1, seed=8, max_tokens=12, ignore_eos=True)
    assert texts(llm.generate("The standard library", other, use_tqdm=False)) != texts(alone)


def test_without_a_seed_requests_differ(llm):
    params = SamplingParams(temperature=1, max_tokens=12, ignore_eos=True)
    first, second = llm.generate(["The"] * 2, params, use_tqdm=False)
    assert first.outputs[0].token_ids != second.outputs[0].token_ids


def test_n_gives_indexed_outputs_of_consecutive_seeds(llm):
    params = SamplingParams(n=3, temperature=1, seed=4, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate("The", params, use_tqdm=False)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    single = SamplingParams(temperature=1, seed=6, max_tokens=6, ignore_eos=True)
    (alone,) = llm.generate("The", single, use_tqdm=False)
    assert alone.outputs[0].token_ids == output.outputs[2].token_ids
    assert output.outputs[0].token_ids != output.outputs[1].token_ids


def test_seeds_of_n_wrap_to_smallest(llm):
    last, first = (SamplingParams(seed=seed, max_tokens=6) for seed in (2**63 - 1, -(2**63)))
    (both,) = llm.generate("The", replace(last, n=2), use_tqdm=False)
    alone = [llm.generate("The", params, use_tqdm=False)[0] for params in (last, first)]
    assert texts([both])[0] == [output.outputs[0].text for output in alone]


def test_stop_string_ends_the_request_and_frees_its_pages(llm):
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (full,) = llm.generate("A process is", greedy, use_tqdm=False)
    text = full.outputs[0].text
    stop = text[20:24]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[stop])
    (cut,) = llm.generate("A process is", params, use_tqdm=False)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert not llm.engine.has_work()
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.num_pages


def test_chat_renders_the_template(llm):
    params = SamplingParams(temperature=0, max_tokens=4)
    (output,) = llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False)
    assert output.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids[0] == llm.get_tokenizer().encode("<|im_start|>")[-1]
    with pytest.raises(InputError, match="chat_template_kwargs.tone: is not read by"):
        llm.chat([{"role": "user", "content": "Hi"}], chat_template_kwargs={"tone": 1})


def test_chat_renders_tools(llm, docs_5m, quantized_5m, tmp_path):
    messages = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    with pytest.raises(InputError, match="tools: the model's chat template does not render them"):
        llm.chat(messages, tools=tools)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(docs_5m / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ tools | tojson }}{{ messages[0].content }}")
    taught = LLM(quantized_5m, tokenizer=tmp_path, device="cpu", max_model_len=256)
    (output,) = taught.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False, tools=tools)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    given = {"tools": tools, "tokenize": True, "return_dict": False}
    assert output.prompt_token_ids == theirs.apply_chat_template(messages, **given)
    assert "weather" in output.prompt


def test_too_long_prompt_is_refused_without_state(llm):
    params = SamplingParams(max_tokens=4)
    with pytest.raises(InputError, match="expected a prompt of 1 to 2047 tokens, found 2048"):
        llm.generate(["fine", [5] * 2048], params, use_tqdm=False)
    assert not llm.engine.has_work()


def test_max_tokens_is_limited_by_the_model(llm):
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate([[5] * 2040], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8


def test_token_outside_the_vocabulary_is_refused(llm):
    with pytest.raises(InputError, match="8192 is not in 0..8191"):
        llm.generate([[1, 8192]], use_tqdm=False)


def test_stop_token_outside_the_vocabulary_is_refused(llm):
    params = SamplingParams(stop_token_ids=[8192], min_tokens=2)
    with pytest.raises(InputError, match="stop_token_ids: token id 8192 is not in 0..8191"):
        llm.generate("The", params, use_tqdm=False)
    assert not llm.engine.has_work()


def test_end_tokens_outside_vocabulary_are_ignored(docs_5m, tmp_path):
    shutil.copytree(docs_5m, tmp_path / "model")
    path = tmp_path / "model" / "generation_config.json"
    path.write_text('{"eos_token_id": [2, -1, 8192]}')
    llm = LLM(tmp_path / "model", device="cpu")
    assert llm.engine.model_config.eos_token_ids == {2}
    # until min_tokens the sampler forbids each of them
    params = SamplingParams(min_tokens=3, max_tokens=3)
    assert len(llm.generate("The", params, use_tqdm=False)[0].outputs[0].token_ids) == 3
    path.write_text('{"eos_token_id": ["2"]}')
    with pytest.raises(InputError, match="eos_token_id: expected token ids"):
        LLM(tmp_path / "model", device="cpu")


def test_models_own_parameters_are_the_default(llm, monkeypatch, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 3}')
    monkeypatch.setattr(llm.engine, "config", replace(llm.engine.config, model=str(tmp_path)))
    seen = []
    add = llm.llm_engine.add_request
    monkeypatch.setattr(
        llm.llm_engine, "add_request", lambda *a, **k: seen.append(a[2]) or add(*a, **k)
    )
    llm.generate("The", use_tqdm=False)
    llm.generate("The", SamplingParams(), use_tqdm=False)
    assert seen == [SamplingParams(temperature=0.5, top_k=3), SamplingParams()]


def test_request_larger_than_kv_cache_is_truncated_or_refused(quantized_5m):
    """As if the pool's 64 tokens were the model's context."""
    llm = LLM(quantized_5m, device="cpu", num_gpu_blocks_override=4, admission="fits")
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    (output,) = llm.generate([[5] * 50], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 14
    with pytest.raises(InputError, match="expected a prompt of 1 to 63 tokens, found 64"):
        llm.generate([[5] * 64], params, use_tqdm=False)


def test_empty_model_name_is_refused():
    """An unset variable of a script."""
    with pytest.raises(InputError, match="MODEL: is empty"):
        LLM("")


def test_unknown_setting_is_named(quantized_5m):
    with pytest.raises(InputError, match="tensor_paralel_size: is not a setting"):
        LLM(quantized_5m, tensor_paralel_size=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2.0),
        ("n", 0),
        ("max_tokens", 0),
        ("min_tokens", 99),
        ("seed", 2**63),
        ("stop", ["a", ""]),
        ("stop", [str(i) for i in range(4097)]),
        ("temperature", 2e6),
        ("logprobs", 21),
        ("logprobs", -1),
        ("stop_token_ids", [-1]),
    ],
)
def test_parameter_out_of_range_is_named(name, value):
    with pytest.raises(ParameterError) as error:
        SamplingParams(**{name: value})
    assert error.value.subject == name
