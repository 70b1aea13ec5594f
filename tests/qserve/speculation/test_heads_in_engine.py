"""With a draft head requests give the same tokens as without, on the pages of one engine."""

import json

import pytest
import torch

from formats.heads.config import MedusaConfig
from formats.heads.save import save_medusa
from qserve.speculation.config import guess_method
from tests.qserve.speculation.docs_heads import CONFIGS, write_docs_head
from tests.qserve.speculation.head_steps import write_head
from tests.qserve.speculation.traces import make_engine, make_requests, run

EAGLE = {
    "architectures": ["LlamaForCausalLMEagle"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 8192,
    "rope_theta": 10000.0,
}
FEW_PAGES = {"num_gpu_blocks_override": 34, "admission": "fits"}


@pytest.fixture(scope="module")
def heads(docs_5m, tmp_path_factory):
    """Kind -> folder. All but EAGLE-3's are random; their KV heads are not the model's."""
    folder = tmp_path_factory.mktemp("heads")
    write_head(folder / "eagle", EAGLE)
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for head in range(3):
        tensors[f"{head}.0.linear.weight"] = torch.randn(256, 256, generator=generator) / 16
        tensors[f"{head}.0.linear.bias"] = torch.zeros(256)
        tensors[f"{head}.1.weight"] = torch.randn(8192, 256, generator=generator)
    save_medusa(folder / "medusa", MedusaConfig(num_heads=3, num_layers=1), tensors, "docs-5m")
    return {
        "eagle3": docs_5m.parent / "docs-5m-eagle3",
        "eagle": folder / "eagle",
        "medusa": folder / "medusa",
        **{kind: write_docs_head(folder / kind, kind) for kind in CONFIGS},
    }


def compare(docs_5m, head, requests, seed, steps_in_flight, count=3, **settings):
    """Returns the verifies, the drafts, and the accepted drafts at each position."""
    numeric = {name: settings[name] for name in ("kv_cache_dtype",) if name in settings}
    want = run(make_engine(docs_5m, **numeric), requests, seed)
    config = json.dumps({"model": str(head), "num_speculative_tokens": count})
    engine = make_engine(docs_5m, steps_in_flight, speculative_config=config, **settings)
    assert run(engine, requests, seed + 1) == want
    return engine.scheduler.speculation.take_counts()


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["eagle3", "medusa", "eagle", *CONFIGS])
def test_all_kinds_of_requests(kind, docs_5m, heads):
    assert guess_method(str(heads[kind])) == kind
    verifies, drafts, *accepted = compare(docs_5m, heads[kind], make_requests(5, 4), 5, 1)
    assert verifies > 5 and drafts >= verifies
    if kind == "eagle3":  # one that was trained for the model
        assert accepted[0] > 0.2 * verifies


# Each setting meets each kind once, with a number of drafts that the others do not have there.
TRACES = [
    (kind, settings, 1 + (i + j) % 3, (i + j) % 2)
    for i, kind in enumerate(("eagle3", "eagle", "medusa", *CONFIGS))
    for j, settings in enumerate(
        (
            FEW_PAGES,
            {"kv_cache_dtype": "int8"},
            {"enable_prefix_caching": False, "max_num_batched_tokens": 11},
            {"kv_offload_gb": 0.001, **FEW_PAGES},
        )
    )
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "settings", "count", "steps_in_flight"), TRACES)
def test_random_traces(kind, settings, count, steps_in_flight, docs_5m, heads):
    requests = make_requests(count, 12)
    compare(docs_5m, heads[kind], requests, count, steps_in_flight, count, **settings)
