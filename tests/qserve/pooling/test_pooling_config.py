"""Pooling settings in sentence-transformers' files, and settings that are refused."""

import json
import shutil

import pytest

from formats.errors import InputError
from qserve.params.sampling_params import ParameterError
from qserve.pooling.config import PoolingConfig
from qserve.pooling.params import PoolingParams
from qserve.pooling.text import input_tokens
from qserve.text.tokenizer import Tokenizer

PACKAGE = "sentence_transformers.models"


def write(folder, files, *modules):
    named = [
        {"idx": i, "name": str(i), "path": path, "type": f"{PACKAGE}.{kind}"}
        for i, (kind, path) in enumerate(modules)
    ]
    if named:
        files = {**files, "modules.json": named}
    for name, value in {"config.json": {"hidden_size": 64}, **files}.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(json.dumps(value))
    return PoolingConfig.from_folder(folder)


MODULES = [("Transformer", ""), ("Pooling", "1_Pooling")]


def test_default_pooling_is_last_token(tmp_path):
    config = write(tmp_path, {})
    params = config.complete(PoolingParams())
    assert (params.kind, params.normalize) == ("last", True)
    assert not config.is_embedder and not config.is_reranker


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["cls"]}, "cls"),
        ({"pooling_mode": "lasttoken", "include_prompt": True}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
    ],
)
def test_modes_of_pooling(tmp_path, pooling, kind):
    config = write(tmp_path, {"1_Pooling/config.json": pooling}, *MODULES)
    assert config.is_embedder
    params = config.complete(PoolingParams(dimensions=32))
    assert (params.kind, params.normalize, params.dimensions) == (kind, False, 32)
    assert config.complete(PoolingParams(normalize=True)).normalize


@pytest.mark.parametrize(
    ("files", "modules", "words"),
    [
        ({"1_Pooling/config.json": {"pooling_mode_max_tokens": True}}, MODULES, "max_tokens"),
        ({"1_Pooling/config.json": {"pooling_mode": ["cls", "mean"]}}, MODULES, "cls, mean"),
        (
            {"1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": False}},
            MODULES,
            "pooling without the prompt",
        ),
        (
            {"1_Pooling/config.json": {"pooling_mode": "mean"}},
            [*MODULES, ("Dense", "2_Dense")],
            "module Dense",
        ),
        ({"config.json": {"is_causal": False}}, [], "attends to later tokens"),
        ({"config.json": {"use_bidirectional_attention": True}}, [], "attends to later tokens"),
    ],
)
def test_unsupported_sentence_transformers_modules_are_refused(tmp_path, files, modules, words):
    config = write(tmp_path, files, *modules)
    with pytest.raises(InputError, match=words):
        config.complete(PoolingParams())


@pytest.mark.parametrize(
    ("stated", "allowed"),
    [
        ({}, {1, 32, 64}),
        ({"matryoshka_dimensions": [48, 32]}, {32, 48, 64}),
        ({"is_matryoshka": False}, {64}),
        ({"is_matryoshka": True}, {1, 32, 64}),
    ],
)
def test_matryoshka(tmp_path, stated, allowed):
    config = write(tmp_path, {"config.json": {"hidden_size": 64, **stated}})
    for dimensions in (1, 32, 48, 64, 65):
        params = PoolingParams(dimensions=dimensions)
        if dimensions in allowed or (dimensions == 48 and 1 in allowed):
            assert config.complete(params).dimensions == dimensions
        else:
            with pytest.raises(InputError, match="dimensions"):
                config.complete(params)


def test_module_of_a_reranker(tmp_path):
    scores = {"true_token_id": 9693, "false_token_id": 2152}
    modules = [("Transformer", ""), ("LogitScore", "1_LogitScore")]
    config = write(tmp_path, {"1_LogitScore/config.json": scores}, *modules)
    assert config.score_tokens == (9693, 2152)
    assert config.is_reranker and not config.is_embedder


def test_prompts_by_name_and_by_default(tmp_path, docs_5m):
    stated = {"prompts": {"query": "Query: ", "document": ""}, "default_prompt_name": None}
    config = write(tmp_path, {"config_sentence_transformers.json": stated})
    tokenizer = Tokenizer(docs_5m)
    assert input_tokens(config, tokenizer, "a process") == tokenizer.encode("a process")
    query = input_tokens(config, tokenizer, "a process", "query")
    assert query == tokenizer.encode("Query: a process")
    with pytest.raises(InputError, match="document, query"):
        config.prompt("passage")


def test_texts_that_are_rendered_as_messages(tmp_path, docs_5m):
    shutil.copytree(docs_5m, tmp_path, dirs_exist_ok=True)
    stated = {"modality_config": {"text": {}, "message": {"format": "flat"}}}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(stated))
    tokens = input_tokens(PoolingConfig.from_folder(tmp_path), Tokenizer(tmp_path), "A process is")
    # those of sentence-transformers 6.2.0 for this folder
    assert tokens == [1, 4403, 201, 35, 1307, 312, 2, 201]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("kind", {"kind": "max"}),
        ("dimensions", {"dimensions": 0}),
        ("dimensions", {"dimensions": True}),
        ("token_ids", {"kind": "tokens"}),
        ("token_ids", {"kind": "last", "token_ids": (1,)}),
    ],
)
def test_out_of_range_parameters_are_refused(name, fields):
    with pytest.raises(ParameterError, match=name):
        PoolingParams(**fields)
