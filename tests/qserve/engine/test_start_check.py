"""Start-up check: damaged scales and wrong products are found; a merely worse model passes."""

import asyncio
import logging
import shutil

import pytest
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from formats.errors import InputError
from formats.quality.record import QUALITY
from formats.scheme import Scheme
from qkernels import QuantLinear
from qserve.config import EngineConfig
from qserve.engine.ipc.client import EngineClient
from qserve.engine.start_check import check_start
from qserve.llm import LLM

SCALES = "model.layers.1.mlp.down_proj.scales"


def quantized(docs_5m, folder, scheme):
    quantize_checkpoint(
        docs_5m, folder, scheme=Scheme.parse(scheme), quality_windows=1, progress=False
    )
    return folder


@pytest.fixture(scope="module")
def folder(docs_5m, tmp_path_factory):
    return quantized(docs_5m, tmp_path_factory.mktemp("checked") / "w4", "w4a16-sym")


@pytest.fixture(scope="module")
def load():
    engines = {}

    def load(folder, dtype="float32"):
        if (folder, dtype) not in engines:
            llm = LLM(str(folder), device="cpu", dtype=dtype, max_model_len=64)
            engines[folder, dtype] = llm
        return engines[folder, dtype].engine

    return load


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_correct_model_passes(folder, load, dtype):
    check_start(load(folder, dtype), str(folder))


def test_less_accurate_model_passes(docs_5m, tmp_path, load):
    worse = quantized(docs_5m, tmp_path / "w2", "w2a16-sym")
    check_start(load(worse), str(worse))


def test_swapped_scales_are_reported(folder, tmp_path, load):
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    tensors[SCALES] = tensors[SCALES].flip(1).contiguous()
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"start-up check: {SCALES} differ"):
        check_start(load(folder), str(damaged))


def test_swapped_codes_change_the_logits(folder, tmp_path, load):
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    name = SCALES.replace("scales", "qweight")
    tensors[name] = tensors[name].flip(1).contiguous()
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="start-up check: after 32 tokens.*a kernel differ"):
        check_start(load(damaged), str(damaged))


@pytest.mark.parametrize("fault", [1.2, float("nan")])
def test_wrong_kernel_is_refused(folder, load, monkeypatch, fault):
    engine = load(folder)
    linears = [m for m in engine.runner.decoder.modules() if isinstance(m, QuantLinear)]
    right = linears[0].forward
    monkeypatch.setattr(linears[0], "forward", lambda *a, **k: right(*a, **k) * fault)
    with pytest.raises(InputError, match="start-up check: after 32 tokens.*kernels of the linears"):
        check_start(engine, str(folder))


def test_folder_without_stored_logits(folder, quantized_5m, tmp_path, load, caplog):
    """quantized_5m was written without a measurement; other tools' folders have no such file."""
    with caplog.at_level(logging.DEBUG, "qserve"):
        check_start(load(folder), str(quantized_5m))
        assert "No start-up check of logits" in caplog.text
        check_start(load(folder), str(tmp_path))
        assert f"has no {QUALITY}" in caplog.text


def test_start_check_uses_no_pages(folder, load):
    engine = load(folder)
    free = engine.scheduler.pool.num_free
    check_start(engine, str(folder))
    assert engine.scheduler.pool.num_free == free and not engine.has_work()


def test_damaged_model_is_refused_unless_check_is_off(folder, tmp_path):
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    tensors[SCALES] = tensors[SCALES].flip(1).contiguous()
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    config = EngineConfig(model=str(damaged), device="cpu", max_model_len=64)

    async def start(check):
        client = await EngineClient.start(config, check=check)
        await client.close()

    with pytest.raises(InputError, match=f"{SCALES} differ"):
        asyncio.run(start(True))
    asyncio.run(start(False))
