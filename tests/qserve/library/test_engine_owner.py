"""The parameters of LLM and AsyncLLM are EngineConfig's fields: names, types, defaults, order."""

import inspect
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import pytest
import torch

from formats.errors import InputError
from qserve import LLM, AsyncLLM, EngineConfig
from qserve.command_line.vllm_settings import ENGINE_SETTINGS, PYTHON_SETTINGS, VllmSettings
from qserve.library.engine_owner import EngineOwner

# settings that Python programs may also give as dicts
DICTS = {"kv_transfer_config", "quantization_config", "speculative_config"}
PATHS = {"tokenizer", "download_dir"}  # and as paths


def test_llm_parameters_equal_engine_settings():
    assert LLM.__init__ is AsyncLLM.__init__ is EngineOwner.__init__
    parameters = dict(inspect.signature(EngineOwner.__init__).parameters)
    types = get_type_hints(EngineOwner.__init__)
    del parameters["self"], parameters["others"]
    stated = get_type_hints(EngineConfig)
    assert sorted(parameters) == sorted(field.name for field in fields(EngineConfig))
    assert types["model"] == str | Path and parameters.pop("model").default is inspect._empty
    for field in fields(EngineConfig):
        if field.name == "model":
            continue
        name, parameter, found = field.name, parameters[field.name], types[field.name]
        assert parameter.kind is parameter.KEYWORD_ONLY, name
        if field.default is MISSING:
            assert (parameter.default, field.default_factory()) == ((), []), name
            assert (found, stated[name]) == (Sequence[str], list[str]), name
            continue
        assert parameter.default == field.default, name
        assert type(parameter.default) is type(field.default), name
        if name in DICTS:
            assert (found, stated[name]) == (str | dict[str, Any] | None, str | None)
        elif name in PATHS:
            assert (found, stated[name]) == (str | Path | None, str | None)
        elif choices := field.metadata["choices"]:
            want = Literal[(*choices, *field.metadata["aliases"])]
            assert found == (want | None if field.default is None else want), name
        else:
            assert found == stated[name], name


def test_values_reach_the_config():
    given = {
        "dtype": "float16",
        "lora_modules": ("a=b",),
        "enable_lora": True,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
        "seed": 5,
    }
    made = AsyncLLM(Path("folder"), **given).config
    assert made == EngineConfig(
        model="folder",
        dtype="float16",
        lora_modules=["a=b"],
        enable_lora=True,
        speculative_config='{"method": "ngram", "num_speculative_tokens": 2}',
        seed=5,
    )
    assert AsyncLLM("folder").config == EngineConfig(model="folder")
    assert AsyncLLM.from_engine_args(made).config is made


def test_vllm_values_are_accepted():
    made = AsyncLLM(
        "folder",
        trust_remote_code=True,
        swap_space=4,
        disable_log_stats=True,
        enable_chunked_prefill=None,
        tokenizer_mode="auto",
        hf_overrides={},
        dtype="half",
        load_format="safetensors",
        max_num_seqs=None,
        seed=None,
        limit_mm_per_prompt={"image": 4},
        mm_processor_kwargs={},
        served_model_name="name",
        worker_extension_cls="",
    ).config
    assert made == EngineConfig(model="folder", dtype="float16")
    assert AsyncLLM("folder", dtype=torch.bfloat16).config.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hf_overrides": {"a": 1}}, r"hf_overrides=\{'a': 1\}: is not supported \(edit config"),
        ({"enable_chunked_prefill": False}, "long prompts are always computed in chunks"),
        ({"cpu_offload_gb": 4}, "cpu_offload_gb=4: is not supported"),
        ({"disable_log_stats": False}, "figures are at /metrics"),
        ({"tensor_paralel_size": 2}, "tensor_paralel_size: is not a setting.*tensor_parallel_size"),
        ({"mm_processor_kwargs": {"num_crops": 4}}, "is not supported .edit preprocessor_config"),
        ({"allowed_local_media_path": "/images"}, "is not supported .pass images, not URLs"),
        ({"frobnicate": 2}, "frobnicate: is not a setting of the engine"),
        ({"chat_template": "x"}, "chat_template: is not a setting of the engine"),
    ],
)
def test_unknown_keywords_are_refused(given, words):
    for cls in (LLM, AsyncLLM):
        with pytest.raises(InputError, match=words):
            cls("folder", **given)


def test_signature_equals_accepted_keywords():
    rows = ENGINE_SETTINGS | PYTHON_SETTINGS
    names = {name for name, row in rows.items() if row.accepted or row.accepted is None}
    types = get_type_hints(VllmSettings)
    assert types.keys() <= names
    for name, hint in types.items():
        for value in get_args(hint):
            assert rows[name].accepts(value), (name, value)
    assert not rows.keys() & {field.name for field in fields(EngineConfig)}


def test_invalid_values_are_refused_by_name():
    with pytest.raises(InputError, match="--dtype: expected one of auto, bfloat16"):
        AsyncLLM("folder", dtype="int3")
    with pytest.raises(InputError, match="--max-model-len: expected a number, found '1k'"):
        AsyncLLM("folder", max_model_len="1k")
