"""Measure decoding offline: milliseconds per step and tokens/s for several batch sizes.

    python examples/bench_generate.py --shape llama-3-8b --batch 1 8 32

The model has random weights in the given shape, W4A16 symmetric in groups of 128 (or --float). The
speed is real, the text is meaningless. Each printed line is one batch size, with --input tokens in
and --output tokens out per request.
"""

import argparse
import itertools
import json
import logging
import os
import platform
import tempfile
import time
from pathlib import Path

import torch

from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme
from qserve import LLM, SamplingParams
from qserve.config import KV_CACHE_DTYPES

SHAPES = {
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    "qwen3-embedding-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151669,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "rope_theta": 1000000.0,
    },
    "tiny-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 256,
        "intermediate_size": 768,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
    },
    "gemma-3-12b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "vocab_size": 262208,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        },
        "tie_word_embeddings": True,
    },
    "phi-4-14b": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "vocab_size": 100352,
        "rope_theta": 250000.0,
        "pad_token_id": 0,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
    },
}


def write_config(folder: Path, shape: str, scheme: str | None) -> None:
    """A model folder that holds nothing but config.json. `scheme` None: float weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        **SHAPES[shape],
    }
    if scheme is not None:
        method = "compressed-tensors" if scheme.startswith("w8a8") else "gptq"
        config[BLOCK] = QuantConfig(method=method, scheme=Scheme.parse(scheme)).to_dict()
    (folder / "config.json").write_text(json.dumps(config))


def resident_gib() -> float:
    """Resident memory of this process; nan on systems without /proc."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return float("nan")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**30


def measure(llm: LLM, batch: int, num_input: int, num_output: int) -> dict[str, float]:
    """Time to the first token of all requests, then the mean time of a decode step.

    No prompt is repeated, so the prefix cache has no hits.
    """
    numbers = itertools.count()

    def prompt(number: int) -> list[int]:
        return [(number * 7919 + j * 31) % 1000 + 7 for j in range(num_input)]

    def run(tokens: int) -> float:
        prompts = [prompt(next(numbers)) for _ in range(batch)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    run(2)
    first = min(run(1) for _ in range(3))
    whole = min(run(num_output) for _ in range(2))
    step = (whole - first) / (num_output - 1)
    return {
        "batch": batch,
        "first_ms": first * 1e3,
        "step_ms": step * 1e3,
        "decode_tokens_per_s": batch / step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument(
        "--max-model-len",
        type=int,
        help="what attention's parts are chosen for; default: --input and --output, at most 8192",
    )
    parser.add_argument("--float", action="store_true", help="float weights instead of W4A16")
    parser.add_argument("--dtype", default="auto", help="of activations; auto is float32 on a CPU")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), arguments.shape, None if arguments.float else "w4a16-sym")
        started = time.perf_counter()
        llm = LLM(
            folder,
            load_format="dummy",
            dtype=arguments.dtype,
            enforce_eager=arguments.enforce_eager,
            batch_invariant=arguments.batch_invariant,
            kv_cache_dtype=arguments.kv_cache_dtype,
            max_num_seqs=max(arguments.batch),
            max_model_len=arguments.max_model_len or min(8192, arguments.input + arguments.output),
        )
        start_s = time.perf_counter() - started
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    weights = "float" if arguments.float else "w4a16-sym"
    print(
        f"{arguments.shape} {weights}, dtype {arguments.dtype}, on {device}, torch"
        f" {torch.__version__}: up in {start_s:.1f} s, {resident_gib():.2f} GiB of host memory"
    )
    print(
        f"{arguments.input} tokens in, {arguments.output} out, random weights,"
        f" KV pages of {llm.engine.runner.kv_format}"
    )
    for batch in arguments.batch:
        line = measure(llm, batch, arguments.input, arguments.output)
        if arguments.json:
            print(json.dumps(line))
        else:
            print(
                f"batch {batch:4d}: first token {line['first_ms']:8.2f} ms, step"
                f" {line['step_ms']:7.3f} ms, decode {line['decode_tokens_per_s']:9.1f} tokens/s"
            )


if __name__ == "__main__":
    main()
