"""Draft heads of vision-language models: the tokens equal those without drafts, for any drafts.

A head is judged by a plain torch module (calibrate/heads), which sees a whole text with the images'
embeddings in place and with transformers' positions.
"""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from calibrate.heads.rebuild import HeadModule
from calibrate.heads.target import Target
from calibrate.pipeline import quantize_checkpoint
from formats.errors import InputError
from formats.heads.folder import HeadFolder
from formats.scheme import Scheme
from qserve.engine.distributed import executors
from qserve.engine.runner import microbatches
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams
from tests.qserve.model.variants import edited
from tests.qserve.multimodal.conftest import NUM_TOKENS
from tests.qserve.parallel.rank_of_small_parts import MIN_TOKENS
from tests.qserve.speculation.conftest import replayed
from tests.qserve.speculation.head_steps import write_head
from tests.tiny_vision import VISION_FAMILIES, film, picture

__all__ = ["replayed"]
# positions of three axes and deepstack; a mask in both directions
DEFAULT = ("qwen3_vl", "gemma3")
# Heads are not trained for PaliGemma, nor for models that transformers loads as text models.
UNJUDGED = ("paligemma", "paligemma2", "phi4_multimodal")
HEADED = [name for name in VISION_FAMILIES if name not in UNJUDGED]
FAMILIES = [
    pytest.param(name, marks=() if name in DEFAULT else pytest.mark.exhaustive) for name in HEADED
]
SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, seed=5, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)


def head_config(model, kind="eagle3", **changes):
    text = model.model.config.get_text_config()
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": text.vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    if kind == "eagle3":
        config |= {"draft_vocab_size": text.vocab_size, "eagle_aux_hidden_state_layer_ids": [0, 1]}
    else:
        config["architectures"] = ["LlamaForCausalLMEagle"]
    rope = getattr(text, "rope_parameters", None) or {}
    if len(rope.get("mrope_section", ())) == 3:  # Hunyuan's heads have one axis
        axes = {name: rope[name] for name in rope if name.startswith("mrope_")}
        config["rope_scaling"] = {"type": "mrope", "rope_type": "default", **axes}
        config["head_dim"] = 2 * sum(rope["mrope_section"])  # all of a head rotates
    return {**config, **changes}


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """(model, kind, changes of its config.json) -> folder of a random head."""
    made = {}

    def make(model, kind="eagle3", **changes):
        key = model.folder.name, kind, json.dumps(changes)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("heads") / kind
            write_head(made[key], head_config(model, kind, **changes))
        return made[key]

    return make


def with_drafts(folder, count=3, **more):
    config = {"model": str(folder), "num_speculative_tokens": count, "adaptive": False, **more}
    return {"speculative_config": json.dumps(config)}


def requests_of(model):
    mark = model.mark
    return [
        ("what is a page table", ()),
        (f"look: {mark} what is it", (picture(40, 30, 1),)),
        (f"{mark} beside {mark} differs", (picture(64, 64, 2), picture(70, 9, 3))),
    ]


def run(model, engine, requests, params):
    found = {}
    for number, request in enumerate(requests):
        ids, media = model.prompt(*request)
        engine.add_request(
            str(number),
            ids,
            params[number % len(params)],
            options=RequestOptions(media=media),
        )
        found[str(number)] = []
    while engine.has_work():
        for event in engine.step():
            found[event.request_id] += event.token_ids
        engine.scheduler.check_integrity()
    return list(found.values())


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("eagle", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_without_drafts(vision, head, family, kind):
    model = vision(family)
    requests = [*requests_of(model), *requests_of(model)[:2]]
    want = run(model, model.engine(), requests, (GREEDY, SAMPLED))
    folder = head(model, kind)
    # The last request arrives while others decode.
    assert run(model, model.engine(1, **with_drafts(folder)), requests, (GREEDY, SAMPLED)) == want
    engine = model.engine(1, max_num_batched_tokens=7, **with_drafts(folder))
    assert engine.runner.drafts_read_images
    for _ in range(2):  # again, with pages of the prefix cache
        assert run(model, engine, requests, (GREEDY, SAMPLED)) == want


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "llava"])
def test_tokens_of_stages_are_those_without_drafts(vision, head, family, monkeypatch):
    """The first stage drafts; positions of three axes follow the drafts on each stage."""
    monkeypatch.setattr(microbatches, "MIN_TOKENS", MIN_TOKENS)
    monkeypatch.setattr(executors, "MODULE", "tests.qserve.parallel.rank_of_small_parts")
    model = vision(family)
    requests = [*requests_of(model), *requests_of(model)[:2]]
    want = run(model, model.engine(), requests, (GREEDY, SAMPLED))
    drafts = with_drafts(head(model))
    engine = model.engine(1, pipeline_parallel_size=2, max_num_batched_tokens=23, **drafts)
    try:
        for _ in range(2):  # again, with pages of the prefix cache
            assert run(model, engine, requests, (GREEDY, SAMPLED)) == want
    finally:
        engine.close()


class Judge:
    """A head in plain torch: its logits for the tokens that follow a text with images."""

    def __init__(self, model, folder, reads_images):
        opened = HeadFolder(folder)
        aux_layers = opened.config.aux_layers(
            model.model.config.get_text_config().num_hidden_layers
        )
        self.model, self.target = model, Target(model.folder, device="cpu", aux_layers=aux_layers)
        self.head = HeadModule(opened, self.target).module
        self.head.config = replace(opened.config, image_embeddings=reads_images)

    @torch.no_grad()
    def logits(self, request, more, drafts):
        """Logits [K, V] after a prompt and `more` tokens, where `drafts` follow."""
        ids, media = self.model.prompt(*request)
        given = self.model.inputs(ids, *request[1:])
        # numbers of tiles, which transformers takes as a list, too
        given = {name: torch.as_tensor(value) for name, value in given.items()}
        whole = torch.tensor([[*ids, *more, *drafts]])
        added = whole.shape[1] - len(ids)
        # Gemma 4 E2B's prompts have another token at images than transformers expects.
        stated = torch.cat([given["input_ids"], whole[:, len(ids) :]], 1)
        inputs = {**given, "input_ids": stated, "attention_mask": torch.ones_like(whole)}
        for name in ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids"):
            if name in inputs:
                inputs[name] = torch.nn.functional.pad(inputs[name], (0, added))
        is_image_S = torch.zeros(whole.shape[1], dtype=torch.bool)
        for item in media:
            is_image_S[torch.from_numpy(item.embed_positions())] = True
        seen = self.target.see_images([(inputs, is_image_S)])
        row = len(ids) + len(more) - 2
        steps = self.head.steps(whole, seen.aux_BSF, len(drafts), seen.images)
        return torch.stack([logits[0, row] for logits in steps])


def recorded(engine):
    """(rows before the drafts, drafts, their logits) of each step that drafts for one request."""
    drafter, found, logits = engine.runner.speculator.drafter, [], []
    propose, compute = drafter.propose, drafter.head.logits

    def watched(step):
        logits.clear()
        drafts_DK = propose(step)
        if len(drafts_DK):
            first = step.batch.positions_T[step.last_rows_D[0]]
            found.append((int(first), drafts_DK[0].tolist(), torch.cat(logits)))
        return drafts_DK

    drafter.propose = watched
    drafter.head.logits = lambda read: logits.append(compute(read)) or logits[-1]
    return found


@pytest.mark.parametrize("reads_images", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_a_plain_module(vision, head, family, reads_images):
    """Also where chunks cut images, and after a prefix that ends within one."""
    model = vision(family)
    folder = head(model)
    judge = Judge(model, folder, reads_images)
    request = requests_of(model)[2]
    ids, _ = model.prompt(*request)
    # two tiles of InternVL with no text between them have 8 embeddings
    for settings in ({}, {"max_num_batched_tokens": 9 if family == "internvl" else 5}):
        drafts = with_drafts(folder, image_embeddings=reads_images)
        engine = model.engine(0, **settings, **drafts)
        assert engine.runner.drafts_read_images == reads_images
        found = recorded(engine)
        for _ in range(2):
            found.clear()
            (tokens,) = run(model, engine, [request], (GREEDY,))
            assert len(found) > 3
            for row, drafted, logits_KV in found:
                more = tokens[: row + 2 - len(ids)]
                want_KV = judge.logits(request, more, drafted)
                torch.testing.assert_close(logits_KV, want_KV, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "family", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.exhaustive)]
)
def test_verifies_after_an_image_run_in_graphs(vision, head, replayed, family):
    """Three axes are equal there, though not the index; without CUDA a graph runs eagerly."""
    model = vision(family)
    requests = requests_of(model)
    want = run(model, model.engine(), requests, (GREEDY, SAMPLED))
    engine = model.engine(1, max_num_batched_tokens=32, **with_drafts(head(model)))
    engine.runner.capture_graphs(4, engine.max_model_len)
    assert run(model, engine, requests, (GREEDY, SAMPLED)) == want
    assert sum(key.count == 4 for key, _ in replayed) > 2
    found, (ids, _) = recorded(engine), model.prompt(*requests[1])
    judge, shifts = Judge(model, head(model), True), []
    with pytest.MonkeyPatch.context() as patch:
        pad = engine.runner.graphs.fill_

        def filled(key, step):
            shifts.append(step.rope_shifts_T)
            return pad(key, step)

        patch.setattr(engine.runner.graphs, "fill_", filled)
        (tokens,) = run(model, engine, requests[1:2], (GREEDY,))
    if family == "qwen3_vl":
        assert all((each < 0).all() for each in shifts) and len(shifts) > 2
    for row, drafted, logits_KV in found:
        more = tokens[: row + 2 - len(ids)]
        want_KV = judge.logits(requests[1], more, drafted)
        torch.testing.assert_close(logits_KV, want_KV, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_after_preemptions(vision, head, family, caplog):
    """And of a prompt that ends with an image: the next position is another one."""
    if family == "gemma4_shared":
        pytest.skip("long prompts wait until others end: test_image_tokens.py preempts them")
    model = vision(family)
    end = f"one more {model.mark}", (picture(40, 60, 4),)
    requests = [*requests_of(model), end]
    longer = [replace(each, max_tokens=24) for each in (GREEDY, SAMPLED)]
    want = run(model, model.engine(), requests, longer)
    # the prompts of Gemma 4 take several steps, in which the first outputs grow
    first = requests[:3] if family in ("gemma4", "gemma4_unified") else requests
    pages = sum(-(-len(model.prompt(*each)[0]) // 4) for each in first)
    engine = model.engine(
        1,
        num_gpu_blocks_override=pages + 1,
        max_num_batched_tokens=64,
        admission="fits",
        **with_drafts(head(model)),
    )
    assert run(model, engine, requests, longer) == want
    assert "Preempted" in caplog.text


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name == "qwen3_vl" else pytest.mark.exhaustive)
        for name in HEADED
    ],
)
def test_a_quantized_model(vision, head, family, tmp_path):
    model = vision(family)
    scheme = Scheme.parse("w4a16-sym-g32")
    quantize_checkpoint(model.folder, tmp_path / "w4a16", scheme=scheme, progress=False)
    requests, found = requests_of(model), []
    for drafts in ({}, with_drafts(head(model))):
        engine = model.engine(1, model=str(tmp_path / "w4a16"), max_num_batched_tokens=9, **drafts)
        found.append(run(model, engine, requests, (GREEDY, SAMPLED)))
    assert found[0] == found[1]
    assert found[0] != run(model, model.engine(), requests, (GREEDY, SAMPLED))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_drafts_after_a_video(vision, head, family):
    """Its frames are items of their own, or one item with distances between frames."""
    model = vision(family)
    request = (
        "<|vision_start|><|video_pad|><|vision_end|> what",
        (),
        ((film(5, 64, 40), {"fps": 2.0}),),
    )
    want = run(model, model.engine(), [request], (GREEDY,))
    engine = model.engine(0, max_num_batched_tokens=6, **with_drafts(head(model)))
    found, judge = recorded(engine), Judge(model, head(model), True)
    assert run(model, engine, [request], (GREEDY,)) == want
    ids, _ = model.prompt(*request)
    assert len(found) > 3
    for row, drafted, logits_KV in found:
        want_KV = judge.logits(request, want[0][: row + 2 - len(ids)], drafted)
        torch.testing.assert_close(logits_KV, want_KV, atol=1e-4, rtol=1e-4)


def test_a_head_of_another_width_reads_placeholders(vision, tmp_path):
    model = vision("qwen3_vl")
    narrow = head_config(model, hidden_size=32, target_hidden_size=64, head_dim=16)
    write_head(tmp_path, narrow, extra=("embed_tokens.weight",))
    requests = requests_of(model)
    engine = model.engine(1, **with_drafts(tmp_path))
    assert not engine.runner.drafts_read_images
    found = run(model, engine, requests, (GREEDY, SAMPLED))
    assert found == run(model, model.engine(), requests, (GREEDY, SAMPLED))
    with pytest.raises(
        InputError, match="embeddings have size 32, embeddings of images have size 64"
    ):
        model.engine(1, **with_drafts(tmp_path, image_embeddings=True))


def test_axes_that_do_not_fit_the_head_are_refused(vision, tmp_path):
    model = vision("qwen3_vl")
    write_head(tmp_path, head_config(model, rope_scaling={"mrope_section": [4, 4, 4]}))
    with pytest.raises(InputError, match="mrope_section: expected three numbers that add up to 8"):
        model.engine(1, **with_drafts(tmp_path))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_an_mtp_layer_drafts_after_images(vision, tmp_path, family):
    """A copy of the model's layer with attention, below `mtp.` as in published files."""
    model, layer = vision(family), "model.language_model.layers.1."

    def add(state):
        width = state["model.language_model.embed_tokens.weight"].shape[1]
        names = [name for name in state if name.startswith(layer)]
        state |= {name.replace(layer, "mtp.layers.0."): state[name].clone() for name in names}
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            state[f"mtp.{norm}.weight"] = torch.zeros(width)
        state["mtp.fc.weight"] = torch.eye(width, 2 * width)

    folder = edited(model.folder, tmp_path / "model", add)
    for file in model.folder.iterdir():  # the tokenizer, the image processor
        if not (folder / file.name).exists():
            shutil.copy(file, folder)
    requests = requests_of(model)
    want = run(model, model.engine(), requests, (GREEDY, SAMPLED))
    config = json.dumps({"method": "mtp", "num_speculative_tokens": 2, "adaptive": False})
    engine = model.engine(1, model=str(folder), speculative_config=config)
    assert run(model, engine, requests, (GREEDY, SAMPLED)) == want


@pytest.mark.parametrize("family", ["paligemma", "paligemma2"])
def test_heads_are_not_trained_where_prompts_see_themselves(family, vision):
    with pytest.raises(InputError, match="whole prompt in both directions.*ngram"):
        Target(vision(family).folder, device="cpu")
