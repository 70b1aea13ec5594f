"""Models through transformers over two ranks: plain layers are divided, others refused by name."""

import copy
import json
from dataclasses import replace

import pytest
import torch
import transformers

from formats.errors import InputError
from qserve.model.fallback.attention import Call
from qserve.model.fallback.division import check_division, cut_, divide, first_layer_states
from qserve.model.fallback.loading import _divided
from qserve.model.model_config import ModelConfig
from qserve.model.tp_plan import LinearShard
from tests.qserve.parallel.engines import SMALL, make_prompts, start, tokens
from tests.qserve.parallel.in_threads import run_ranks

# three KV heads and five groups of features: shares differ
SIZES = {
    "vocab_size": 256,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
# what is of its own in each: biases of all linears, sinks, two linears in a feed-forward, norms of
# heads, windows
RUN = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "granite_swa": {
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "layer_rope_theta": [0, 10000.0],
    },
    "phi": {},
    "starcoder2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "smollm3": {},
}
REFUSED = {
    "olmo2": r"layers\.0\.self_attn\.q_norm\.weight",
    "bitnet": r"layers\.0\.self_attn\.attn_sub_norm\.weight",
    "persimmon": r"layers\.0\.self_attn\.query_key_value\.weight",
    "mixtral": r"layers\.0\.mlp\.gate\.weight",
    "cohere2_moe": r"layers\.0\.mlp\.gate\.weight",
    "gpt2": r"h\.0\.attn\.c_attn\.weight",
}
ids_T, positions_T = torch.arange(3, 27), torch.arange(24)


def config_of(kind):
    return transformers.AutoConfig.for_model(kind, **SIZES, **RUN.get(kind, {}))


def made(kind):
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "bias" in name or "sinks" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model.train(False)


def of_rank(model, communicator):
    return divide(model, "X", communicator.rank, communicator.size, lambda name: None)


@pytest.mark.parametrize("kind", RUN)
def test_first_layer_over_ranks_equals_whole(kind):
    models = [made(kind) for _ in range(2)]
    whole = divide(models[0], "X", 0, 1, lambda name: None)
    want = first_layer_states(copy.deepcopy(models[0]), whole, ids_T, positions_T)

    def work(communicator):
        model = models[communicator.rank]
        division = of_rank(model, communicator)
        cut_(model, division, communicator)
        return first_layer_states(model, division, ids_T, positions_T)

    for found in run_ranks(2, work):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    weights = [sum(each.numel() for each in model.parameters()) for model in models]
    assert sum(weights) < 1.7 * sum(each.numel() for each in made(kind).parameters())


def test_wrong_sharding_is_detected(tmp_path):
    """One that gives each rank the other's values: what follows compares one layer."""
    folder = tmp_path / "model"
    made("llama").save_pretrained(folder)
    config = ModelConfig.from_folder(folder, implementation="transformers")
    models = [made("llama") for _ in range(2)]

    def work(communicator):
        division = of_rank(models[communicator.rank], communicator)
        other = divide(models[communicator.rank], "X", 0, 3, lambda name: None)
        name = "model.layers.0.self_attn.v_proj"
        rows = other.cuts[name].rows[0]
        ((first, last),) = division.cuts[name].rows
        moved = (
            LinearShard(rows=((48 - (last - first), 48),))
            if first == 0
            else LinearShard(rows=(rows,))
        )
        division = replace(division, cuts={**division.cuts, name: moved})
        given = config, models[communicator.rank], division, communicator, None, Call("X")
        with pytest.raises(InputError, match="divided layers' states differ"):
            _divided(*given, torch.device("cpu"))

    run_ranks(2, work)


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_layers_are_refused_by_name(kind):
    raw = json.loads(config_of(kind).to_json_string())
    cls = type(transformers.AutoModelForCausalLM.from_config(config_of(kind)))
    with pytest.raises(InputError, match=f"tensor-parallel-size: .*found .*{REFUSED[kind]}"):
        check_division({**raw, "architectures": [cls.__name__]}, cls.__name__, 2)


@pytest.fixture
def many():
    started = []

    def make(*args, **settings):
        started.append(start(*args, model_impl="transformers", **SMALL, **settings))
        return started[-1]

    yield make
    for llm in started:
        llm.close()


def check_tokens(folder, many):
    prompts = make_prompts(6, vocab_size=250)
    want = tokens(many(folder), prompts)
    assert len({token for each in want for token in each}) > 2, "or it tests less than it says"
    assert tokens(many(folder, 2), prompts) == want


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", RUN)
def test_two_ranks_equal_one(kind, many, tmp_path):
    made(kind).save_pretrained(tmp_path / "model")
    check_tokens(tmp_path / "model", many)


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["w4a16-sym-g32", "w8a16-sym-channel"])
def test_quantized_model_tokens_over_ranks(scheme, written, many):
    """Codes, scales and biases are divided; the first layer is read whole for the comparison."""
    check_tokens(written(scheme, "gptq", "llama"), many)
