"""`qserve bench quantize`: measure the time and memory of quantizing a few layers.

The layers have Llama-3-8B's shape and random weights. The time for all 32 layers is extrapolated
from the measured layers; the output says so.
"""

import json
import resource
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from calibrate.devices import Devices
from calibrate.pipeline import quantize_checkpoint
from calibrate.texts.data import CalibrationData
from formats.scheme import Scheme

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
WHOLE = 32  # layers of Llama-3-8B
TIMED = ("statistics", "solving", "next inputs", "tuning")  # stages that take time in each layer
LINEARS = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
}


def write_model(folder: Path, layers: int) -> None:
    """Write a float model with random weights and one file per layer, as large models have."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).mul_(0.02).to(torch.bfloat16)

    weight_map = {}

    def save(file_name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file_name))

    save(
        "ends.safetensors",
        {
            "model.embed_tokens.weight": random(CONFIG["vocab_size"], 4096),
            "model.norm.weight": torch.ones(4096, dtype=torch.bfloat16),
            "lm_head.weight": random(CONFIG["vocab_size"], 4096),
        },
    )
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors = {f"{prefix}.{name}.weight": random(*shape) for name, shape in LINEARS.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(4096, dtype=torch.bfloat16)
        save(f"layer-{layer}.safetensors", tensors)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))


def bench_quantize(
    *,
    layers: int,
    samples: int,
    sequence_length: int,
    recipe: str,
    scheme: str,
    device: str,
    output_json: str | None,
) -> int:
    """Quantize some layers and print time and memory."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "source"
        source.mkdir()
        write_model(source, layers)
        shape = (samples, sequence_length)
        ids = torch.randint(0, CONFIG["vocab_size"], shape, generator=torch.Generator())
        report = quantize_checkpoint(
            source,
            Path(work) / "out",
            scheme=Scheme.parse(scheme),
            recipe=recipe,
            calibration=CalibrationData(ids_WS=ids, source="random token ids", seed=0),
            device=device,
        )
    stages = report.seconds_by_stage
    print({name: round(seconds, 2) for name, seconds in stages.items()})
    solving = sum(stages.get(name, 0.0) for name in TIMED)
    print(
        f"{layers} layers, {recipe}, {shape[0]} x {shape[1]} tokens on"
        f" {device}: {solving:.1f} s for {', '.join(name for name in TIMED if name in stages)};"
        f" projected to {WHOLE} layers (not measured): {solving * WHOLE / layers:.0f} s"
    )
    devices = Devices.parse(device)
    peaks = []
    if devices.kind == "cuda":
        peaks = [torch.cuda.max_memory_allocated(name) / 1e9 for name in devices.names]
        print(f"{torch.cuda.get_device_name(devices.first)}, torch {torch.__version__}")
        print(f"peak GPU memory: {', '.join(f'{peak:.2f}' for peak in peaks)} GB")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"peak host memory (including the creation of the random model): {peak:.2f} GB")
    if output_json is not None:
        result = {
            "layers": layers,
            "recipe": recipe,
            "scheme": scheme,
            "seconds_by_stage": stages,
            "seconds_per_layer": solving / layers,
            "projected_seconds": solving * WHOLE / layers,
            "peak_host_gb": peak,
            "torch": torch.__version__,
        }
        if peaks:
            result["device"] = torch.cuda.get_device_name(devices.first)
            result["devices"] = len(peaks)
            result["peak_gpu_gb"] = max(peaks)
        Path(output_json).write_text(json.dumps(result, indent=4) + "\n")
    return 0
