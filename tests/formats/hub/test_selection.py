"""Choice of files: exactly those that a program reads, judged by lists of real repositories."""

import pytest

from formats.errors import CheckpointError, InputError
from formats.hub.name import HubName, served_name
from formats.hub.selection import (
    ADAPTER,
    DRAFTER,
    INDEX,
    MODEL,
    TOKENIZER,
    gguf_files,
    indexed_files,
    side_files,
    weight_files,
)
from tests.formats.hub.conftest import NEEDED, NOT_NEEDED

# meta-llama/Llama-3.1-8B-Instruct, on the hub
LLAMA = [
    *(".gitattributes", "LICENSE", "README.md", "USE_POLICY.md", "config.json"),
    *("generation_config.json", "special_tokens_map.json", "tokenizer.json"),
    *(f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)),
    *(INDEX, "tokenizer_config.json", "original/consolidated.00.pth"),
    *("original/params.json", "original/tokenizer.model"),
]
GGUF_FILES = [
    *("README.md", "m-Q4_K_M.gguf", "m-Q4_0.gguf", "m-Q8_0-00001-of-00002.gguf"),
    *("m-Q8_0-00002-of-00002.gguf", "mmproj-m-f16.gguf", "BF16/m-BF16.gguf"),
]


def test_repository_side_files():
    assert side_files(LLAMA, MODEL) == sorted(
        [
            *("config.json", "generation_config.json", "special_tokens_map.json"),
            *("tokenizer.json", "tokenizer_config.json", INDEX),
        ]
    )
    assert side_files([*NEEDED, *NOT_NEEDED], MODEL) == sorted(NEEDED)
    assert weight_files(LLAMA, MODEL, "", "m") is None


def test_embedding_model_modules_are_selected():
    files = ["modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors", "2_Dense/x.bin"]
    files += ["onnx/config.json", "1_Pooling/deep/config.json"]
    assert side_files(files, MODEL) == sorted(files[:3])


def test_subfolder_selects_its_files():
    files = ["config.json", "model.safetensors", "a/b/config.json", "a/b/model.safetensors"]
    assert side_files(files, MODEL, "a/b/") == ["a/b/config.json"]
    assert weight_files(files, MODEL, "a/b/", "m") == ["a/b/model.safetensors"]


def test_adapter_and_tokenizer_files():
    files = [
        "adapter_config.json",
        "adapter_model.safetensors",
        "adapter_model.bin",
        "tokenizer.json",
    ]
    assert side_files(files, ADAPTER) == ["adapter_config.json"]
    assert weight_files(files, ADAPTER, "", "m") == ["adapter_model.safetensors"]
    assert weight_files([files[0], files[2]], ADAPTER, "", "m") == ["adapter_model.bin"]
    assert side_files(files, TOKENIZER)[-1] == "tokenizer.json"
    assert weight_files(files, TOKENIZER, "", "m") == []


def test_weights_in_mistrals_format():
    shards = [f"consolidated-0000{i}-of-00002.safetensors" for i in (1, 2)]
    files = ["params.json", "tekken.json", "README.md", *shards, "tokenizer.model.v3"]
    assert weight_files(files, MODEL, "", "m") == shards
    assert side_files(files, MODEL) == ["params.json", "tekken.json", "tokenizer.model.v3"]
    both = [*files, "config.json", "model.safetensors"]
    assert weight_files(both, MODEL, "", "m") == ["model.safetensors"]
    inner = ["a/params.json", "a/consolidated.safetensors", "params.json"]
    assert weight_files(inner, MODEL, "a/", "m") == ["a/consolidated.safetensors"]


@pytest.mark.parametrize("file", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_torch_files_are_selected_only_for_draft_heads(file):
    files = ["config.json", file]
    assert weight_files(files, DRAFTER, "", "m") == [file]
    with pytest.raises(CheckpointError, match=f"m: has only pickled weights.*{file}"):
        weight_files(files, MODEL, "", "m")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["config.json"], "has no model.safetensors.index.json or model.safetensors"),
        (["config.json", "gptq.safetensors"], "has no model.safe.*: gptq.safetensors .choose"),
        (["config.json", "m.gguf"], "has GGUF files alone: m.gguf"),
        (["a/config.json", "a/model.safetensors"], "has no config.json .add --subfolder a"),
        (["README.md"], "has no config.json .is this the repository of the model"),
        (["consolidated.safetensors"], "has no config.json: consolidated"),
        (["consolidated.00.pth", "params.json"], "has only pickled weights.*consolidated.00.pth"),
    ],
)
def test_repository_without_weights_is_refused(files, words):
    with pytest.raises(CheckpointError, match=f"^m: {words}"):
        weight_files(files, MODEL, "", "m")


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/x.safetensors",
        "a/../../x.safetensors",
        "a//x.safetensors",
        "x.bin",
        "a\\x.safetensors",
        3,
    ],
)
def test_index_entries_stay_in_folder(name):
    with pytest.raises(CheckpointError, match="not a safetensors file of its folder"):
        indexed_files({"weight_map": {"a": "model.safetensors", "b": name}}, "m")


def test_index_entries_in_sub_folders_are_chosen():
    listed = {"weight_map": {"a": "vision/model.safetensors", "b": "text/model.safetensors"}}
    assert indexed_files(listed, "m") == ["text/model.safetensors", "vision/model.safetensors"]


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_index_without_files_is_refused(index):
    with pytest.raises(CheckpointError, match="has no weight_map"):
        indexed_files(index, "m")


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("m-Q4_0.gguf", ["m-Q4_0.gguf"]),
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("q4_k_m", ["m-Q4_K_M.gguf"]),
        ("Q8_0", ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]),
        ("m-Q8_0-00002-of-00002.gguf", GGUF_FILES[3:5]),
        ("BF16", ["BF16/m-BF16.gguf"]),
        ("BF16/m-BF16.gguf", ["BF16/m-BF16.gguf"]),
        ("mmproj-m-f16.gguf", ["mmproj-m-f16.gguf"]),
    ],
)
def test_gguf_by_name_and_type(wanted, found):
    assert gguf_files(GGUF_FILES, wanted, "o/m") == found


def test_gguf_without_name():
    assert gguf_files(["a.gguf", "mmproj.gguf"], None, "o/m") == ["a.gguf"]
    with pytest.raises(InputError, match="several GGUF files match; it has BF16/m-BF16.gguf, m-Q4"):
        gguf_files(GGUF_FILES, None, "o/m")
    with pytest.raises(InputError, match="no GGUF file matches; it has BF16/m-BF16.gguf, m-Q4"):
        gguf_files(GGUF_FILES, "_M", "o/m")
    with pytest.raises(InputError, match="has no GGUF file"):
        gguf_files(LLAMA, "Q4_0", "o/m")


@pytest.mark.parametrize(
    ("text", "repo", "gguf", "revision"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None, None),
        ("o/m@v1.0", "o/m", None, "v1.0"),
        ("o/m@refs/pr/3", "o/m", None, "refs/pr/3"),
        ("o/m:Q4_0", "o/m", "Q4_0", None),
        ("o/m:sub/x.gguf@main", "o/m", "sub/x.gguf", "main"),
    ],
)
def test_hub_name_parses(text, repo, gguf, revision):
    found = HubName.parse(text)
    assert found == HubName(repo=repo, gguf=gguf, revision=revision) and str(found) == text
    assert served_name(text) == repo


@pytest.mark.parametrize(
    "text",
    [
        *("gpt2", "./o/m", "/o/m", "o/m/", "a/b/c", "~/m", "o//m", "../m", "o/..", "o/m:../x.gguf"),
        *(
            "o/m@",
            "o/m:",
            "",
            " o/m",
            "o/m\n",
            "-o/m",
            "o/m@../../x",
            "C:\\m",
            "o/a--b",
            "o/" + "x" * 200,
        ),
        "https://huggingface.co/o/m",
    ],
)
def test_local_paths_are_not_hub_names(text):
    assert HubName.parse(text) is None and served_name(text) == text


def test_two_revisions_are_refused():
    name = HubName.parse("o/m@a")
    assert name.at("a") == name and HubName.parse("o/m").at("a") == name
    with pytest.raises(InputError, match="--revision: b conflicts with o/m@a"):
        name.at("b")
