"""Jina Embeddings v5: Qwen3 without a head, and an adapter for each task, as published."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Model

from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import Scheme
from qserve.lora.request import LoRARequest
from qserve.params.sampling_params import SamplingParams
from qserve.pooling.params import PoolingParams
from tests.adapters import write_adapter
from tests.formats.inspection.findings import of_weights
from tests.qserve.pooling.test_pooling import PROMPTS, bare, load

NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TASKS = ("retrieval", "clustering")


@pytest.fixture
def published(tiny_model, tmp_path):
    """A folder with a config class of its own, and adapters whose names lack `model.`."""
    folder = bare(
        tiny_model("qwen3"),
        tmp_path / "jina",
        architectures=["JinaEmbeddingsV5Model"],
        model_type="jina_embeddings_v5",
        auto_map={"AutoModel": "modeling_jina_embeddings_v5.JinaEmbeddingsV5Model"},
        task_names=["retrieval", "text-matching", "clustering", "classification"],
        tie_word_embeddings=True,
    )
    for seed, task in enumerate(TASKS):
        stated = {"target_modules": NAMES, "task_type": "FEATURE_EXTRACTION"}
        made = write_adapter(folder, folder / "adapters" / task, seed=seed, **stated)
        tensors = load_file(made / "adapter_model.safetensors")
        short = {
            name.replace("base_model.model.model.", "base_model.model."): tensor
            for name, tensor in tensors.items()
        }
        assert short.keys() != tensors.keys()
        save_file(short, made / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def vectors_of(folder, task=None):
    """transformers' vectors of the last token, with a task's adapter in the weights."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3Model"], "model_type": "qwen3"}
    if task is not None:
        place = folder / "adapters" / task
        stated = json.loads((place / "adapter_config.json").read_text())
        pairs = load_file(place / "adapter_model.safetensors")
        for name in {name.rsplit(".lora_", 1)[0] for name in pairs}:
            a, b = (pairs[f"{name}.lora_{part}.weight"] for part in "AB")
            own = f"{name.removeprefix('base_model.model.')}.weight"
            tensors[own] = tensors[own] + stated["lora_alpha"] / stated["r"] * (b @ a)
    merged = folder.parent / f"merged-{task}"
    merged.mkdir()
    (merged / "config.json").write_text(json.dumps(config))
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    model = Qwen3Model.from_pretrained(merged, dtype=torch.float32).eval()
    with torch.no_grad():
        last = [model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in PROMPTS]
    return torch.nn.functional.normalize(torch.stack(last), dim=-1)


def check(found, want):
    torch.testing.assert_close(
        torch.tensor([each.outputs.embedding for each in found]), want, atol=2e-5, rtol=2e-5
    )


def test_task_adapter_embeddings_equal_merged_weights(published):
    """Adapters of several tasks in one batch; chunks of 32 tokens and prefix hits."""
    assert not of_weights(inspect_checkpoint(published))
    llm = load(published, enable_lora=True)
    want = {task: vectors_of(published, task) for task in (*TASKS, None)}
    loras = {
        task: LoRARequest(task, number, str(published / "adapters" / task))
        for number, task in enumerate(TASKS, 1)
    }
    for _ in range(2):
        for task in want:
            check(llm.embed(PROMPTS, use_tqdm=False, lora_request=loras.get(task)), want[task])
    mixed = [loras.get(task) for task in (*TASKS, None, *TASKS, None)]
    found = llm.embed(PROMPTS, use_tqdm=False, lora_request=mixed)
    check(found, torch.stack([want[(*TASKS, None)[i % 3]][i] for i in range(len(PROMPTS))]))
    (one,) = llm.encode(
        PROMPTS[0], PoolingParams(kind="last"), use_tqdm=False, lora_request=loras["retrieval"]
    )
    assert torch.allclose(one.outputs.data, want["retrieval"][0], atol=2e-5)


def test_wrong_number_of_task_adapters_is_refused(published):
    llm = load(published, enable_lora=True)
    with pytest.raises(InputError, match="lora_request: expected one or 6, found 1"):
        llm.embed(PROMPTS, use_tqdm=False, lora_request=[None])


@pytest.mark.parametrize("tied", [True, False])
def test_model_without_head_only_embeds(published, tied):
    path = published / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": tied}))
    llm = load(published)
    check(llm.embed(PROMPTS, use_tqdm=False), vectors_of(published))
    params = SamplingParams(temperature=0, max_tokens=3, detokenize=False)
    if tied:
        assert llm.generate(PROMPTS[1], params, use_tqdm=False)
        return
    with pytest.raises(InputError, match="no output head"):
        llm.generate(PROMPTS[1], params, use_tqdm=False)


@pytest.mark.parametrize("recipe", ["rtn", "gptq"])
def test_quantized_model_uses_task_adapters(published, tmp_path, recipe):
    ids_WS = torch.randint(3, 500, (4, 24), generator=torch.Generator().manual_seed(0))
    quantize_checkpoint(
        published,
        tmp_path / "x",
        scheme=Scheme.parse("w8a16-sym-g32"),
        recipe=recipe,
        calibration=CalibrationData(ids_WS=ids_WS, source="test", seed=0),
        progress=False,
    )
    stated = json.loads((tmp_path / "x" / "config.json").read_text())
    assert stated["architectures"] == ["JinaEmbeddingsV5Model"]
    shutil.copytree(published / "adapters", tmp_path / "x" / "adapters")
    llm = load(tmp_path / "x", enable_lora=True)
    lora = LoRARequest("retrieval", 1, str(tmp_path / "x" / "adapters" / "retrieval"))
    found = llm.embed(PROMPTS, use_tqdm=False, lora_request=lora)
    vectors = torch.tensor([each.outputs.embedding for each in found])
    assert ((vectors * vectors_of(published, "retrieval")).sum(-1) > 0.99).all()
