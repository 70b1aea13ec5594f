"""Number of kernels and copies that a step with drafts launches besides the model's graph.

At batch 1 each costs 2 to 3 us, and a copy between host and device 8, of a step of 2.2 ms. Without
CUDA, an operation of qkernels counts as the launches it makes there. Any other operation of torch
that is not a view counts as one.
"""

import json
from collections import Counter

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from qkernels import dispatch
from qserve.engine.runner.graphs.cuda_graphs import StepGraphs
from qserve.engine.runner.model_runner import ModelRunner
from qserve.params.sampling_params import SamplingParams
from tests.qserve.speculation.traces import make_engine, run

KERNELS = {"sample_": 2}  # of an operation; others are one
WITHOUT = ("empty", "new_empty", "empty_like", "empty_strided", "_unsafe_view", "detach")

# The limits leave room for a kernel or two: a draft launches 14, a step 13 besides its drafts.
MAX_LAUNCHES_PER_DRAFT = 16
MAX_OTHER_LAUNCHES = 14
COPIES = ("copy_", "_to_copy", "clone", "_local_scalar_dense")  # between host and device
MAX_COPIES = 3  # the step, its speculation inputs; its results


class Launches(TorchDispatchMode):
    """Counts while it is entered."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.counts, self._is_inside = Counter(), False
        find = dispatch.implementation

        def counting(operation, **problem):
            run = find(operation, **problem)

            def run_and_count(*arguments, **more):
                return self.inside(operation.name, run, *arguments, **more)

            return run_and_count

        monkeypatch.setattr(dispatch, "implementation", counting)

    def inside(self, op, run, *arguments, **more):
        """The result of `run`, as one operation."""
        outer, self._is_inside = self._is_inside, True
        try:
            return run(*arguments, **more)
        finally:
            self._is_inside = outer
            if not outer and op is not None:
                self.counts[op] += KERNELS.get(op, 1)

    def __torch_dispatch__(self, function, types, arguments=(), more=None):
        name = function._schema.name.removeprefix("aten::")
        is_view = any(
            result.alias_info is not None and not result.alias_info.is_write
            for result in function._schema.returns
        )
        if not (self._is_inside or is_view or name in WITHOUT):
            self.counts[name] += 1
        return function(*arguments, **(more or {}))


@pytest.fixture
def counts_of(docs_5m, replayed, monkeypatch):
    def count(num_drafts):
        """Launches of the usual step of one request with this number of drafts."""
        head = str(docs_5m.parent / "docs-5m-eagle3")
        config = {"model": head, "num_speculative_tokens": num_drafts, "adaptive": False}
        engine = make_engine(docs_5m, 1, speculative_config=json.dumps(config), block_size=64)
        engine.runner.capture_graphs(6, engine.max_model_len)
        launches, found = Launches(monkeypatch), []
        launch, replay = ModelRunner.launch, StepGraphs.replay

        def watched(runner, step):
            launches.counts.clear()
            with launches:
                handle = launch(runner, step)
            found.append(frozenset(launches.counts.items()))
            return handle

        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "launch", watched)
            patch.setattr(StepGraphs, "replay", lambda *args: launches.inside(None, replay, *args))
            params = SamplingParams(temperature=0.7, seed=1, max_tokens=40, ignore_eos=True)
            run(engine, [("one", list(range(300, 310)), params)])
        ((usual, times),) = Counter(found).most_common(1)
        assert times > 5
        return Counter(dict(usual))

    return count


@pytest.mark.exhaustive
def test_speculative_step_launch_count_is_bounded(counts_of):
    two, three = counts_of(2), counts_of(3)
    draft = three - two
    beside = three - Counter({name: 3 * count for name, count in draft.items()})
    assert 0 < draft.total() <= MAX_LAUNCHES_PER_DRAFT, draft
    assert not any(draft[name] for name in COPIES), draft
    assert beside.total() <= MAX_OTHER_LAUNCHES, beside
    assert sum(beside[name] for name in COPIES) <= MAX_COPIES, beside
