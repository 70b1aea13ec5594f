"""Threads of the engine on a CPU: one core stays free for the server; the user's settings win."""

import pytest
import torch

from qserve import LLM
from qserve.config import EngineConfig
from qserve.engine.cpu_threads import SET_BY_USER, with_server_core


@pytest.mark.parametrize(("num_cores", "threads"), [(1, 1), (2, 1), (8, 7)])
def test_server_keeps_one_core(num_cores, threads):
    config = with_server_core(EngineConfig(model="m"), num_cores=num_cores, environment={})
    assert config.cpu_threads == threads


@pytest.mark.parametrize(
    ("asked", "environment", "threads"),
    [(5, {}, 5), (5, {SET_BY_USER: "3"}, 5), (None, {SET_BY_USER: "3"}, None)],
)
def test_user_settings_are_kept(asked, environment, threads):
    config = EngineConfig(model="m", cpu_threads=asked)
    assert with_server_core(config, num_cores=8, environment=environment).cpu_threads == threads


@pytest.mark.parametrize(("asked", "expected"), [(None, []), (2, [2])])
def test_torch_gets_only_requested_settings(monkeypatch, docs_5m, asked, expected):
    settings = []
    monkeypatch.setattr(torch, "set_num_threads", settings.append)
    LLM(str(docs_5m), device="cpu", cpu_threads=asked, load_format="dummy", max_model_len=32)
    assert settings == expected
