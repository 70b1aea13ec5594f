"""Measure embeddings offline: texts and tokens per second, by the length of the texts.

    python examples/measure_embeddings.py --json embeddings.json

The models have random weights: Qwen3-Embedding-0.6B's shape in bf16, and Llama-3-8B's in W4A16 and
W8A8. Texts are different random token ids, all are requested together, and the last token's vector
is returned.
"""

import argparse
import gc
import json
import platform
import random
import tempfile
import time
from pathlib import Path

import torch
from bench_shapes import SHAPES, write_config

from qserve import LLM

MODELS = (("qwen3-embedding-0.6b", None), ("llama-3-8b", "w4a16-sym"), ("llama-3-8b", "w8a8"))


def texts_per_s(llm: LLM, count: int, length: int, seed: int) -> float:
    draw = random.Random(seed)
    prompts = [[draw.randrange(2, 1000) for _ in range(length)] for _ in range(count)]
    started = time.perf_counter()
    found = llm.embed(prompts, use_tqdm=False)
    seconds = time.perf_counter() - started
    assert len(found) == count
    return count / seconds


def measure(shape: str, scheme: str | None, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the texts per second, by the number of tokens per text."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), shape, scheme)
        llm = LLM(folder, load_format="dummy", enable_prefix_caching=False)
        llm.capture_graphs()
        for length in arguments.lengths:
            count = max(1, arguments.tokens // length)
            texts_per_s(llm, min(count, 16), length, seed=0)
            seeds = range(1, arguments.repeats + 1)
            rate = max(texts_per_s(llm, count, length, seed) for seed in seeds)
            found[str(length)] = rate
            name = f"{shape} {scheme or 'bf16'}, texts of {length} tokens"
            print(f"{name}: {rate:,.1f} a second, {rate * length:,.0f} tokens/s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, help="only this shape, in bf16")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 512, 4096])
    parser.add_argument("--tokens", type=int, default=262144, help="tokens per measurement")
    parser.add_argument("--repeats", type=int, default=2, help="runs; the best is reported")
    parser.add_argument("--json", help="also write the figures into this file")
    arguments = parser.parse_args()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(f"{gpu}, torch {torch.__version__}")
    results = {}
    models = MODELS if arguments.shape is None else [(arguments.shape, None)]
    for shape, scheme in models:
        results[f"{shape} {scheme or 'bf16'}"] = measure(shape, scheme, arguments)
        gc.collect()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
