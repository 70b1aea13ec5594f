"""Fixtures for tests of speculation in graphs."""

import pytest

from qserve.engine.runner.graphs.cuda_graphs import StepGraphs
from qserve.speculation.graphs import GraphedStep


@pytest.fixture
def replayed(monkeypatch):
    """Graphs that launch their work; the keys of the steps that went with drafts."""
    found = []

    def capture(graphs, key):
        graphs._buffers.pad_(key)
        batch = graphs.batch_of(key)
        graphs._batches[key] = batch
        graphs._graphs[key] = None, graphs._step(batch)

    def replay(graphs, key):
        graphs.expect(key)
        graphs._graphs[key] = None, graphs._step(graphs._batches[key])
        return graphs._graphs[key][1]

    begin = GraphedStep.__init__

    def watched(step, graphs, key, entry, rows):
        found.append((key, rows))
        begin(step, graphs, key, entry, rows)

    monkeypatch.setattr(StepGraphs, "_capture", capture)
    monkeypatch.setattr(StepGraphs, "replay", replay)
    monkeypatch.setattr(GraphedStep, "__init__", watched)
    return found
