"""Requirements of other projects' routers: routes, headers, fields, names of metrics.

Read from their sources and their requests in November 2026: llm-d's inference scheduler, vLLM's
production stack, vllm-router 0.1.17, sglang-router 0.3.2.
"""

from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from qserve.config import EngineConfig, ServerConfig
from qserve.engine.report import EngineReport
from qserve.server.observability.metrics import Metrics

DEPLOY = Path(__file__).resolve().parents[3] / "examples" / "deploy"
REPORT = EngineReport(
    num_running=3,
    num_waiting=2,
    num_pages=100,
    num_pages_used=25,
    num_prefix_queries=64,
    num_prefix_hits=48,
)
# What the Rust routers add to a body, with values that change nothing.
ADDED = {
    "vllm-router": {
        "stream": False,
        "echo": False,
        "no_stop_trim": False,
        "ignore_eos": False,
        "skip_special_tokens": True,
        "return_hidden_states": False,
    },
    "sglang-router": {
        "no_stop_trim": False,
        "ignore_eos": False,
        "continue_final_message": False,
        "skip_special_tokens": True,
        "separate_reasoning": True,
    },
}
# Probed at each server; what is not there must say so, and quickly.
PROBED = {
    "vllm-router": ["/health", "/v1/models"],
    "sglang-router": ["/health", "/v1/models"],
    "production-stack": ["/health", "/v1/models"],
    "llm-d": ["/health", "/metrics", "/v1/models"],
}
MAY_LACK = ["/server_info", "/get_server_info", "/model_info", "/get_model_info", "/is_sleeping"]


@pytest.fixture
def samples(make_server):
    """prefix -> name -> sample, of a server whose engine sent REPORT."""

    def read(prefix):
        config = ServerConfig(served_model_name=["tiny"], metrics_prefix=prefix)
        metrics = Metrics("tiny", prefix)
        metrics.take_report(REPORT)
        metrics.describe_cache(EngineConfig(model="m"))
        page = make_server(config, metrics=metrics).get("/metrics").text
        families = text_string_to_metric_families(page)
        return {sample.name: sample for family in families for sample in family.samples}

    return read


def extractor():
    (config,) = yaml.safe_load_all((DEPLOY / "llm-d" / "endpoint-picker.yaml").read_text())
    (found,) = [each for each in config["plugins"] if each["type"] == "core-metrics-extractor"]
    return config, found["parameters"]


def test_llm_d_configured_metrics_exist(samples):
    _, parameters = extractor()
    (engine,) = parameters["engineConfigs"]
    page = samples("qserve")
    assert page[engine["queuedRequestsSpec"]].value == 2
    assert page[engine["runningRequestsSpec"]].value == 3
    assert page[engine["kvUsageSpec"]].value == 0.25
    labels = page[engine["cacheInfoSpec"]].labels
    assert labels[engine["cacheBlockSizeLabelName"]] == "16"
    assert labels[engine["cacheNumBlocksLabelName"]] == "100"


def test_llm_d_pod_label_is_in_manifests():
    config, parameters = extractor()
    (deployment,) = yaml.safe_load_all(
        (DEPLOY / "kubernetes" / "base" / "deployment.yaml").read_text()
    )
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    (engine,) = parameters["engineConfigs"]
    for key in ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type"):
        assert labels[key] == engine["name"] == parameters["defaultEngine"]
    declared = {each["type"] for each in config["plugins"]}
    used = {each["pluginRef"] for each in config["schedulingProfiles"][0]["plugins"]}
    assert used <= declared
    pool, route = yaml.safe_load_all((DEPLOY / "llm-d" / "pool.yaml").read_text())
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]


def test_llm_d_default_metrics_are_vllm_names(samples):
    page = samples("vllm")
    names = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
    assert [page[f"vllm:{name}"].value for name in names] == [2, 3, 0.25]
    labels = page["vllm:cache_config_info"].labels
    assert labels["block_size"] == "16" and labels["num_gpu_blocks"] == "100"


def test_production_stack_metrics_exist(samples):
    page = samples("vllm")
    found = {
        name: page[f"vllm:{name}"].value
        for name in (
            "num_requests_running",
            "num_requests_waiting",
            "gpu_cache_usage_perc",
            "gpu_prefix_cache_queries_total",
            "gpu_prefix_cache_hits_total",
        )
    }
    assert list(found.values()) == [3, 2, 0.25, 64, 48]
    assert "qserve:gpu_cache_usage_perc" not in samples("qserve")


def test_production_stack_label_is_in_manifests():
    (router,) = yaml.safe_load_all((DEPLOY / "production-stack" / "router.yaml").read_text())
    arguments = router["spec"]["template"]["spec"]["containers"][0]["args"]
    (selector,) = [each.partition("=")[2] for each in arguments if "label-selector" in each]
    (deployment,) = yaml.safe_load_all(
        (DEPLOY / "kubernetes" / "base" / "deployment.yaml").read_text()
    )
    key, _, value = selector.partition("=")
    assert deployment["spec"]["template"]["metadata"]["labels"][key] == value


@pytest.mark.parametrize("router", PROBED)
def test_probed_routes_answer(router, server):
    for path in PROBED[router]:
        assert server.get(path).status_code == 200, path
    cards = server.get("/v1/models").json()["data"]
    assert cards[0]["id"] == "tiny" and cards[0]["object"] == "model"


@pytest.mark.parametrize("path", MAY_LACK)
def test_missing_routes_return_404(path, server):
    assert server.get(path).status_code == 404


def test_render_route_returns_404(server):
    body = {"prompt": "Once", "model": "tiny"}
    assert server.post("/v1/completions/render", body).status_code == 404


@pytest.mark.parametrize("router", ADDED)
def test_router_fields_are_accepted(router, server):
    headers = {"X-Session-ID": "7", "X-Request-Id": "named-by-the-router"}
    messages = [{"role": "user", "content": "Hi"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/completions", {"prompt": "Once"}),
    ):
        body |= {"model": "tiny", "max_tokens": 2, **ADDED[router]}
        reply = server.post(path, body, headers=headers)
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-request-id"] == "named-by-the-router"


def test_kv_transfer_params_of_proxies_are_accepted(server):
    """Ours are found by their keys; what NIXL's proxies add is listed as ignored."""
    reply = server.complete(max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    assert reply.status_code == 200
    assert "kv_transfer_params" in reply.headers["x-ignored-fields"]


def test_full_or_dead_server_returns_retryable_status(server):
    server.client.is_alive = False
    for path in ("/health", "/ready"):
        assert server.get(path).status_code == 503
    assert server.complete().status_code == 503


def test_sglang_router_script_flags_exist():
    text = (DEPLOY / "sglang-router" / "start.sh").read_text()
    for flag in ("--worker-urls", "--policy cache_aware", "--balance-abs-threshold"):
        assert flag in text
