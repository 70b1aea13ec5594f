"""Several devices: the same weights as with one, one error if a device fails, no thread left."""

import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from calibrate import devices
from calibrate.calibration.kv_range import KvRange
from calibrate.calibration.stream import windows_of_devices
from calibrate.devices import Devices, OrderedSections, Stopped
from calibrate.pipeline import quantize_checkpoint
from calibrate.quality.evaluation import Evaluation
from calibrate.recipe import RECIPES, Recipe
from calibrate.solvers import gptq
from calibrate.solvers.solving import Tuning
from calibrate.texts.data import CalibrationData
from formats.errors import InputError
from formats.scheme import Scheme

TWO, THREE = ("cpu",) * 2, ("cpu",) * 3
SCHEME = Scheme.parse("w4a16-sym-g32")
GENERATOR = torch.Generator().manual_seed(0)
IDS, EVALUATED = (torch.randint(0, 512, (7, 64), generator=GENERATOR) for _ in range(2))
DATA = CalibrationData(ids_WS=IDS, source="random ids", seed=0)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Two windows of 64 tokens a batch: with 7 of them, four batches, the last of one window."""
    monkeypatch.setattr("calibrate.calibration.capture.BATCH_TOKENS", 128)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert not [each for each in threading.enumerate() if each not in before and not each.daemon]


def quantize(source, target, device, **options):
    options = {"scheme": SCHEME, "recipe": "gptq", "calibration": DATA, **options}
    return quantize_checkpoint(source, target, device=device, progress=False, **options)


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_windows_are_divided_by_whole_batches(count):
    rows = windows_of_devices(torch.zeros(7, 64), count)
    assert torch.cat(rows).sort().values.tolist() == list(range(7))
    if count == 2:
        assert [each.tolist() for each in rows] == [[0, 1, 4, 5], [2, 3, 6]]
    # lanes without windows are the last ones: work goes to the first devices
    sizes = [len(each) for each in rows]
    assert len(rows) == count and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("family", "devices", "options"),
    [
        ("qwen3", THREE, {"recipe": "gptaq", "eval_text": "random ids"}),
        ("llama", TWO, {"recipe": "awq", "spill": "here"}),
        ("llama", TWO, {"scheme": Scheme.parse("w8a8-static"), "recipe": "smoothquant"}),
        ("llama", TWO, {"kv_cache": "int8", "kv_per_head": True}),
        ("qwen3_moe", THREE, {}),  # no token of some batches reaches some experts
        ("qwen3", ("cpu",) * 9, {"recipe": "rtn"}),  # more than there are batches, or inputs
    ],
)
def test_several_devices_write_same_bytes_as_one(
    tiny_model, tmp_path, monkeypatch, family, devices, options
):
    """Every byte: a sum in another order would change a third of a model's last codes."""
    if "spill" in options:
        options = {**options, "spill": tmp_path / "spill"}
    if "kv_cache" in options:
        options = {**options, "output_format": "compressed-tensors"}
    monkeypatch.setattr(
        "calibrate.run.prepare.read_evaluation",
        lambda _, text, *__: text and Evaluation(ids_WS=EVALUATED, text=text),
    )
    one = quantize(tiny_model(family), tmp_path / "one", "cpu", **options)
    several = quantize(tiny_model(family), tmp_path / "several", devices, **options)
    left, right = (load_file(tmp_path / n / "model.safetensors") for n in ("one", "several"))
    assert list(left) == list(right)
    for name in left:
        assert torch.equal(left[name], right[name]), name
    for each, other in zip(one.linears, several.linears, strict=True):
        assert replace(each, seconds=0) == replace(other, seconds=0)
    assert one.quality == several.quality
    assert (one.quality is not None) == ("eval_text" in options)


def test_tuning_windows_keep_their_order(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setitem(
        RECIPES, "autoround", replace(RECIPES["autoround"], tuning=Tuning(steps=4, tokens=128))
    )
    for name, device in (("one", "cpu"), ("two", TWO)):
        quantize(tiny_model("qwen3"), tmp_path / name, device, recipe="autoround")
    left, right = (load_file(tmp_path / n / "model.safetensors") for n in ("one", "two"))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_linears_are_divided_over_devices(tiny_model, tmp_path, monkeypatch):
    jobs, here, on = {}, threading.local(), devices._on

    def on_a_device(name, job):
        here.job = object()  # a thread may run several
        return on(name, job)

    def solve(weight, stats, spec, name):
        jobs[name] = here.job
        return gptq.solve(weight, stats, spec, name)

    monkeypatch.setattr(devices, "_on", on_a_device)
    quantize(tiny_model("qwen3"), tmp_path / "out", TWO, recipe=Recipe(name="mine", solver=solve))
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        own = {n.removeprefix(prefix): job for n, job in jobs.items() if n.startswith(prefix)}
        assert len(own) == 7 and len(set(own.values())) == 2
        assert own[".self_attn.q_proj"] is own[".self_attn.v_proj"], "they share a factor"


@pytest.mark.parametrize("interrupted", [False, True])
def test_error_on_one_device_stops_all_and_is_raised_once(tiny_model, tmp_path, interrupted):
    """The other devices end before their next linear."""
    wait = threading.Event()
    solved = []

    def solve(weight, stats, spec, name):
        if "layers.1." not in name:
            return gptq.solve(weight, stats, spec, name)
        if "o_proj" in name:  # its device has nothing else
            raise KeyboardInterrupt if interrupted else InputError(name, "is hopeless")
        wait.wait(0.2)  # six of these are longer than a failure takes to be noticed
        solved.append(name)
        return gptq.solve(weight, stats, spec, name)

    error = KeyboardInterrupt if interrupted else InputError
    with pytest.raises(
        error, match=None if interrupted else "layers.1.self_attn.o_proj: is hopeless"
    ):
        quantize(
            tiny_model("qwen3"),
            tmp_path / "out",
            TWO,
            recipe=Recipe(name="mine", solver=solve, version="1"),
        )
    assert len(solved) < 6, "the other device had six to solve"
    left = [path.name for path in tmp_path.iterdir()]
    assert left == ([".out.unfinished"] if interrupted else [])


def test_original_error_is_raised():
    devices = Devices.parse(THREE)

    def patient():
        while True:
            devices.check()
            time.sleep(0.001)

    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        devices.together([patient, patient, broken])
    devices.check()  # nothing of it stays for the next work
    assert devices.together([lambda: 1, lambda: 2]) == [1, 2]
    assert not issubclass(Stopped, InputError)


def test_turn_order_is_independent_of_arrival():
    devices, seen = Devices.parse(THREE), []
    turns = OrderedSections(devices.check)

    def work(number):
        for round_ in range(5):
            time.sleep(0.003 * (2 - number))
            for key in "ab":
                with turns.of(key, 3 * round_ + number):
                    seen.append((key, 3 * round_ + number))

    devices.together([partial(work, number) for number in range(3)])
    for key in "ab":
        assert [number for own, number in seen if own == key] == list(range(15))


def test_waiting_for_a_failed_turn_ends():
    devices = Devices.parse(TWO)
    turns = OrderedSections(devices.check)

    def broken():
        raise ZeroDivisionError

    def waiting():
        with turns.of("a", 1):
            pytest.fail("the turn before it never ended")

    with pytest.raises(ZeroDivisionError):
        devices.together([broken, waiting])


def test_one_device_run_resumes_on_two(tiny_model, tmp_path):
    def stop(weight, stats, spec, name):
        if "layers.1" in name and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return gptq.solve(weight, stats, spec, name)

    recipe = Recipe(name="mine", solver=stop, version="1")
    with pytest.raises(KeyboardInterrupt):
        quantize(tiny_model("qwen3"), tmp_path / "out", "cpu", recipe=recipe)
    quantize(tiny_model("qwen3"), tmp_path / "out", TWO, recipe=recipe)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("abacus", "device 'abacus': unknown .use cpu, cuda, all or"),
        ("meta", "device 'meta': unknown"),
        ("cpu,", "device '': unknown"),
        ((), "expected one or more"),
    ],
)
def test_invalid_device_lists_are_refused(device, words):
    with pytest.raises(InputError, match=words):
        Devices.parse(device)


def test_gpu_names_parse(monkeypatch):
    """Without a GPU: the test replaces torch's answers."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "empty", lambda *_, device: None)
    assert Devices.parse("all").names == ("cuda:0", "cuda:1")
    assert Devices.parse("cuda:1, cuda:0").first == "cuda:1"
    assert Devices.parse("cuda:1").kind == Devices.parse("cuda").kind == "cuda"
    for text in ("cuda:0,cuda:0", "cuda,cuda:0"):
        with pytest.raises(InputError, match="names a GPU twice"):
            Devices.parse(text)
    with pytest.raises(InputError, match="only GPUs or only CPUs"):
        Devices.parse("cuda:0,cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InputError, match="'all': no GPU is visible"):
        Devices.parse("all")


def test_merged_ranges_are_maxima():
    ranges = [KvRange(per_head=True) for _ in range(2)]
    keys = torch.zeros(2, 1, 2, 3, 4)
    keys[0, 0, 0, 0, 0], keys[1, 0, 1, 2, 3] = -5.0, 7.0
    for each, own in zip(ranges, keys, strict=True):
        each.update(own, own.abs() * 2)
    ranges[0].merge(ranges[1])
    assert ranges[0].largest["keys"].tolist() == [5.0, 7.0]
    assert ranges[0].largest["values"].tolist() == [10.0, 14.0]
