"""Measure decoding offline: milliseconds per step and tokens/s for several batch sizes.

    python examples/bench_generate.py --shape llama-3-8b --batch 1 8 32

The model has random weights in the given shape and scheme, or float weights (--float). The speed is
real, the text is meaningless. Each printed line is one batch size, with --input tokens in and
--output tokens out per request. With --speculative-config, the printed step is the mean time per
token.
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
from bench_shapes import SHAPES, write_config

from qserve import LLM, SamplingParams
from qserve.config import KV_CACHE_DTYPES


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
        "--long-input", type=int, help="also measure one request with a prompt of so many tokens"
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        help="what attention's parts are chosen for; default: a prompt and --output, at most 8192",
    )
    parser.add_argument(
        "--scheme",
        default="w4a16-sym",
        help="of linears, in groups of 128; 10,944 inputs of deepseek-v2-lite need w4a16-sym-g64",
    )
    parser.add_argument("--float", action="store_true", help="float weights")
    parser.add_argument("--dtype", default="auto", help="of activations; auto is float32 on a CPU")
    parser.add_argument("--lm-head-quantization", help="round the head: w8a16 or w4a16")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument(
        "--speculative-config",
        help="as `qserve serve` takes it; random weights accept no draft, so that"
        ' "rejection_sample_method": "synthetic" sets how many are accepted',
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    longest = max(arguments.input, arguments.long_input or 0)
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), arguments.shape, None if arguments.float else arguments.scheme)
        started = time.perf_counter()
        llm = LLM(
            folder,
            load_format="dummy",
            dtype=arguments.dtype,
            enforce_eager=arguments.enforce_eager,
            batch_invariant=arguments.batch_invariant,
            kv_cache_dtype=arguments.kv_cache_dtype,
            lm_head_quantization=arguments.lm_head_quantization,
            speculative_config=arguments.speculative_config,
            max_num_seqs=max(arguments.batch),
            max_model_len=arguments.max_model_len or min(8192, longest + arguments.output),
        )
        start_s = time.perf_counter() - started
        llm.capture_graphs()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    weights = "float" if arguments.float else arguments.scheme
    print(
        f"{arguments.shape} {weights}, dtype {arguments.dtype}, on {device}, torch"
        f" {torch.__version__}: up in {start_s:.1f} s, {resident_gib():.2f} GiB of host memory"
    )
    print(
        f"{arguments.input} tokens in, {arguments.output} out, random weights,"
        f" KV pages of {llm.engine.runner.kv_format}"
    )
    cases = [(batch, arguments.input) for batch in arguments.batch]
    if arguments.long_input:
        cases.append((1, arguments.long_input))
    for batch, num_input in cases:
        line = measure(llm, batch, num_input, arguments.output)
        if arguments.json:
            print(json.dumps(line))
        else:
            prompt = "" if num_input == arguments.input else f", {num_input} tokens in"
            print(
                f"batch {batch:4d}{prompt}: first token {line['first_ms']:8.2f} ms, step"
                f" {line['step_ms']:7.3f} ms, decode {line['decode_tokens_per_s']:9.1f} tokens/s"
            )


if __name__ == "__main__":
    main()
