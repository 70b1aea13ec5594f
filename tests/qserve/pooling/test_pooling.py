"""Pooled hidden states equal those of transformers, with any chunks, cache or other requests."""

import json
import shutil
from contextlib import closing

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from qserve import LLM, PoolingParams, SamplingParams
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.engine.scheduling.plan import OpenStep
from qserve.params.request_options import RequestOptions
from qserve.pooling import scoring
from tests.formats.inspection.findings import of_weights
from tests.tiny_families import TINY, TINY_FAMILIES

# lengths around chunks of 32 tokens and pages of 16
PROMPTS = [[(7 * i + 3 * j) % 500 for j in range(n)] for i, n in enumerate((40, 3, 1, 77, 64, 33))]
REFERENCE = {
    "last": lambda hidden: hidden[-1],
    "cls": lambda hidden: hidden[0],
    "mean": lambda hidden: hidden.mean(0),
    "all": lambda hidden: hidden,
}


def load(folder, **settings):
    given = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 32, "max_num_seqs": 4}
    return LLM(folder, **{**given, **settings})


def hidden_states(folder):
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(torch.tensor([ids])).last_hidden_state[0] for ids in PROMPTS]


def states(llm, kind, prompts=PROMPTS):
    params = PoolingParams(kind=kind, normalize=False)
    return llm.encode(prompts, params, use_tqdm=False)


def check(found, hidden, kind):
    check_data([each.outputs.data for each in found], hidden, kind)


def check_data(found, hidden, kind):
    for each, reference in zip(found, hidden, strict=True):
        torch.testing.assert_close(each, REFERENCE[kind](reference), atol=2e-5, rtol=2e-5)


@pytest.fixture(scope="module")
def qwen(tiny_model):
    folder = tiny_model("qwen3")
    return load(folder), hidden_states(folder)


@pytest.mark.parametrize("kind", REFERENCE)
def test_batch_invariant_embeddings_are_equal_in_any_batch(tiny_model, kind):
    """Alone and whole; in chunks of other sizes, together, in another order."""
    folder = tiny_model("qwen3")
    with closing(load(folder, batch_invariant=True, max_num_batched_tokens=128)) as llm:
        alone = [states(llm, kind, [each])[0].outputs.data for each in PROMPTS]
    check_data(alone, hidden_states(folder), kind)
    with closing(load(folder, batch_invariant=True)) as llm:
        together = states(llm, kind, [*PROMPTS, *PROMPTS[::-1]])
    for found, want in zip(together, [*alone, *alone[::-1]], strict=True):
        assert torch.equal(found.outputs.data, want)


def bare(folder, target, **config):
    """The checkpoint as an embedding model's is published: without prefix and head."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    kept = {n.removeprefix("model."): t for n, t in tensors.items() if n != "lm_head.weight"}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return target


@pytest.mark.parametrize("kind", REFERENCE)
def test_embeddings_equal_with_chunks_cache_and_other_requests(qwen, kind):
    llm, hidden = qwen
    llm.reset_prefix_cache()
    for _ in range(2):
        found = states(llm, kind)
        check(found, hidden, kind)
        assert [each.prompt_token_ids for each in found] == PROMPTS
    # Only the last row can do without the others.
    assert (found[3].num_cached_tokens > 0) == (kind == "last")


@pytest.mark.parametrize("family", ["gemma3", "qwen2", "exaone4"])
def test_families_pool_final_norm_outputs(tiny_model, family):
    folder = tiny_model(family)
    llm, hidden = load(folder), hidden_states(folder)
    for kind in ("last", "mean"):
        check(states(llm, kind), hidden, kind)


@pytest.mark.parametrize("kind", ["last", "mean", "all"])
def test_preempted_pooling_request_counts_rows_once(qwen, tiny_model, kind):
    _, hidden = qwen
    engine = Engine(
        EngineConfig(
            model=str(tiny_model("qwen3")),
            device="cpu",
            dtype="float32",
            max_num_batched_tokens=16,
            max_num_seqs=3,
            num_gpu_blocks_override=8,
            admission="fits",
            enable_prefix_caching=False,
        ),
        steps_in_flight=1,
    )
    options = RequestOptions(pooling=PoolingParams(kind=kind, normalize=False))
    engine.add_request("long", PROMPTS[3], SamplingParams(), options=options)
    engine.step()
    engine.step()
    victim = engine._requests["long"]
    assert 16 < victim.num_computed < 77
    # what a lack of pages does to it
    engine.scheduler.running_set.preempt(victim, OpenStep(budget=0, max_admitted=0))
    greedy = SamplingParams(temperature=0, max_tokens=9, detokenize=False)
    engine.add_request("other", PROMPTS[1], greedy)
    engine.add_request("short", PROMPTS[0], greedy, options=options)
    pooled, tokens = {}, []
    while engine.has_work():
        for event in engine.step():
            tokens += event.token_ids if event.request_id == "other" else ()
            if event.request_id != "other":
                assert (event.token_ids, event.finish_reason) == ((), "stop")
                pooled[event.request_id] = np.frombuffer(event.pooled, "<f4")
    assert len(tokens) == 9 and victim.facts.num_preemptions == 1
    for name, index in (("long", 3), ("short", 0)):
        want = REFERENCE[kind](hidden[index]).reshape(-1)
        torch.testing.assert_close(torch.tensor(pooled[name]), want, atol=2e-5, rtol=2e-5)


def test_dimensions_are_cut_before_normalization(qwen):
    llm, hidden = qwen
    (found,) = llm.embed(PROMPTS[0], PoolingParams(dimensions=16), use_tqdm=False)
    vector = hidden[0][-1][:16]
    torch.testing.assert_close(
        torch.tensor(found.outputs.embedding), vector / vector.norm(), atol=1e-5, rtol=1e-5
    )
    with pytest.raises(InputError, match="expected 1 to 64, found 65"):
        llm.embed(PROMPTS[0], PoolingParams(dimensions=65), use_tqdm=False)


def test_tasks_of_encode(qwen):
    llm, hidden = qwen
    (tokens,) = llm.encode(PROMPTS[0], use_tqdm=False)
    assert tokens.outputs.data.shape == (40, 64)
    (vector,) = llm.encode(PROMPTS[0], use_tqdm=False, pooling_task="embed")
    torch.testing.assert_close(vector.outputs.data, tokens.outputs.data[-1])
    with pytest.raises(InputError, match="pooling_task"):
        llm.encode(PROMPTS[0], pooling_task="plugin")


def test_checkpoint_without_prefix_and_head_pools_and_generates_nothing(tiny_model, tmp_path):
    folder = tiny_model("llama")
    made = bare(folder, tmp_path / "bare", architectures=["LlamaModel"])
    assert not of_weights(inspect_checkpoint(made))
    llm, hidden = load(made), hidden_states(made)
    check(states(llm, "mean"), hidden, "mean")
    with pytest.raises(InputError, match="no output head"):
        llm.generate(PROMPTS[1], SamplingParams(detokenize=False), use_tqdm=False)
    with pytest.raises(InputError, match="no output head"):
        llm.encode(PROMPTS[1], PoolingParams(kind="tokens", token_ids=(3,)), use_tqdm=False)
    assert not llm.engine.has_work()


def test_tied_checkpoint_without_prefix_generates_too(qwen, tiny_model, tmp_path):
    made = bare(tiny_model("qwen3"), tmp_path / "bare")
    params = SamplingParams(temperature=0, max_tokens=6, detokenize=False)
    outputs = [
        llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].token_ids
        for llm in (load(made), qwen[0])
    ]
    assert outputs[0] == outputs[1]


def test_classifier_returns_label_probabilities(tmp_path):
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    torch.manual_seed(3)
    config = Qwen3Config(**{**TINY, **TINY_FAMILIES["qwen3"][1]}, num_labels=3, pad_token_id=0)
    model = Qwen3ForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        want = [model(torch.tensor([ids])).logits[0].softmax(-1) for ids in PROMPTS]
    llm = load(tmp_path)
    for each, probabilities in zip(llm.classify(PROMPTS, use_tqdm=False), want, strict=True):
        assert each.outputs.num_classes == 3
        torch.testing.assert_close(
            torch.tensor(each.outputs.probs), probabilities, atol=1e-5, rtol=1e-5
        )


def test_classification_of_language_model_is_refused(qwen):
    with pytest.raises(InputError, match=r"no score\.weight"):
        qwen[0].classify(PROMPTS, use_tqdm=False)
    assert not qwen[0].engine.has_work()


def reranker(docs_5m, target, words):
    shutil.copytree(docs_5m, target, dirs_exist_ok=True)
    path = target / "config.json"
    stated = {"classifier_from_token": words}
    path.write_text(json.dumps(json.loads(path.read_text()) | stated))
    return load(target)


def test_reranker_with_multi_token_answers_is_refused(docs_5m, tmp_path):
    llm = reranker(docs_5m, tmp_path, ["no", "yes"])
    with pytest.raises(InputError, match="texts of one token, found 'yes', which has 2"):
        llm.score("a", "b", use_tqdm=False)


def test_reranker_scores_yes_against_no(docs_5m, tmp_path):
    llm = reranker(docs_5m, tmp_path, ["no", "is"])
    tokenizer = llm.get_tokenizer()
    (no,), (yes,) = (tokenizer.encode(word, False) for word in ("no", "is"))
    query, documents = "What is a process?", ["A process is a program.", "<|im_end|>"]
    pairs = [(query, document) for document in documents]
    found = llm.score(query, documents, use_tqdm=False)
    for each, pair in zip(found, pairs, strict=True):
        prompt = scoring.pair_tokens(tokenizer, *pair, scoring.INSTRUCTION)
        assert each.prompt_token_ids == prompt
        assert prompt.count(2) == 2, "the frame's own two ends alone"
        logits = llm.logits(prompt)[-1, [no, yes]]
        assert each.outputs.score == pytest.approx(logits.softmax(-1)[1].item(), abs=1e-6)


def test_embeddings_are_scored_by_their_cosine(docs_5m):
    llm = load(docs_5m)
    texts = ["one text", "another text", "a third"]
    vectors = [each.outputs.embedding for each in llm.embed(texts, use_tqdm=False)]
    found = llm.score(texts[0], texts, use_tqdm=False)
    assert [each.outputs.score for each in found] == pytest.approx(
        [float(np.dot(vectors[0], vector)) for vector in vectors]
    )
    with pytest.raises(InputError, match="as many texts as in text_1, 2, found 3"):
        llm.score(texts[:2], texts, use_tqdm=False)
    for name, sides in (("text_2", ("a", [])), ("text_1", ([], ["a"]))):
        with pytest.raises(InputError, match=f"{name}: expected at least one text, found none"):
            llm.score(*sides, use_tqdm=False)
