"""Measure the cost and the gain of the prefix cache.

    python examples/measure_prefix_cache.py --json cache.json

The model has Llama-3-8B's shape and random weights in W4A16. Three workloads run with and without
the cache; chats also run with host memory (--kv-offload-gb) and few pages on the device:

- unique: prompts that share nothing, to measure the cost of keeping pages in percent of throughput;
- shared: requests with the same system prompt and different questions, all sent together;
- chats: conversations of several turns; each turn's prompt is the whole conversation so far.

Runs with and without the cache alternate, --repeats times; the best of each is reported.
"""

import argparse
import gc
import json
import logging
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from bench_shapes import SHAPES, write_config

from qserve import LLM, SamplingParams

VOCABULARY = 1000  # of the prompts' tokens; the smallest shape has more


class Workload:
    """Source of prompts that were not used before, from one random generator."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(3, VOCABULARY) for _ in range(count)]


def run(llm: LLM, prompts: list[list[int]], num_output: int) -> dict[str, float]:
    """Send prompts together; return seconds to each first token, total seconds, cached fraction."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False)
    started, firsts, cached, outputs = time.perf_counter(), {}, {}, {}
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params, group=str(number))
    while engine.has_work():
        for event in engine.step():
            firsts.setdefault(event.request_id, time.perf_counter() - started)
            cached[event.request_id] = event.facts.num_cached
            outputs.setdefault(event.request_id, []).extend(event.token_ids)
    seconds = time.perf_counter() - started
    return {
        "outputs": [outputs[str(number)] for number in range(len(prompts))],
        "ttft_p50_ms": statistics.median(firsts.values()) * 1e3,
        "ttft_max_ms": max(firsts.values()) * 1e3,
        "tokens_per_s": len(prompts) * num_output / seconds,
        "cached_share": sum(cached.values()) / sum(map(len, prompts)),
    }


def unique(llm: LLM, source: Workload, arguments: argparse.Namespace) -> dict[str, float]:
    prompts = [source.tokens(arguments.unique_tokens) for _ in range(arguments.requests)]
    return run(llm, prompts, arguments.output)


def shared(llm: LLM, source: Workload, arguments: argparse.Namespace) -> dict[str, float]:
    system = source.tokens(arguments.system_tokens)
    prompts = [system + source.tokens(32) for _ in range(arguments.shared_requests)]
    return run(llm, prompts, arguments.output)


def chats(llm: LLM, source: Workload, arguments: argparse.Namespace) -> dict[str, float]:
    """Measure chats, and return the means over the turns after the first."""
    conversations = [source.tokens(arguments.turn_tokens) for _ in range(arguments.chats)]
    found = []
    for _ in range(arguments.turns):
        found.append(run(llm, conversations, arguments.output))
        for conversation, answer in zip(conversations, found[-1]["outputs"], strict=True):
            conversation += answer + source.tokens(arguments.turn_tokens)
    names = ("ttft_p50_ms", "ttft_max_ms", "tokens_per_s", "cached_share")
    return {name: statistics.mean(turn[name] for turn in found[1:]) for name in names}


WORKLOADS = {"unique": unique, "shared": shared, "chats": chats}
BEST = {"ttft_p50_ms": min, "ttft_max_ms": min, "tokens_per_s": max, "cached_share": max}


@contextmanager
def engine(arguments: argparse.Namespace, **settings: object) -> Iterator[LLM]:
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), arguments.shape, None if arguments.float else "w4a16-sym")
        llm = LLM(
            folder,
            load_format="dummy",
            max_num_seqs=arguments.max_num_seqs,
            gpu_memory_utilization=arguments.gpu_memory_utilization,
            **settings,
        )
    llm.capture_graphs()
    llm.generate([[5] * 64] * 4, SamplingParams(max_tokens=4, detokenize=False), use_tqdm=False)
    yield llm


def best(results: Iterable[dict[str, float]]) -> dict[str, float]:
    results = list(results)
    return {name: pick(result[name] for result in results) for name, pick in BEST.items()}


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """Return the figures by workload and by "off", "on" or "host"."""
    table: dict = {}
    with engine(arguments) as llm:
        cache = llm.engine.scheduler.cache
        found: dict[tuple[str, bool], list] = {}
        for workload in WORKLOADS.values():  # the first use of anything takes longer
            workload(llm, Workload(-1), arguments)
        for repeat in range(arguments.repeats):
            for name, workload in WORKLOADS.items():
                for enabled in (False, True) if repeat % 2 else (True, False):
                    llm.reset_prefix_cache()
                    cache.enabled = enabled  # on an idle engine: one set of weights and graphs
                    result = workload(llm, Workload(repeat), arguments)
                    found.setdefault((name, enabled), []).append(result)
        for (name, enabled), results in found.items():
            table.setdefault(name, {})["on" if enabled else "off"] = best(results)
    if arguments.kv_offload_gb:
        del llm, cache
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        settings = {"kv_offload_gb": arguments.kv_offload_gb}
        pages = arguments.host_pages
        for label, extra in (("few pages", {}), ("few pages, host", settings)):
            with engine(arguments, num_gpu_blocks_override=pages, **extra) as llm:
                results = [
                    chats(llm, Workload(repeat), arguments) for repeat in range(arguments.repeats)
                ]
            table["chats"][label] = best(results)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--float", action="store_true", help="float weights instead of W4A16")
    parser.add_argument("--requests", type=int, default=256, help="number of unique prompts")
    parser.add_argument("--unique-tokens", type=int, default=1024)
    parser.add_argument("--shared-requests", type=int, default=64)
    parser.add_argument("--system-tokens", type=int, default=4000)
    parser.add_argument("--chats", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--turn-tokens", type=int, default=256)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--kv-offload-gb", type=float, default=0.0)
    parser.add_argument(
        "--host-pages", type=int, default=4096, help="pages on the device when host memory is used"
    )
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    table = measure(arguments)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(f"{arguments.shape} on {device}, torch {torch.__version__}")
    columns = ("TTFT p50", "max", "tokens/s")
    print(f"{'workload':10} {'cache':16}", *(f"{name:>10}" for name in columns), f"{'cached':>7}")
    for name, rows in table.items():
        for label, row in rows.items():
            print(
                f"{name:10} {label:16} {row['ttft_p50_ms']:7.1f} ms {row['ttft_max_ms']:7.1f} ms"
                f" {row['tokens_per_s']:10.1f} {row['cached_share']:7.1%}"
            )
    cost = 1 - table["unique"]["on"]["tokens_per_s"] / table["unique"]["off"]["tokens_per_s"]
    print(f"at 0 % hits the cache costs {cost:.2%} of the throughput")
    if arguments.json:
        found = {"device": device, "settings": vars(arguments), "results": table}
        Path(arguments.json).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
