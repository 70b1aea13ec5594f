"""/start_profile and /stop_profile on a real server, and recordings that end by themselves."""

import gzip
import json
import urllib.error
import urllib.request

import pytest

from formats.errors import InputError
from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams
from qserve.profile.profiler_config import ProfilerConfig

MODEL = "examples/models/docs-5m"


def post(url, body=None):
    data = b"" if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    try:
        asked = urllib.request.Request(url, data=data, headers=headers, method="POST")
        with urllib.request.urlopen(asked) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def steps_in(path):
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {each["name"] for each in events if each.get("cat") == "user_annotation"}
    return sorted(name for name in names if name.startswith("step "))


@pytest.mark.exhaustive
def test_server_records_between_start_and_stop(start_server, tmp_path):
    config = {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    server = start_server(MODEL, "--profiler-config", json.dumps(config))
    ask = {"model": MODEL, "prompt": "A", "max_tokens": 3, "ignore_eos": True}
    assert post(f"{server.url}/start_profile", {"profile_prefix": "../x"})[0] == 400
    assert post(f"{server.url}/start_profile", {"profile_prefix": "mine"})[0] == 200
    code, body = post(f"{server.url}/start_profile")
    assert code == 409 and b"already recording" in body
    assert post(f"{server.url}/v1/completions", ask)[0] == 200
    assert post(f"{server.url}/stop_profile")[0] == 200
    assert post(f"{server.url}/stop_profile")[0] == 200
    assert len(steps_in(tmp_path / "mine-rank0.0.pt.trace.json.gz")) == 3
    assert "products" in (tmp_path / "mine-rank0.0.profiler_out.txt").read_text()
    assert server.stop() == 0


def test_delay_and_maximum_count_steps(tmp_path):
    llm = LLM(MODEL, device="cpu", cpu_kv_cache_memory=0.02)
    llm.engine.profiler.start(ProfilerConfig(folder=str(tmp_path), delay=2, most=3))
    params = SamplingParams(max_tokens=9, ignore_eos=True, detokenize=False)
    llm.generate([[5, 6, 7]], params, use_tqdm=False)
    (trace,) = tmp_path.glob("*.gz")
    names = steps_in(trace)
    assert len(names) == 3 and all("decode=1" in name for name in names)
    assert not llm.engine.step_ranges.recording and not llm.engine.profiler.is_armed
    llm.start_profile(str(tmp_path / "again"))
    llm.stop_profile()  # with no step at all


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"profiler": "vtune", "torch_profiler_dir": "x"}',
        '{"torch_profiler_dir": "x", "colour": 1}',
        '{"torch_profiler_dir": "x", "max_iterations": -1}',
        '{"torch_profiler_dir": 5}',
    ],
)
def test_unreadable_profile_config_is_refused(text):
    with pytest.raises(InputError, match="--profiler-config"):
        ProfilerConfig.parse(text)
