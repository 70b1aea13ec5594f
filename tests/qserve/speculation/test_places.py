"""Every index that a step with drafts gives the device is within bounds.

A GPU checks none of them, and a CPU takes a negative one from the end. Requests end by stop tokens
while their next step is in flight, are aborted, are preempted and resumed, grow to the model's last
position, and change their number of drafts; graphs are captured in between.
"""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from qserve.engine.runner.model_runner import ModelRunner
from qserve.speculation import graphs
from qserve.speculation.depth import Choice, Depth
from qserve.speculation.heads.chain import ChainDrafter
from tests.qserve.speculation.traces import make_engine, make_requests, run

PAGE, MAX_LEN = 4, 56


class Watch:
    """Checks batches and drafts of one engine."""

    def __init__(self, runner):
        self.vocab_size = runner.decoder.config.vocab_size
        self.num_slots = runner.caches[0].k_pages.shape[0] * PAGE
        self.num_batches = self.num_drafts = 0

    def batch(self, batch):
        """Padding is looked at, too: kernels read it."""
        self.num_batches += 1
        self.rows(batch.token_ids_T, batch.positions_T, batch.slots_T)
        tables, starts = batch.block_tables_RX, batch.query_starts_R1.tolist()
        lengths = batch.context_lengths_R
        assert lengths.min() >= 0 and lengths.max() <= tables.shape[1] * PAGE
        assert lengths.max() <= batch.max_context_len
        for r, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
            assert 0 <= start <= end <= len(batch.token_ids_T)
            length = int(lengths[r])
            pages = tables[r, : -(-length // PAGE)]
            assert ((pages >= 0) & (pages * PAGE < self.num_slots)).all()
            self.slots(batch.positions_T[start:end], batch.slots_T[start:end], tables[r])
            if end > start and (batch.slots_T[start:end] >= 0).all():
                assert length == batch.positions_T[end - 1] + 1

    def rows(self, tokens, positions, slots):
        assert ((tokens >= 0) & (tokens < self.vocab_size)).all(), tokens
        assert ((positions >= 0) & (positions < MAX_LEN)).all(), positions
        assert ((slots >= -1) & (slots < self.num_slots)).all(), slots
        written = slots[slots >= 0]
        assert len(written.unique()) == len(written), slots

    def slots(self, positions, slots, table):
        """Where each row is written is its place in the request's pages."""
        places = table[positions // PAGE].long() * PAGE + positions % PAGE
        assert ((slots == -1) | (slots == places)).all(), (positions, slots, table)

    def draft(self, step):
        T, D = len(step.batch.token_ids_T), len(step.last_rows_D)
        tokens = step.next_tokens_T
        assert len(tokens) == T and ((tokens >= 0) & (tokens < self.vocab_size)).all()
        assert ((step.last_rows_D >= 0) & (step.last_rows_D < T)).all()
        assert len(step.tables_DX) == D and step.starts_D1.tolist() == list(range(D + 1))
        positions_KD, slots_KD, lengths_KD = step.draft_positions
        most = min(step.max_context_len, step.tables_DX.shape[1] * PAGE)
        for positions, slots, lengths in zip(positions_KD, slots_KD, lengths_KD, strict=True):
            if not D:
                continue
            self.num_drafts += int((slots >= 0).sum())
            self.rows(positions.new_zeros(D), positions, slots)
            for d in range(D):
                table, length = step.tables_DX[d], int(lengths[d])
                self.slots(positions[d : d + 1], slots[d : d + 1], table)
                assert 0 <= length <= most
                assert slots[d] < 0 or length == positions[d] + 1
                pages = table[: -(-length // PAGE)]
                assert ((pages >= 0) & (pages * PAGE < self.num_slots)).all()


EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "measure_speculation.py"


def test_graph_uses_only_its_own_layout(docs_5m, replayed):
    """Measuring replays graphs of other sizes after the last step: they must be filled first."""
    spec = importlib.util.spec_from_file_location("measure_speculation", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    config = {"model": str(docs_5m.parent / "docs-5m-eagle3"), "num_speculative_tokens": 3}
    engine = make_engine(
        docs_5m, 1, speculative_config=json.dumps(config), max_model_len=MAX_LEN, block_size=PAGE
    )
    engine.runner.capture_graphs(6, engine.max_model_len)
    step_graphs, watch = engine.runner.graphs, Watch(engine.runner)
    run(engine, make_requests(1, 3, ("greedy",)))
    last = step_graphs._buffers.holds
    keys = [key for key in step_graphs.decode_keys if key != last]
    assert {key.count for key in keys} >= {1, 2, 4}
    for key in keys:
        with pytest.raises(AssertionError, match="call fill_ first"):
            step_graphs.replay(key)
    with pytest.raises(AssertionError):  # what that would have read
        for key in keys:
            watch.batch(step_graphs._batches[key])
    for key in keys:
        example.fill(SimpleNamespace(engine=engine), key)
        batch = step_graphs._batches[key]
        watch.batch(batch)
        assert (batch.slots_T == -1).all() and (batch.context_lengths_R == MAX_LEN).all()
        step_graphs.replay(key)


SCENES = {
    "default order": {},
    "few pages": {"num_gpu_blocks_override": 30, "admission": "fits"},
    "by chance": {
        "speculative": {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": 2.5,
        }
    },
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("scene", "in_graphs"),
    [
        ("few pages", True),
        *(
            pytest.param(scene, in_graphs, marks=pytest.mark.exhaustive)
            for scene in SCENES
            for in_graphs in (True, False)
            if (scene, in_graphs) != ("few pages", True)
        ),
    ],
)
def test_buffer_offsets_of_every_step(docs_5m, replayed, monkeypatch, scene, in_graphs):
    settings = dict(SCENES[scene])
    config = {"model": str(docs_5m.parent / "docs-5m-eagle3"), "num_speculative_tokens": 3}
    config |= settings.pop("speculative", {})
    settings = {"max_model_len": MAX_LEN, "block_size": PAGE} | settings
    engine = make_engine(docs_5m, 1, speculative_config=json.dumps(config), **settings)
    runner = engine.runner
    # up and down through all numbers of drafts, faster than times would change them
    monkeypatch.setattr(Depth, "choose", lambda _, n: next(choices))
    choices = (Choice(k, k > 0) for _ in range(10**6) for k in (3, 3, 3, 1, 3, 0, 0, 3, 1, 1))
    if in_graphs:
        runner.capture_graphs(6, engine.max_model_len)
    watch, forward, propose = Watch(runner), ModelRunner.forward_logits, ChainDrafter.propose

    def watched(runner, batch, step=None):
        watch.batch(batch)
        return forward(runner, batch, step)

    def drafted(drafter, step):
        watch.draft(step)
        drafts = propose(drafter, step)
        assert ((drafts >= 0) & (drafts < watch.vocab_size)).all()
        return drafts

    monkeypatch.setattr(ModelRunner, "forward_logits", watched)
    monkeypatch.setattr(ChainDrafter, "propose", drafted)
    monkeypatch.setattr(
        graphs.Captured,
        "capture",
        lambda captured: setattr(captured, "_graph", EagerGraph(captured)),
    )
    kinds = ("greedy", "stop", "sampled", "penalties", "hot", "min_tokens")
    for seed in range(2):
        requests = make_requests(seed, 8, kinds)
        run(engine, requests, seed, aborted={requests[3][0], requests[5][0]})
        runner.capture_next()
    assert watch.num_batches > 30 and watch.num_drafts > 100


class EagerGraph:
    """A graph that launches its work."""

    def __init__(self, captured):
        self._captured = captured

    def replay(self):
        self._captured._result = self._captured._work()
