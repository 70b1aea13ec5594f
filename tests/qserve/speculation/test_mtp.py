"""The layer for drafts of a GLM-4.5 against transformers' own layer; its folder; its texts."""

import json

import pytest
import torch
from safetensors.torch import load_file

from formats.errors import CheckpointError, InputError
from qserve.parallel.ranks import Ranks
from qserve.speculation.heads import mtp
from tests.qserve.model.variants import edited
from tests.qserve.parallel.in_threads import run_ranks
from tests.qserve.speculation.head_steps import Text, context_of, load_target
from tests.qserve.speculation.mtp_model import PREFIX, make_mtp
from tests.qserve.speculation.test_eagle3_head import norm
from tests.qserve.speculation.traces import make_engine, make_requests, run

S, K = 11, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_mtp(tmp_path_factory.mktemp("mtp") / "random")


@pytest.fixture(scope="module")
def target(folder):
    return load_target(folder)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def judge(folder):
    return judge_of(folder)


def judge_of(folder):
    """transformers' model with the layer for drafts as one more of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, attn_implementation="eager")
    config.num_hidden_layers += 1
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    return model.eval()


@torch.inference_mode()
def reference(folder, judge, ids, num_rows=S, **wrong):
    """Logits of K greedy drafts after rows 0 .. num_rows; each pass computes all rows again."""
    t = {k.removeprefix(PREFIX): v for k, v in load_file(folder / "model.safetensors").items()}
    model, layer = judge.model, judge.model.layers[3]
    states = []
    hook = model.layers[3].register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    model(ids[None, :num_rows])
    hook.remove()
    state = states[0][0] if wrong.get("raw_state") else model.norm(states[0][0])
    table = model.embed_tokens.weight if wrong.get("models_table") else t["embed_tokens.weight"]
    names = ["enorm.weight", "hnorm.weight"][:: -1 if wrong.get("norms_swapped") else 1]
    tokens, rows, found = ids[1 : num_rows + 1], None, []
    for index in range(K):
        parts = [norm(table[tokens], t[names[0]]), norm(state, t[names[1]])]
        x = torch.cat(parts[::-1] if wrong.get("state_first") else parts, -1)
        x = x @ t["eh_proj.weight"].T
        rows = x if rows is None else torch.cat([rows, x])
        positions = torch.arange(len(rows))
        if wrong.get("stays_in_place") and index:
            positions[num_rows:] = num_rows - 1
        mask = torch.full((len(rows), len(rows)), -torch.inf).triu(1)[None, None]
        turns = model.rotary_emb(rows[None], positions[None])
        out = layer(rows[None], attention_mask=mask, position_embeddings=turns)
        out = out[0] if out.ndim == 3 else out
        read = norm(
            out, model.norm.weight if wrong.get("models_norm") else t["shared_head.norm.weight"]
        )
        head = judge.lm_head.weight if wrong.get("models_head") else t["shared_head.head.weight"]
        logits = read[-1] @ head.T
        found.append(logits)
        state = (out if wrong.get("raw_recurs") else read)[-1:]
        tokens = logits.argmax(-1, keepdim=True)
    return torch.stack(found)


def drafts_of(target, folder, ids, **more):
    context = context_of(folder, target, method="mtp", **more)
    text = Text(target, mtp.build(context))
    text.step(ids, 0, 5, num_drafts=K)
    # what an earlier verify left in the pages, which the next step writes again
    wrong = ids.clone()
    wrong[7:] = 3
    text.step(wrong, 5, 4, num_drafts=K, last=1)
    _, logits = text.step(ids, 5, S - 5, num_drafts=K, last=S - 6)
    return torch.cat(logits)


def test_mtp_layer_follows_equations(target, folder, judge, ids):
    expected = reference(folder, judge, ids)
    found = drafts_of(target, folder, ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_mtp_layer_follows_equations_with_mla(ids, tmp_path):
    folder = make_mtp(tmp_path / "model", family="deepseek_v3", rms_norm_eps=1e-5)
    expected = reference(folder, judge_of(folder), ids)
    found = drafts_of(load_target(folder), folder, ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "reading",
    [
        *("raw_state", "raw_recurs", "state_first", "norms_swapped", "stays_in_place"),
        *("models_table", "models_norm", "models_head"),
    ],
)
def test_wrong_equations_fail_comparison(reading, target, folder, judge, ids):
    wrong = reference(folder, judge, ids, **{reading: True})
    assert (drafts_of(target, folder, ids) - wrong).abs().max() > 0.05


def test_mtp_layer_uses_model_embedding_and_head(target, folder, judge, ids, tmp_path):
    """Where the layer has none of its own, or copies, which then take no memory."""

    def drop(state):
        for name in ("embed_tokens.weight", "shared_head.head.weight"):
            del state[PREFIX + name]

    def copy(state):
        state[f"{PREFIX}embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
        state[f"{PREFIX}shared_head.head.weight"] = state["lm_head.weight"].clone()

    expected = reference(folder, judge, ids, models_table=True, models_head=True)
    for name, change in (("without", drop), ("copies", copy)):
        changed = edited(folder, tmp_path / name, change)
        torch.testing.assert_close(drafts_of(target, changed, ids), expected, rtol=1e-4, atol=1e-4)
        head = mtp.build(context_of(changed, target, method="mtp")).head
        assert head.embedding is target.embedding and head.head is target.head


def test_mtp_layer_is_sharded_over_ranks(folder, ids):
    """Each has its heads and its part of the experts; their drafts are those of one."""
    want = drafts_of(load_target(folder), folder, ids)

    def of_rank(communicator):
        ranks = Ranks(communicator=communicator)
        target = load_target(folder, ranks)
        head = mtp.build(context_of(folder, target, method="mtp", ranks=ranks)).head
        assert head.attentions[0].num_kv_heads == 1
        assert len(head.embedding.weight) == 256
        return drafts_of(target, folder, ids, ranks=ranks)

    found = run_ranks(2, of_rank)
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], want, rtol=1e-4, atol=1e-4)


def test_first_of_several_mtp_layers_drafts(target, folder, ids, tmp_path):
    more = {f"{PREFIX.replace('3', '4')}enorm.weight": torch.zeros(64)}
    two = edited(
        *(folder, tmp_path / "two"),
        lambda state: state.update(more),
        lambda config: config.update(num_nextn_predict_layers=2),
    )
    assert torch.equal(drafts_of(target, two, ids), drafts_of(target, folder, ids))


def without_layer(state):
    for name in [name for name in state if name.startswith(PREFIX)]:
        del state[name]


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (
            without_layer,
            None,
            r"layers\.3\.\*.*omitted its tensors.*set model to a folder that has them",
        ),
        (None, {"num_nextn_predict_layers": 0}, "has no num_nextn_predict_layers"),
        (
            lambda state: state.pop(f"{PREFIX}eh_proj.weight"),
            None,
            r"layers\.3\.eh_proj\.weight.*missing",
        ),
        (
            lambda state: state.update({f"{PREFIX}other.weight": torch.ones(2)}),
            None,
            r"1 tensor that no layer of the model uses.*layers\.3\.other",
        ),
        (None, {"num_hidden_layers": 2}, "num_hidden_layers: expected 3 to match"),
    ],
)
def test_invalid_mtp_layer_is_refused(tensors, config, message, target, folder, tmp_path):
    changed = edited(folder, tmp_path / "x", tensors, lambda c: c.update(config or {}))
    with pytest.raises((CheckpointError, InputError), match=message):
        mtp.build(context_of(changed, target, method="mtp"))


def test_family_without_mtp_layers_is_refused(tiny_model):
    llama = tiny_model("llama")
    with pytest.raises(InputError, match="has no MTP layer.*LlamaForCausalLM"):
        mtp.build(context_of(llama, load_target(llama), method="mtp"))


@pytest.fixture(scope="module")
def often_right(tmp_path_factory, docs_5m):
    folder = tmp_path_factory.mktemp("mtp") / "often_right"
    return make_mtp(folder, docs_5m, agreement=0.7, vocab_size=8192)


def compare(folder, requests, seed, steps_in_flight, count, model=None, aborted=(), **settings):
    """Returns the verifies, the drafts, and the accepted drafts at each position."""
    numeric = {name: settings[name] for name in ("kv_cache_dtype",) if name in settings}
    want = run(make_engine(folder, **numeric), requests, seed)
    config = json.dumps({"method": "mtp", "num_speculative_tokens": count, "model": model})
    engine = make_engine(folder, steps_in_flight, speculative_config=config, **settings)
    found = run(engine, requests, seed + 1, aborted)
    for name in aborted:
        tokens = found.pop(name)[0]
        assert tokens == want.pop(name)[0][: len(tokens)]
    assert found == want
    return engine.scheduler.speculation.take_counts()


@pytest.mark.exhaustive
def test_all_kinds_of_requests(often_right):
    verifies, drafts, *accepted = compare(often_right, make_requests(5, 14), 5, 1, 3)
    assert verifies > 5 and drafts >= verifies
    assert 0 < accepted[1] < accepted[0] < verifies


FEW_PAGES = {"num_gpu_blocks_override": 34, "admission": "fits"}
SETTINGS = (
    FEW_PAGES,
    {"kv_cache_dtype": "int8"},
    {"enable_prefix_caching": False, "max_num_batched_tokens": 11},
    {"kv_offload_gb": 0.001, **FEW_PAGES},
    {"scheduling_policy": "prefill-first", **FEW_PAGES},
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps_in_flight", [0, 1])
@pytest.mark.parametrize("index", range(len(SETTINGS)))
def test_random_traces(index, steps_in_flight, often_right):
    requests = make_requests(index, 13)
    aborted = [name for name, _, _ in requests[index::7]]
    count = 1 + (index + steps_in_flight) % 3
    settings = SETTINGS[index]
    compare(often_right, requests, index, steps_in_flight, count, aborted=aborted, **settings)
