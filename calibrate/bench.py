"""`qserve bench quantize`: measure the time and memory of quantizing a few layers.

The layers have a published model's shape and random weights. One layer is quantized first, because
loading and compiling kernels takes time once in a process. The time for all layers is extrapolated
from the others; the output says so.
"""

import json
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from calibrate.bench_sizes import SIZES
from calibrate.devices import Devices
from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.errors import InputError
from formats.names import BENCH_SHAPES
from formats.scheme import Scheme

_LLAMA = {  # keys and values that SIZES leaves out
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
CONFIGS = {name: {**_LLAMA, **sizes} for name, sizes in SIZES.items()}  # each model's config.json
assert tuple(CONFIGS) == BENCH_SHAPES
FEW_TOKENS = 1024  # vocabulary of the model whose layer is quantized first
TIMED = ("statistics", "solving", "next inputs", "tuning")  # stages that take time in each layer


def _weights(config: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of each weight of a layer, without the layer's prefix."""
    hidden, head = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    yield "self_attn.q_proj.weight", (queries, hidden)
    yield "self_attn.k_proj.weight", (keys, hidden)
    yield "self_attn.v_proj.weight", (keys, hidden)
    yield "self_attn.o_proj.weight", (hidden, queries)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    experts = config.get("num_experts")
    if experts is None:
        blocks, inner = ["mlp"], config["intermediate_size"]
    else:
        yield "self_attn.q_norm.weight", (head,)
        yield "self_attn.k_norm.weight", (head,)
        yield "mlp.gate.weight", (experts, hidden)
        blocks = [f"mlp.experts.{expert}" for expert in range(experts)]
        inner = config["moe_intermediate_size"]
    for block in blocks:
        yield f"{block}.gate_proj.weight", (inner, hidden)
        yield f"{block}.up_proj.weight", (inner, hidden)
        yield f"{block}.down_proj.weight", (hidden, inner)


def write_model(folder: Path, config: dict, layers: int, device: str = "cpu") -> None:
    """Write a float model with random weights and one file per layer, as large models have.

    `device`: where the weights are drawn. A layer of an 8B model takes seconds on one CPU core.
    """
    generator = torch.Generator(device).manual_seed(0)
    weight_map = {}

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        drawn = torch.randn(shape, generator=generator, device=device)
        return drawn.mul_(0.02).to("cpu", torch.bfloat16)

    def save(file_name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file_name))

    ends = (config["vocab_size"], config["hidden_size"])
    save(
        "ends.safetensors",
        {
            "model.embed_tokens.weight": random(ends),
            "model.norm.weight": random(ends[1:]),
            "lm_head.weight": random(ends),
        },
    )
    for layer in range(layers):
        named = {f"model.layers.{layer}.{name}": random(of) for name, of in _weights(config)}
        save(f"layer-{layer}.safetensors", named)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))


def _timed(stages: dict[str, float]) -> float:
    """Return the seconds of the stages that take time in each layer."""
    return sum(stages.get(name, 0.0) for name in TIMED)


def _limit_memory(devices: Devices, gigabytes: float) -> None:
    """Let PyTorch reserve at most this many GB (10^9 bytes) on each GPU."""
    if devices.kind != "cuda":
        raise InputError("--gpu-memory", f"--device is {devices.kind}, not a GPU", "remove it")
    for name in devices.names:
        total = torch.cuda.get_device_properties(name).total_memory / 1e9
        if gigabytes > total:
            raise InputError(
                f"--gpu-memory {gigabytes:g}", f"{name} has {total:.0f} GB", "use less or remove it"
            )
        number = torch.device(name).index or 0  # "cuda" is the first one
        torch.cuda.set_per_process_memory_fraction(gigabytes / total, number)


def bench_quantize(
    *,
    shape: str,
    layers: int,
    samples: int,
    sequence_length: int,
    recipe: str,
    scheme: str,
    device: str,
    gpu_memory: float | None,
    output_json: str | None,
) -> int:
    """Quantize one layer and then `layers` layers, and print time and memory of the latter.

    With `gpu_memory`, in GB, PyTorch may not reserve more on each GPU; exceeding it is an error.
    """
    config = CONFIGS[shape]
    whole = config["num_hidden_layers"]
    if layers > whole:
        raise InputError(
            f"--layers {layers}", f"{shape} has {whole} layers", f"use at most {whole}"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    devices = Devices.parse(device)
    if gpu_memory is not None:
        _limit_memory(devices, gpu_memory)

    def quantize(config: dict, layers: int) -> dict[str, float]:
        """Return the seconds of each stage."""
        with tempfile.TemporaryDirectory() as work:
            source = Path(work) / "source"
            source.mkdir()
            write_model(source, config, layers, devices.first)
            windows = (samples, sequence_length)
            ids = torch.randint(0, config["vocab_size"], windows, generator=torch.Generator())
            return quantize_checkpoint(
                source,
                Path(work) / "out",
                scheme=Scheme.parse(scheme),
                recipe=recipe,
                calibration=CalibrationData(ids_WS=ids, source="random token ids", seed=0),
                device=device,
            ).seconds_by_stage

    first = _timed(quantize({**config, "vocab_size": FEW_TOKENS}, 1))
    stages = quantize(config, layers)
    print({name: round(seconds, 2) for name, seconds in stages.items()})
    solving = _timed(stages)
    per_layer = solving / layers
    projected = per_layer * whole + max(0.0, first - per_layer)
    print(
        f"{layers} layers of {shape}, {recipe}, {samples} x {sequence_length} tokens on"
        f" {device}: {solving:.1f} s for {', '.join(name for name in TIMED if name in stages)}"
        f" (the first layer of this process before them: {first:.1f} s); projected to {whole}"
        f" layers (not measured): {projected:.0f} s"
    )
    peaks = []
    if devices.kind == "cuda":
        peaks = [torch.cuda.max_memory_allocated(name) / 1e9 for name in devices.names]
        print(f"{torch.cuda.get_device_name(devices.first)}, torch {torch.__version__}")
        print(f"peak GPU memory: {', '.join(f'{peak:.2f}' for peak in peaks)} GB")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"peak host memory (including the creation of the random model): {peak:.2f} GB")
    if output_json is not None:
        result = {
            "shape": shape,
            "layers": layers,
            "recipe": recipe,
            "scheme": scheme,
            "seconds_by_stage": stages,
            "seconds_of_first_layer": first,
            "seconds_per_layer": per_layer,
            "projected_seconds": projected,
            "peak_host_gb": peak,
            "torch": torch.__version__,
        }
        if peaks:
            result["device"] = torch.cuda.get_device_name(devices.first)
            result["devices"] = len(peaks)
            result["peak_gpu_gb"] = max(peaks)
        Path(output_json).write_text(json.dumps(result, indent=4) + "\n")
    return 0
