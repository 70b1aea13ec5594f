"""Measure how much time it saves to load a prompt's KV pages from a folder.

    python examples/measure_kv_transfer.py --folder /dev/shm/kv --json kv_transfer.json

The model has Llama-3-8B's shape and random weights in W4A16. One engine computes prompts and saves
their pages; another engine loads them. Printed is the time to the first token cold, with pages from
the folder, and with pages on the device.

Predicted before the first run, for one H200 and a folder in memory: a page is 2 MiB. Loading copies
the file, computes its digest at 1 GB/s in each of 4 threads, and copies to the device at 40 GB/s:
about 4 GB/s in all. 8000 tokens are 1 GiB: 270 ms, where computing them takes 179 ms. In 8 bits the
bytes and the time halve: 135 ms. So a folder pays off for 8-bit pages, for larger models, and on a
busy GPU, but not for an idle 8B model with 16-bit pages.
"""

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from bench_shapes import SHAPES, write_config

from qserve import LLM, SamplingParams

VOCABULARY = 1000


def first_tokens(llm: LLM, prompts: list[list[int]]) -> tuple[float, float]:
    """Return the median milliseconds to the first token, one prompt at a time; cached fraction."""
    engine, times, cached = llm.engine, [], 0
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    for number, prompt in enumerate(prompts):
        started = time.perf_counter()
        engine.add_request(str(number), prompt, params)
        while engine.has_work():
            for event in engine.step():
                cached += event.facts.num_cached
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times), cached / sum(map(len, prompts))


def settle(llm: LLM) -> float:
    """Wait until all pages are written, and return the seconds."""
    started = time.perf_counter()
    for future in list(llm.engine._remote_kv._writes):
        future.result()
    return time.perf_counter() - started


def make(arguments: argparse.Namespace, folder: str | None, dtype: str) -> LLM:
    transfer = {
        "kv_connector": "folder",
        "kv_connector_extra_config": {"path": folder, "max_gb": 64},
    }
    with tempfile.TemporaryDirectory() as model:
        write_config(Path(model), arguments.shape, "w4a16-sym")
        llm = LLM(
            model,
            load_format="dummy",
            max_num_seqs=32,
            kv_cache_dtype=dtype,
            num_gpu_blocks_override=8192,
            kv_offload_gb=8,
            kv_transfer_config=None if folder is None else json.dumps(transfer),
        )
    llm.capture_graphs()
    llm.generate([[5] * 64] * 2, SamplingParams(max_tokens=4, detokenize=False), use_tqdm=False)
    return llm


def measure(arguments: argparse.Namespace, dtype: str) -> dict[str, object]:
    source = random.Random(3)
    result: dict[str, object] = {}
    for length in arguments.tokens:
        prompts = [
            [source.randrange(3, VOCABULARY) for _ in range(length)]
            for _ in range(arguments.repeats)
        ]
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            llm = make(arguments, folder, dtype)
            cold, _ = first_tokens(llm, prompts)
            writing = settle(llm)
            warm, _ = first_tokens(llm, prompts)
            del llm
            torch.cuda.empty_cache()
            llm = make(arguments, folder, dtype)
            loaded, share = first_tokens(llm, prompts)
            del llm
            torch.cuda.empty_cache()
        result[str(length)] = {
            "cold_ms": cold,
            "from_folder_ms": loaded,
            "from_device_ms": warm,
            "cached_share": share,
            "still_writing_s": writing,
        }
        print(dtype, length, result[str(length)], flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="llama-3-8b", choices=sorted(SHAPES))
    parser.add_argument("--folder", default="/dev/shm", help="where the shared folder is made")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 4000, 8000])
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--dtypes", nargs="+", default=["auto", "int8"])
    parser.add_argument("--json", help="file for the figures")
    arguments = parser.parse_args()
    Path(arguments.folder).mkdir(parents=True, exist_ok=True)
    found = {dtype: measure(arguments, dtype) for dtype in arguments.dtypes}
    if arguments.json:
        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
        Path(arguments.json).write_text(json.dumps({"machine": machine, **found}, indent=2))


if __name__ == "__main__":
    main()
