"""The dashboard and the alert rules name only metrics that a server has."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from qserve.config import EngineConfig
from qserve.server.metrics import Metrics

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "observability"


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("maker", FOLDER / "make_dashboard.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names_of(prefix: str) -> set[str]:
    metrics = Metrics("m", prefix)
    metrics.describe_cache(EngineConfig(model="m"))
    found = set()
    for family in text_string_to_metric_families(metrics.page().decode()):
        ends = ("_bucket", "_sum", "_count") if family.type == "histogram" else ("_total", "")
        found |= {family.name + end for end in ends}
    return found


def named(text: str, prefix: str) -> set[str]:
    return set(re.findall(rf"{prefix}:\w+", text))


@pytest.mark.parametrize("prefix", ["qserve", "vllm"])
def test_dashboard_names_metrics_that_there_are(maker, prefix):
    found = named(json.dumps(maker.dashboard(prefix)), prefix)
    assert len(found) > 20 and found <= names_of(prefix)


def test_dashboard_in_the_folder_is_what_the_program_writes(maker):
    assert json.loads((FOLDER / "grafana.json").read_text()) == maker.dashboard("qserve")


def test_queries_have_as_many_brackets_open_as_closed(maker):
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
    queries = [rule["expr"] for rule in rules]
    queries += [t["expr"] for p in maker.dashboard("qserve")["panels"] for t in p["targets"]]
    for query in queries:
        for pair in ("()", "[]", "{}"):
            assert query.count(pair[0]) == query.count(pair[1]), query


def test_alerts_name_metrics_that_there_are():
    text = (FOLDER / "alerts.yaml").read_text()
    found = named(text, "qserve")
    assert len(found) > 6 and found <= names_of("qserve")
    for rule in yaml.safe_load(text)["groups"][0]["rules"]:
        assert {"alert", "expr", "annotations"} <= set(rule)
