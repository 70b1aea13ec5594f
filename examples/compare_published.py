"""Measure offline throughput in the cases that TensorRT-LLM publishes, and print both figures.

    python examples/compare_published.py --schemes w8a8 w8a8-fp8 w4a16-sym --json published.json

A case is INPUT/OUTPUT tokens of each request; all requests are sent together. The model has the
shape of Llama-3.1-8B and random weights; KV pages are in fp8. TensorRT-LLM's figures are for the
same shape with fp8 weights and KV pages, on one GPU of the type in the first column, from
https://nvidia.github.io/TensorRT-LLM/developer-guide/perf-overview.html (version 1.0, as of
September 2025). They are means over more requests than --requests, so the last requests of a run,
which leave the batch partly empty, cost them less.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# GPU -> case -> output tokens/s
PUBLISHED = {
    "H100": {"128/128": 28312, "1000/1000": 15220, "2048/2048": 9305},
    "H200": {
        "128/128": 27911,
        "128/2048": 26221,
        "500/2000": 20770,
        "1000/1000": 17744,
        "2048/128": 3538,
        "2048/2048": 12194,
        "5000/500": 3902,
    },
}
# case -> number of requests
CASES = {
    "128/128": 6144,
    "128/2048": 1024,
    "500/2000": 1024,
    "1000/1000": 1536,
    "2048/128": 1024,
    "2048/2048": 768,
    "5000/500": 512,
}
RESULT = "RESULT "


def measure(arguments: argparse.Namespace) -> None:
    """Measure all cases with one scheme, and print each result."""
    import torch
    from bench_shapes import SHAPES, write_config

    from qserve import LLM
    from qserve.bench.offline.offline_settings import ThroughputSettings
    from qserve.bench.offline.throughput import run
    from qserve.bench.requests.dataset import Sample

    lengths = [tuple(map(int, case.split("/"))) for case in arguments.cases]
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), arguments.shape, arguments.scheme)
        llm = LLM(
            folder,
            load_format="dummy",
            device=arguments.device,
            max_num_seqs=arguments.max_num_seqs,
            max_model_len=max(map(sum, lengths)),
            enable_prefix_caching=False,
            kv_cache_dtype="fp8",
            **json.loads(arguments.engine),
        )
        llm.capture_graphs()
    is_cuda = llm.engine.runner.device.type == "cuda"
    gpu = torch.cuda.get_device_name() if is_cuda else "CPU"
    vocab = SHAPES[arguments.shape]["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    settings = ThroughputSettings(disable_detokenize=True)

    def samples(count: int, num_input: int, num_output: int) -> list[Sample]:
        ids = torch.randint(3, vocab, (count, num_input), generator=generator).tolist()
        return [Sample(prompt=each, prompt_len=num_input, output_len=num_output) for each in ids]

    run(llm, samples(8, 16, 4), settings, show=False)
    for case, (num_input, num_output) in zip(arguments.cases, lengths, strict=True):
        count = arguments.requests or round(CASES[case] * arguments.scale)
        found = run(llm, samples(count, num_input, num_output), settings, show=False)
        result = {
            "case": case,
            "scheme": arguments.scheme,
            "gpu": gpu,
            "requests": count,
            "tokens_per_s": found["output"] / found["elapsed_time"],
            **{name: found[name] for name in ("elapsed_time", "num_preempted", "mean_batch")},
        }
        print(RESULT + json.dumps(result), flush=True)
    llm.close()


def table(results: list[dict]) -> str:
    """Format the results as a Markdown table."""
    lines = [
        "| GPU | tokens in/out | scheme | requests | preempted | output tokens/s | TensorRT-LLM |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in results:
        name = next((name for name in PUBLISHED if name in each["gpu"]), "")
        published = PUBLISHED.get(name, {}).get(each["case"])
        ratio = each["tokens_per_s"] / published if published else 0.0
        theirs = f"{published:,} (ours: {ratio:.2f} times)" if published else ""
        cells = (each["gpu"], each["case"], each["scheme"], each["requests"], each["num_preempted"])
        lines.append(f"| {' | '.join(map(str, cells))} | {each['tokens_per_s']:,.0f} | {theirs} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schemes", nargs="+", default=["w8a8", "w8a8-fp8", "w4a16-sym"])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--shape", default="llama-3-8b", help="one of bench_generate.py's")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--requests", type=int, help="in each case; default: by case")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the default --requests")
    parser.add_argument("--engine", default="{}", help="more of LLM's settings, as JSON")
    parser.add_argument("--json", help="file to write the results to")
    parser.add_argument("--scheme", help=argparse.SUPPRESS)  # that of one of the processes
    arguments = parser.parse_args()
    if arguments.scheme is not None:
        sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
        measure(arguments)
        return
    results: list[dict] = []
    failed = False
    for scheme in arguments.schemes:
        command = [sys.executable, __file__, *sys.argv[1:], "--scheme", scheme]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                if line.startswith(RESULT):
                    results.append(json.loads(line.removeprefix(RESULT)))
                    print(results[-1], flush=True)
        if arguments.json:
            result = {"date": time.strftime("%Y-%m-%d"), "results": results}
            Path(arguments.json).write_text(json.dumps(result, indent=2) + "\n")
        if process.returncode:
            failed = True
            print(f"{scheme} ended with code {process.returncode}")
    print(table(results))
    sys.exit(failed)


if __name__ == "__main__":
    main()
