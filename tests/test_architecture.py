"""The import rules: which package may import which, and what an import may load."""

import ast
import functools
import graphlib
import json
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = {"formats", "qkernels", "calibrate", "qserve"}
# package -> our packages that it may import
MAY_IMPORT = {
    "formats": {"formats"},
    "qkernels": {"formats", "qkernels"},
    "calibrate": {"formats", "calibrate"},
    "qserve": {"formats", "qkernels", "qserve"},
}
# inside qserve: server -> engine -> model
MAY_IMPORT_INSIDE = {
    "qserve.model": {"qserve.model"},
    "qserve.engine": {"qserve.model", "qserve.engine"},
}
# folder or module of qserve.server -> those of qserve.server that it may import besides itself
SERVER_FLOORS = {
    "http": set(),
    "adapters": {"http"},
    "requests": {"http"},
    "prepare": {"http", "requests"},
    "observability": {"http", "requests"},
    "store": {"http"},
    "service": {"adapters", "http", "observability", "prepare", "requests", "store"},
    "models": {"admin", "http", "observability", "service"},
    "openai": {"http", "models", "observability", "requests", "service", "store"},
    "anthropic": {"http", "openai", "requests", "service"},
    "admin": {"adapters", "http", "observability", "requests", "service"},
    "config": {"admin", "models", "store"},
    "page": {"admin", "anthropic", "http", "openai", "requests", "service"},
}
MAX_FILES = 20  # in a folder
# floor of qkernels -> the modules and folders of qkernels that it may import besides itself
QKERNELS_FLOORS = {
    "gpu": {"errors"},
    "operands": {"errors", "gpu"},
    "tuning": {"errors", "gpu"},
}
# operation -> modules of other operations that it may import: plans, facades, references
OPERATIONS = {
    "wna16": {"linear.plan", "linear.prepared", "lora.sm90_term", "lora.term"},
    "w8a8": {"linear.plan", "linear.prepared", "linear.reference"},
    "w4a8": {
        *("linear.plan", "linear.prepared", "linear.reference"),
        *("w8a8.sm90_epilogue", "w8a8.sm90_structs"),
    },
    "attention": {"rowwise.ops", "rowwise.reference", "rowwise.spec"},
    "latent": {
        *("attention.merge_splits", "attention.reference", "attention.cache", "attention.ops"),
        *("attention.config", "attention.triton_paged", "rowwise.arithmetic_triton"),
        *("attention.sm90_decode_8bit", "attention.selected.order"),
        *("rowwise.reference", "rowwise.spec", "attention.fixed_order.merge_segments"),
    },
    "rowwise": set(),
    "moe": {
        *("linear.ops", "linear.prepared", "linear.rows", "rowwise.ops"),
        *("wna16.layout", "wna16.prepack", "wna16.sm90_k_step", "wna16.triton_gemm"),
        *("wna16.unpack.fp4", "wna16.unpack.fp4_layout", "wna16.unpack.groups"),
        *("wna16.unpack.words",),
        *("w4a8.layout", "w4a8.prepack", "w4a8.triton_gemm"),
        *("lora.config", "lora.own_rows"),
    },
    "linear": {
        *("lora.term", "rowwise.ops", "rowwise.reference"),
        *("w4a8.rows", "w8a8.rows", "wna16.rows"),
    },
    "collective": {
        *("rowwise.arithmetic_triton", "rowwise.ops", "rowwise.reference", "rowwise.spec"),
    },
    "sampling": set(),
    "lora": set(),
    "causal_conv": set(),
    "delta_net": {"causal_conv.ops", "causal_conv.state", "causal_conv.separate_rows"},
    "mamba1": {"causal_conv.ops", "causal_conv.state", "causal_conv.separate_rows"},
    "mamba2": {"causal_conv.ops", "causal_conv.state", "causal_conv.separate_rows"},
    "drafts": {"sampling.words"},
}
# what may not be in sys.modules after an import, and in no line of the package
MUST_NOT_LOAD = {
    "formats": {"triton", "transformers", "starlette"},
    "formats.hub.fetch": {"torch", "transformers", "huggingface_hub", "httpx", "httpx2"},
    "formats.families": {"torch", "triton", "transformers"},
    "formats.architecture.rope_types": {"torch", "triton", "transformers"},
    "formats.checkpoint": {"triton", "transformers", "starlette", "formats.gguf.architectures"},
    "qkernels": {"triton", "transformers", "starlette"},
    "qkernels.quant_linear": {"triton", "transformers", "starlette", "qserve"},
    "calibrate.pipeline": {"qkernels", "qserve", "starlette", "huggingface_hub"},
    "qserve": {"torch", "transformers", "starlette"},
    # the flags need names of formats and families, not their tables and grammars
    "qserve.cli": {
        *("torch", "transformers", "starlette", "huggingface_hub", "numpy", "tokenizers"),
        *("pydantic", "asyncio", "formats.gguf.folder", "formats.families"),
        *("formats.architecture.family", "qserve.structured.grammar", "calibrate"),
    },
    "qserve.llm": {
        *("starlette", "uvicorn", "pydantic.main", "prometheus_client", "calibrate", "jinja2"),
    },
    # transformers takes seconds (filled_config.py); only GGUF files need the other tables
    "qserve.engine.engine": {
        *("starlette", "transformers", "tokenizers", "formats.gguf.architectures"),
    },
    # the command imports only this before the engine's process starts
    "qserve.engine.ipc.waiting": {
        *("torch", "numpy", "pydantic", "starlette", "uvicorn", "msgspec", "tokenizers"),
    },
    # neither side of the pipe to the engine needs torch before the engine does
    "qserve.engine.ipc.client": {"torch", "starlette"},
    "qserve.engine.ipc.process": {"torch", "starlette", "uvicorn", "prometheus_client"},
    # the server starts the engine's process after these imports
    "qserve.server.serve": {"torch", "triton", "transformers", "jinja2", "huggingface_hub"},
    "qserve.server.prepare.worker_process": {
        *("torch", "triton", "transformers", "huggingface_hub", "uvicorn", "PIL"),
    },
    "qserve.text.tokenizer": {
        *("torch", "triton", "transformers", "numpy", "jinja2", "formats.gguf.folder"),
    },
}


@functools.cache
def imports_of(path):
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append(node.module)
    return found


@pytest.mark.parametrize("package", sorted(OURS))
def test_packages_import_one_way(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        for name in imports_of(path):
            top = name.partition(".")[0]
            if top not in OURS:
                continue
            commands = (ROOT / "qserve" / "cli.py", *(ROOT / "qserve" / "commands").glob("*.py"))
            from_cli = path in commands and top == "calibrate"
            assert top in MAY_IMPORT[package] or from_cli, f"{path} imports {name}"


@pytest.mark.parametrize("package", sorted(OURS))
def test_modules_have_no_import_cycles(package):
    """Imports for types alone count, too; those inside functions, which wait, do not.

    Except for a package's own table of names, which type checkers read (tests/test_typing.py).
    """
    graph = {}
    for path in (ROOT / package).rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text())
        graph[name] = {
            found
            for node in tree.body
            for part in ([node] if not isinstance(node, ast.If) else node.body)
            if name != package or node is part
            if isinstance(part, ast.ImportFrom) and f"{part.module}.".startswith(f"{package}.")
            for found in (part.module, *(f"{part.module}.{alias.name}" for alias in part.names))
        }
    graphlib.TopologicalSorter(
        {name: found & graph.keys() - {name} for name, found in graph.items()}
    ).prepare()


@pytest.mark.parametrize("package", sorted(MAY_IMPORT_INSIDE))
def test_engine_and_model_do_not_import_upper_layers(package):
    for path in (ROOT / package.replace(".", "/")).rglob("*.py"):
        for name in imports_of(path):
            parent = ".".join(name.split(".")[:2])
            if parent in ("qserve.server", "qserve.engine", "qserve.model", "qserve.llm"):
                assert parent in MAY_IMPORT_INSIDE[package], f"{path} imports {name}"


@pytest.mark.parametrize("floor", SERVER_FLOORS)
def test_server_imports_go_down(floor):
    allowed = SERVER_FLOORS[floor] | {floor}
    place = ROOT / "qserve" / "server" / floor
    for path in place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]:
        for name in imports_of(path):
            if f"{name}.".startswith("qserve.server."):
                assert name.split(".")[2:3] and name.split(".")[2] in allowed, (
                    f"{path} imports {name}"
                )


def test_server_folders_have_a_rule():
    server = ROOT / "qserve" / "server"
    folders = {path.parent.name for path in server.glob("*/__init__.py")}
    assert folders | {path.stem for path in server.glob("*.py")} == {
        *SERVER_FLOORS,
        *("__init__", "app", "hosted_model", "serve", "web_server"),
    }


@pytest.mark.parametrize("package", sorted(OURS))
def test_folders_have_few_files(package):
    """All files count, documents and `__init__.py` too: a folder is a topic that has a name."""
    count = Counter(
        path.parent.relative_to(ROOT)
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    )
    assert {folder: n for folder, n in count.items() if n > MAX_FILES} == {}


@pytest.mark.parametrize("part", ["speculation", "lora", "kv_transfer", "profile"])
def test_engine_and_its_extensions_import_one_way(part):
    """Also inside functions. One side has protocols for what it needs of the other."""

    def imports(user, used):
        return [
            f"{path} imports {name}"
            for path in (ROOT / "qserve" / user).rglob("*.py")
            for name in imports_of(path)
            if f"{name}.".startswith(f"qserve.{used}.")
        ]

    up, down = imports("engine", part), imports(part, "engine")
    assert not (up and down), f"{up} and {down}"
    assert up or down, f"{part} is no extension of the engine"


MIXERS = ROOT / "qserve" / "model" / "blocks"


def classes_with(method, *folders):
    """Names of the classes of these folders that define a method."""
    for folder in folders:
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    defined = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                    if method in defined:
                        yield node.name


def test_caches_are_known_by_their_specs_alone():
    """Only the mixers check the type of a mixer, or compute the size of a cache."""
    mixers = set(classes_with("cache_spec", MIXERS)) - {"Mixer"}
    caches = set(classes_with("page_tensors", ROOT / "qkernels", MIXERS))
    assert mixers == {
        *("Attention", "DeltaNet", "KimiDelta", "LatentAttention", "LightningAttention"),
        *(
            "BlockAttention",
            "CompressedAttention",
            "Mamba1",
            "PlamoMamba",
            "Mamba2",
            "NoMixer",
            "RelativeAttention",
            "SharedAttention",
            "ShortConv",
            "SideBySide",
        ),
    }
    assert caches == {
        *("PagedKv", "PagedLatents", "StateSlots"),
        *("CachePair", "CompressedPages", "ConvolvedCache", "IndexedPages", "WindowPages"),
    }
    for path in (ROOT / "qserve").rglob("*.py"):
        if path.is_relative_to(MIXERS):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            place = f"{path}:{getattr(node, 'lineno', 0)}"
            named = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                asks = node.func.id in ("isinstance", "issubclass")
                assert not (asks and named & (mixers | caches)), place
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                named |= {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
                assert not {"num_kv_heads", "head_dim"} <= named, place


@functools.cache
def qkernels_imports(path):
    """Modules of qkernels that a file imports, also inside functions, named from the package on."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            while parts[0] == "qkernels" and len(parts) > 1:
                place = ROOT.joinpath(*parts)
                if place.with_suffix(".py").exists() or place.is_dir():
                    found.append(".".join(parts[1:]))
                    break
                parts.pop()
    return found


@pytest.mark.parametrize("floor", QKERNELS_FLOORS)
def test_shared_qkernels_folders_import_no_operation(floor):
    allowed = QKERNELS_FLOORS[floor] | {floor}
    for path in (ROOT / "qkernels" / floor).rglob("*.py"):
        for name in qkernels_imports(path):
            assert name.partition(".")[0] in allowed, f"{path} imports qkernels.{name}"


@pytest.mark.parametrize("module", ["dispatch", "problem", "choice"])
def test_dispatch_imports_no_operation(module):
    imported = set(qkernels_imports(ROOT / "qkernels" / f"{module}.py"))
    assert imported <= {"choice", "errors", "problem"}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_import_no_variant_of_another(operation):
    for path in (ROOT / "qkernels" / operation).rglob("*.py"):
        foreign = {
            name
            for name in qkernels_imports(path)
            if name.partition(".")[0] in OPERATIONS.keys() - {operation}
        }
        assert foreign <= OPERATIONS[operation], f"{path} imports {sorted(foreign)}"


def test_every_folder_of_qkernels_has_a_rule():
    folders = {path.parent.name for path in (ROOT / "qkernels").glob("*/__init__.py")}
    assert folders == {*QKERNELS_FLOORS, *OPERATIONS, "bench"}


# Each module in a process of its own, forked from one that has torch where the module may have it:
# to start Python and torch for each took longer than all the rest.
LOADED_BY = """
import json, os, sys
def loaded_by(module):
    read, write = os.pipe()
    if os.fork() == 0:
        __import__(module)
        with open(write, "w") as found:
            json.dump(sorted(sys.modules), found)
        os._exit(0)
    os.close(write)
    with open(read) as found:
        print(module, found.read())
    if os.wait()[1]:
        sys.exit(1)
without_torch, with_torch = map(json.loads, sys.argv[1:])
for module in without_torch:
    loaded_by(module)
import torch
for module in with_torch:
    loaded_by(module)
"""


def test_imports_load_only_what_they_need():
    parts = [[], []]
    for module in sorted(MUST_NOT_LOAD):
        parts["torch" not in MUST_NOT_LOAD[module]].append(module)
    command = [sys.executable, "-c", LOADED_BY, *map(json.dumps, parts)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    loaded = {module: set(json.loads(names)) for module, _, names in lines}
    assert all(module in loaded[module] for module in MUST_NOT_LOAD)
    for module, banned in MUST_NOT_LOAD.items():
        assert not banned & loaded[module], module


def test_every_package_is_installed():
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = [path.parent for package in OURS for path in (ROOT / package).rglob("__init__.py")]
    assert {".".join(folder.relative_to(ROOT).parts) for folder in folders} == set(stated)


PLAIN_TENSORS = 'torch.load(path, map_location="cpu", weights_only=True, mmap=True)'


def test_nothing_third_party_reads_pickles_or_remote_code():
    for package in OURS:
        for path in (ROOT / package).rglob("*.py"):
            # torch's own reader of plain tensors runs no code of the file
            text = path.read_text().replace(PLAIN_TENSORS, "")
            for banned in ("import pickle", "torch.load(", "trust_remote_code=True", "eval("):
                assert banned not in text.replace("model.eval()", ""), f"{path}: {banned}"


def test_shadowed_sibling_is_named(tmp_path):
    (tmp_path / "formats").mkdir()
    (tmp_path / "formats" / "__init__.py").write_text("")
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.path.append(sys.argv[1]); import qserve",
            str(ROOT),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert run.returncode != 0
    assert "ImportError: qserve needs its own package 'formats'" in run.stderr
    assert str(tmp_path) in run.stderr


@pytest.mark.parametrize("package", sorted(OURS))
def test_progress_bars_close_before_errors(package):
    """A loop over a progress bar leaves it open when it raises, and the error shares its line."""
    for path in (ROOT / package).rglob("*.py"):
        tree = ast.parse(path.read_text())
        loops = (ast.For, ast.AsyncFor, ast.comprehension)
        for loop in (node for node in ast.walk(tree) if isinstance(node, loops)):
            called = [node.func for node in ast.walk(loop.iter) if isinstance(node, ast.Call)]
            names = [each.id for each in called if isinstance(each, ast.Name)]
            assert "tqdm" not in names, f"{path}:{loop.iter.lineno}: with tqdm(...) as bar"
