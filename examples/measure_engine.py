"""Measure an engine with fixed workloads: decode steps, first tokens, throughput.

    python examples/measure_engine.py --json engine.json

The model has Llama-3-8B's shape and random weights in W4A16, W8A8 and bf16, one after the other,
each in a separate process. Measured are:

- ms of a decode step at batch 1 (128 tokens in) and 8, 32, 128 (512 in);
- ms to the first token of one prompt of 128 tokens, and of one of 8000;
- output tokens/s of 512 requests of 1024 tokens in, 256 out, with at most 256 concurrent;
- seconds until the engine was ready.

The best of --repeats is reported. Requests share no prefix, and none is repeated.
"""

import argparse
import json
import logging
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCHEMES = {"w4a16": "w4a16-sym", "w8a8": "w8a8", "w4a8": "w4a8", "bf16": None}
DECODES = ((1, 128), (8, 512), (32, 512), (128, 512))  # batch, tokens in
DECODE_TOKENS = 128
FIRST_TOKENS = (128, 8000)
ROWS = {
    **{f"step_ms_{batch}": f"batch {batch}, ms a step" for batch, _ in DECODES},
    **{f"first_ms_{length}": f"first token of {length}, ms" for length in FIRST_TOKENS},
    "tokens_per_s": "{} requests of {}/{}, output tokens/s",
    "ready_s": "engine ready, s",
}


class Workloads:
    """Workloads on one engine, with prompts that it has not seen before."""

    def __init__(self, llm, vocab_size: int) -> None:
        self._llm, self._vocab_size = llm, vocab_size
        self._random = random.Random(1)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Return new random prompts on each call, so that the prefix cache has no hits."""
        return [
            [self._random.randrange(2, self._vocab_size) for _ in range(length)]
            for _ in range(count)
        ]

    def seconds(self, prompts: list[list[int]], num_output: int) -> float:
        from qserve import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False
        )
        started = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started

    def first_ms(self, length: int, repeats: int) -> float:
        self.seconds(self.prompts(1, length), 1)
        return 1e3 * min(self.seconds(self.prompts(1, length), 1) for _ in range(repeats))

    def step_ms(self, batch: int, length: int, num_output: int, repeats: int) -> float:
        self.seconds(self.prompts(batch, length), 4)
        first = min(self.seconds(self.prompts(batch, length), 1) for _ in range(repeats))
        whole = min(self.seconds(self.prompts(batch, length), num_output) for _ in range(repeats))
        return 1e3 * (whole - first) / (num_output - 1)

    def tokens_per_s(self, requests: int, length: int, num_output: int) -> float:
        return requests * num_output / self.seconds(self.prompts(requests, length), num_output)


def measure(arguments: argparse.Namespace) -> dict[str, float | str]:
    """Run all workloads with one scheme."""
    import torch
    from bench_shapes import SHAPES, write_config

    from qserve import LLM

    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), arguments.shape, SCHEMES[arguments.scheme])
        started = time.perf_counter()
        llm = LLM(folder, load_format="dummy", max_num_seqs=256, **json.loads(arguments.engine))
        ready_s = time.perf_counter() - started
        llm.capture_graphs()
    found = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "torch": torch.__version__,
        "ready_s": ready_s,
    }
    longest = llm.engine.max_model_len
    work = Workloads(llm, SHAPES[arguments.shape]["vocab_size"])
    for batch, length in DECODES:
        if batch <= arguments.max_batch:
            name = f"step_ms_{batch}"
            found[name] = work.step_ms(
                batch, min(length, longest // 2), arguments.output, arguments.repeats
            )
            show(arguments.scheme, name, found[name])
    for length in FIRST_TOKENS:
        if length < longest:
            name = f"first_ms_{length}"
            found[name] = work.first_ms(length, arguments.repeats)
            show(arguments.scheme, name, found[name])
    if arguments.requests:
        work.tokens_per_s(min(32, arguments.requests), 64, 8)
        found["tokens_per_s"] = work.tokens_per_s(*arguments.throughput)
        show(arguments.scheme, "tokens_per_s", found["tokens_per_s"])
    return found


def show(scheme: str, name: str, value: float) -> None:
    print(f"{scheme} {name} {value:.3f}", file=sys.stderr, flush=True)


def table(results: dict[str, dict], throughput: tuple[int, int, int]) -> str:
    """Format the results as a Markdown table."""
    lines = [f"| | {' | '.join(results)} |", f"|---{'|---' * len(results)}|"]
    for name, title in ROWS.items():
        if any(name in found for found in results.values()):
            values = [_number(found.get(name)) for found in results.values()]
            lines.append(f"| {title.format(*throughput)} | {' | '.join(values)} |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="llama-3-8b", help="one of bench_generate.py's")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--max-batch", type=int, default=128, help="leave out larger batches")
    parser.add_argument("--output", type=int, default=DECODE_TOKENS, help="tokens per decode run")
    parser.add_argument(
        "--requests", type=int, default=512, help="number in the throughput run; 0: none"
    )
    parser.add_argument("--request-input", type=int, default=1024)
    parser.add_argument("--request-output", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", default="{}", help="more of LLM's settings, as JSON")
    parser.add_argument("--json", help="file to write the results to")
    parser.add_argument("--scheme", help=argparse.SUPPRESS)  # that of one of the processes
    arguments = parser.parse_args()
    arguments.throughput = (
        arguments.requests,
        arguments.request_input,
        arguments.request_output,
    )
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if arguments.scheme is not None:
        print(json.dumps(measure(arguments)))
        return
    results = {}
    for scheme in arguments.schemes:
        command = [sys.executable, __file__, *sys.argv[1:], "--scheme", scheme]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[scheme] = json.loads(done.stdout.splitlines()[-1])
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(results, indent=2))
    first = next(iter(results.values()))
    print(f"{arguments.shape}, random weights, {first['device']}, torch {first['torch']}\n")
    print(table(results, arguments.throughput))


if __name__ == "__main__":
    main()
