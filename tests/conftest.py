"""Models for the tests: the bundled one, its quantized form, tiny random ones of each family.

Imports of torch and of this project are inside functions: the process that hands out the tests to
workers never calls these, and starts its workers 3 s earlier without them.
"""

import functools
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent
# Written by measure_slow_tests.py: they count as exhaustive.
SLOW_TESTS = frozenset((ROOT / "tests" / "slow_tests.txt").read_text().splitlines())

LEFT_OUT = pytest.StashKey[int]()  # number of exhaustive tests that this run leaves out

if "OMP_NUM_THREADS" not in os.environ:
    # Workers that each compute on all cores wait for each other; so do the processes they start.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = max(1, (os.cpu_count() or 1) // workers)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """A worker more than cores: where a test waits for a server, its core has another to run."""
    return (yield) + 1


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and is_whole(config):
        from tests.worker_order import WorkerOrder

        config.pluginmanager.register(WorkerOrder(os.environ["PYTEST_XDIST_WORKER"]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep modules and tests out of garbage collection: each full one took 0.5 to 0.8 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish() -> None:
    """Let torch's loggers propagate. For each test, pytest adds a handler to and removes it from
    every logger that does not, six times: 1 ms of CPU time for the 50 loggers of torch.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(scope="session", autouse=True)
def kernels_compile_where_they_are_launched():
    """Workers that each start a compile process for every core would wait for each other."""
    import torch

    if not torch.cuda.is_available():
        yield
        return
    from qkernels.gpu import compile_pool

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_pool, "MAX_WORKERS", 0)
        yield


MAX_PAGES = 512  # 8,192 tokens in pages of the usual size


@pytest.fixture(scope="session", autouse=True)
def engines_have_few_pages():
    """On a CPU, where a test does not set their number: filling those of 256 requests with zeros
    took two thirds of the start of a tiny engine.
    """
    import torch

    from qserve.config import EngineConfig

    worker = sys.modules.get("qserve.engine.runner.worker")
    if worker is None or torch.cuda.is_available():
        yield
        return
    fit, usual = worker.num_pages_in, EngineConfig(model="").cpu_kv_cache_memory

    def fewer(memory: float, *others: object) -> object:
        found = fit(memory, *others)
        if memory != usual:
            return found
        return found._replace(num_pages=min(found.num_pages, MAX_PAGES))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "num_pages_in", fewer)
        yield


@pytest.fixture(autouse=True)
def root_logger_keeps_its_level():
    """Commands that run inside a test set it, for all tests that follow."""
    root = logging.getLogger()
    level = root.level
    yield
    if root.level != level:  # setting it clears the caches of all loggers
        root.setLevel(level)


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive", action="store_true", help="also what is marked exhaustive: all parameters"
    )
    parser.addoption(
        "--exhaustive-part",
        metavar="I/N",
        help="of what is marked exhaustive, the I-th of N parts, counted from 0",
    )
    parser.addoption(
        "--all-cards",
        action="store_true",
        help="compile every case for every card (tests/qkernels/compile); takes 20 minutes",
    )
    group = parser.getgroup("fuzz", "tests/qkernels/fuzz/test_kernels.py")
    group.addoption("--fuzz-seconds", type=float, default=4, help="how long it draws problems")
    group.addoption("--fuzz-seed", type=int, default=0, help="what it draws them from")
    group.addoption("--fuzz-replay", help="one problem, as a failure prints it")


def pytest_collection_modifyitems(config, items):
    """A GPU runs everything: its exhaustive tests take seconds there."""
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        # not its keywords: folders and parameters are named so
        if item.get_closest_marker("gpu") or item.get_closest_marker("hopper"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        elif item.nodeid in SLOW_TESTS:
            item.add_marker("exhaustive")
    part = config.getoption("--exhaustive-part")
    if part or not config.getoption("--exhaustive"):
        left_out = [
            item
            for item in items
            if (marker := item.get_closest_marker("exhaustive"))
            and not (part and is_in_part(item, part))
            and not (marker.kwargs.get("every_part") and not is_whole(config))
        ]
        config.hook.pytest_deselected(items=left_out)
        dropped = set(left_out)
        items[:] = [item for item in items if item not in dropped]
        config.stash[LEFT_OUT] = len(left_out)


def pytest_terminal_summary(terminalreporter, config):
    """Report why tests that were requested by their marker did not run."""
    marks, count = config.getoption("markexpr"), config.stash.get(LEFT_OUT, 0)
    if count and "exhaustive" in marks.replace("not exhaustive", ""):
        text = f"-m {marks!r}: {count} exhaustive tests did not run; add --exhaustive"
        terminalreporter.write_line(text, yellow=True)


def is_whole(config: pytest.Config) -> bool:
    """Return True for a run of all tests, not of some files."""
    return config.args_source is config.ArgsSource.TESTPATHS or config.args == ["tests"]


def is_in_part(item: pytest.Item, part: str) -> bool:
    """Return True if the test is in part "I/N". Equal parameters of a file share fixtures, so they
    are in the same part. `exhaustive(every_part=True)`: it is in every part, and in a run of its
    own file.
    """
    if item.get_closest_marker("exhaustive").kwargs.get("every_part"):
        return True
    number, count = map(int, part.split("/"))
    parameters = item.nodeid.partition("[")[2] or item.nodeid
    return zlib.crc32(f"{item.path.name} {parameters}".encode()) % count == number


@pytest.fixture(scope="session")
def docs_5m() -> Path:
    """The bundled float model."""
    return ROOT / "examples" / "models" / "docs-5m"


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """(name, make) -> the folder that make(folder) wrote, in one worker of the run for all."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    base = base / "shared"
    base.mkdir(exist_ok=True)

    def made(name: str, make: Callable[[Path], object]) -> Path:
        folder = base / name
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                staged = Path(tempfile.mkdtemp(dir=base)) / name
                make(staged)
                staged.rename(folder)
                staged.parent.rmdir()
        return folder

    return made


@pytest.fixture(scope="session")
def quantized_5m(docs_5m, made_once) -> Path:
    """The bundled model as `qserve quantize --scheme w4a16-sym` writes it."""
    from calibrate.pipeline import quantize_checkpoint
    from formats.scheme import Scheme

    return made_once(
        "docs-5m-w4a16",
        lambda folder: quantize_checkpoint(
            docs_5m, folder, scheme=Scheme.parse("w4a16-sym"), progress=False
        ),
    )


@pytest.fixture(scope="session")
def tiny_model(made_once):
    """family -> folder of a tiny random float model, made once."""
    from tests.tiny_families import TINY_FAMILIES

    def made(family: str) -> Path:
        config_class, extra = TINY_FAMILIES[family]
        _register(config_class)  # also where another process made the folder
        return made_once(family, lambda folder: make_tiny(folder, config_class, extra))

    return functools.cache(made)


@pytest.fixture(scope="session")
def own_code(made_once):
    """Name of a tiny model without a class in transformers -> its folder, made once."""
    from tests.own_code.models import TINY_MODELS, VARIANTS, write

    models = {**TINY_MODELS, **VARIANTS}

    def made(name: str) -> Path:
        return made_once(f"own-code-{name}", lambda folder: write(folder, models[name]()))

    return functools.cache(made)


def _register(config_class: str) -> None:
    """Let AutoModelForCausalLM find a class that transformers lists with models that see."""
    if config_class == "Mistral4Config":
        import transformers

        transformers.AutoModelForCausalLM.register(
            transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True
        )
    if config_class == "Step3p7TextConfig":
        from tests import step_for_causal_lm

        step_for_causal_lm.register()
    if config_class == "MiniMaxM3VLTextConfig":
        from tests import minimax_m3_for_causal_lm

        minimax_m3_for_causal_lm.register()
    if config_class == "MuseGlimmerTextConfig":
        from tests import muse_for_causal_lm

        muse_for_causal_lm.register()


def make_tiny(folder: Path, config_class: str, extra: dict) -> Path:
    """Write a tiny random float model."""
    import torch
    import transformers

    from tests.tiny_families import TINY

    _register(config_class)
    if not hasattr(transformers, config_class):
        pytest.skip(f"transformers {transformers.__version__} has no {config_class}")
    make_config = getattr(transformers, config_class)
    # A published config.json has the keys that its class declares.
    declared = make_config()
    declared.allow_global_per_layer_attribute_access = True  # some layers may have other values
    usual = {key: value for key, value in TINY.items() if hasattr(declared, key)}
    config = make_config(**{**usual, **extra})
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name or "sinks" in name:
            # Some families' norms multiply by 1 + weight.
            adds_one = config_class.startswith(
                ("Gemma", "VaultGemma", "Qwen3Next", "Qwen3_5", "NemotronC", "Step3p7", "Muse")
                + ("MiniMaxM3",)
            )
            adds_one &= not config_class.startswith(("Gemma4", "Gemma3n"))
            is_norm = "norm" in name and "bias" not in name
            adds_one &= not (config_class.startswith("Muse") and name == "model.norm.weight")
            is_one = is_norm and (not adds_one or "linear_attn" in name)
            torch.nn.init.normal_(parameter, float(is_one), 0.2)
        scales = ("router.scale", "per_expert_scale", "alpha_p", "alpha_n", "output_scale")
        scales += ("global_scale",)
        if name.endswith(scales):
            torch.nn.init.normal_(parameter, 1.0, 0.4)
        if "_hc." in name or "hc_head." in name:  # scales and offsets of hyper-connections
            torch.nn.init.normal_(parameter, 0.0, 0.3)
        if name.endswith(".D") or (name.endswith(".A_log") and parameter.ndim == 2):
            torch.nn.init.normal_(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith(("correction_bias", "expert_bias", "layer_scalar")):
            torch.nn.init.normal_(buffer, float(name.endswith("scalar")), 0.2)
        if name.endswith("tid2eid"):  # distinct experts of each token
            count, chosen = config.n_routed_experts, buffer.shape[1]
            buffer.copy_(torch.rand(len(buffer), count).argsort(1)[:, :chosen])
    if getattr(config, "tie_word_embeddings", False) and "Qwen" not in config_class:
        # A head that is the embedding says the last token again where embeddings are large.
        with torch.no_grad():
            model.get_input_embeddings().weight.div_(16)
    model.save_pretrained(folder)
    return folder


# names in files that transformers changes as it loads them
STORED_NAMES = {
    **{"embed_out.": "lm_head.", ".mlp.moe_statics.": ".mlp.gate.moe_statics."},
    **{"backbone.": "model.", ".router.layer.": ".router."},
    ".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
}
# the same, of one model_type; they come instead of those
OWN_NAMES = {
    "axk1": {".post_mlp_layernorm.": ".mlp.post_mlp_layernorm."},
    "flint": {".softmax_offset": ".sinks"},
    **{"mamba": {}, "falcon_mamba": {}, "mamba2": {}},
    "hy_v3": {
        **{".mlp.router.gate.": ".mlp.gate.", ".mlp.shared_mlp.": ".mlp.shared_experts."},
        ".mlp.expert_bias": ".mlp.e_score_correction_bias",
    },
    "laguna": {
        ".mlp.experts.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
        ".mlp.shared_expert.": ".mlp.shared_experts.",
    },
    "mimo_v2_flash": {".attention_sink_bias": ".sinks"},
    "step3p5": {
        **{".moe.router_bias": ".mlp.gate.e_score_correction_bias", ".moe.": ".mlp."},
        ".share_expert.": ".mlp.shared_experts.",
    },
    "phimoe": {".block_sparse_moe.gate.": ".mlp.router."},
    "minimax_m3_vl_text": {
        ".block_sparse_moe.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
        ".self_attn.index_": ".self_attn.indexer.",
    },
}
# model_type -> what its modules call `mlp`
MLP_NAMES = dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoe_swa"), "block_sparse_moe")
MLP_NAMES |= {"granitemoehybrid": "block_sparse_moe", "llama4_text": "feed_forward"}


def module_name(name: str, model_type: str) -> str:
    """Name in transformers' modules of a tensor of a file."""
    for stored, own in OWN_NAMES.get(model_type, STORED_NAMES).items():
        name = name.replace(stored, own)
    return name


@pytest.fixture(scope="session")
def transformers_model():
    """folder -> transformers' model in float32, with quantized linears dequantized."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from formats.checkpoint import CheckpointReader
    from formats.codecs import gptq
    from formats.quant_config import BLOCK, QuantConfig
    from tests.tiny_families.merged import with_merged_gates, with_stacked_experts
    from tests.tiny_families.published import names_by_published

    def load(folder: Path):
        reader = CheckpointReader(folder)
        raw = dict(reader.config)
        block = raw.pop(BLOCK, None)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(raw.pop("model_type"), **raw), dtype=torch.float32
        )
        state, kind = {}, reader.config["model_type"]
        names = names_by_published(model) if kind == "deepseek_v4" else {}
        for name in reader.entries:
            module, _, leaf = name.rpartition(".")
            if leaf == "qweight":
                tensors = {n: reader.get(f"{module}.{n}") for n in gptq.TENSOR_NAMES}
                spec = QuantConfig.from_dict(block).scheme.weight
                weight = gptq.decode(tensors, spec).dequantize()
                own = names.get(f"{module}.weight") or module_name(f"{module}.weight", kind)
                state[own] = weight
            elif leaf not in gptq.TENSOR_NAMES:
                state[names.get(name) or module_name(name, kind)] = reader.get(name)
        if reader.config["model_type"] == "gpt2":  # Conv1D's weights are [inputs, outputs]
            for name in state:
                if re.fullmatch(r".*\.h\.\d+\.(attn|mlp)\.c_\w+\.weight", name):
                    state[name] = state[name].T
        own = MLP_NAMES.get(reader.config["model_type"], "mlp")
        state = {name.replace(f".{own}.", ".mlp."): tensor for name, tensor in state.items()}
        state = with_stacked_experts(state)
        if kind == "minimax_m3_vl_text":
            state = with_merged_gates(state)
        if own == "feed_forward":  # [experts, inputs, outputs]
            state = {name: x.mT if ".experts." in name else x for name, x in state.items()}
        state = {name.replace(".mlp.", f".{own}."): tensor for name, tensor in state.items()}
        _check_group_norms(model)
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight", "output_projection.weight"}
        model.tie_weights()
        return model.eval()

    return load


def _check_group_norms(model) -> None:
    """Skip where transformers, up to 5.17 at least, norms all groups of Granite as one."""
    norms = [each for each in model.modules() if type(each).__name__.endswith("RMSNormGated")]
    is_granite = model.config.model_type == "granitemoehybrid"
    if is_granite and norms and not hasattr(norms[0], "group_size"):
        import transformers

        pytest.skip(f"transformers {transformers.__version__} ignores mamba_n_groups in the norm")


START_SECONDS, STOP_SECONDS = 120, 30


class Server:
    """`qserve serve` on a free port, until stopped."""

    def __init__(self, model, log_path, *flags):
        self.log_path = log_path
        command = [sys.executable, "-m", "qserve.cli", "serve", str(model), "--port", "0"]
        with open(log_path, "w") as log:
            self.process = subprocess.Popen(
                [*command, *flags], stdout=log, stderr=subprocess.STDOUT
            )
        self.url = self._wait_for_url()

    def _wait_for_url(self):
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            found = re.search(r"^Serving .* on (http:\S+)$", self.log_path.read_text(), re.M)
            if found:
                return found[1]
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError(f"the server did not start:\n{self.log_path.read_text()}")

    def client(self, key="none"):
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def stop(self):
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)


@pytest.fixture(scope="session")
def start_server(tmp_path_factory):
    """(model folder, *flags) -> a running Server, on the CPU unless a flag says otherwise."""
    servers = []

    def start(model, *flags):
        device = () if "--device" in flags else ("--device", "cpu")
        log_path = tmp_path_factory.mktemp("server") / "log"
        servers.append(Server(model, log_path, *device, *flags))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
