"""The parameters of LLM and AsyncLLM are EngineConfig's fields: names, types, defaults, order."""

import inspect
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

import pytest

from formats.errors import InputError
from qserve import LLM, AsyncLLM, EngineConfig
from qserve.library.engine_owner import EngineOwner

# settings that Python programs may also give as dicts
DICTS = {"kv_transfer_config", "quantization_config", "speculative_config"}
PATHS = {"tokenizer", "download_dir"}  # and as paths


def test_parameters_are_the_engines_settings():
    assert LLM.__init__ is AsyncLLM.__init__ is EngineOwner.__init__
    parameters = dict(inspect.signature(EngineOwner.__init__).parameters)
    types = get_type_hints(EngineOwner.__init__)
    del parameters["self"]
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
            want = Literal[choices]
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


def test_bad_values_are_named():
    with pytest.raises(InputError, match="--dtype: expected one of auto, bfloat16"):
        AsyncLLM("folder", dtype="int3")
