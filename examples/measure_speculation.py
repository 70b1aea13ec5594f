"""Measure speculation on one GPU: tokens/s with and without it, and a breakdown of a step's time.

    python examples/measure_speculation.py --json speculation.json

The model has Llama-3-8B's shape in W4A16. The EAGLE-3 head has the official head's shape. Both have
random weights. Drafts are accepted at random, at the rate of the official head on MT-Bench: 2.93
tokens per verification with 3 drafts, 3.55 with 5. So the text is meaningless but the speed is
real. Each row runs in its own process, --repeats times, and the best run is reported:

- without speculation; with heads in bf16 and in W4A16, with 3 and 5 drafts;
- batches of 1 to 256 requests, 128 tokens in, 256 out; tokens/s of decoding only;
- with `adaptive` (the default) and, up to 32 requests, without;
- for batch 1 the milliseconds of verification, drafter and sampler.
"""

import argparse
import json
import logging
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LENGTHS = {3: 2.93, 5: 3.55}  # tokens of a verify, by drafts
BATCHES = (1, 8, 32, 64, 128, 256)
HEAD = {  # of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
    "llama-3-8b": {"draft_vocab_size": 32000, "intermediate_size": 14336},
    "tiny": {"draft_vocab_size": 512, "intermediate_size": 768},
}


def write_head(folder: Path, shape: str, bits: int, device: str) -> None:
    """Write an EAGLE-3 head with random weights."""
    import torch
    from bench_shapes import SHAPES

    from calibrate.heads.quantize import quantize_head
    from formats.heads.config import EAGLE3, EagleConfig, default_aux_layers
    from formats.heads.layers_config import SPECULATORS
    from formats.heads.save import save_eagle3
    from formats.heads.tensors import linears, required
    from formats.scheme import Scheme

    sizes = SHAPES[shape]
    values = {
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 2048,
        **sizes,
        **HEAD[shape],
        "num_hidden_layers": 1,
        "torch_dtype": "bfloat16",
    }
    layers = sizes["num_hidden_layers"]
    config = EagleConfig(
        kind=EAGLE3,
        layout=SPECULATORS,
        values=values,
        target_hidden_size=sizes["hidden_size"],
        draft_vocab_size=HEAD[shape]["draft_vocab_size"],
        num_aux=3,
        explicit_aux_layers=default_aux_layers(layers) if layers > 5 else (0, 1, 2),
        norm_before_residual=False,
        norm_output=False,
        norm_before_fc=False,
        fc_norm=False,
    )
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    shapes = {f"{name}.weight": found for name, found in linears(config).items()}
    for name, found in (shapes | required(config)).items():
        tensor = torch.randn(found, generator=generator) * 0.02
        tensors[name] = (torch.ones(found) if len(found) == 1 else tensor).to(torch.bfloat16)
    draft, whole = config.draft_vocab_size, sizes["vocab_size"]
    step = whole // draft
    tensors["d2t"] = torch.arange(draft) * (step - 1)
    tensors["t2d"] = torch.zeros(whole, dtype=torch.bool).index_fill_(
        0, torch.arange(draft) * step, True
    )
    source = folder if bits == 16 else folder.with_name(f"{folder.name}-bf16")
    verifier = {"num_hidden_layers": sizes["num_hidden_layers"], "name_or_path": shape}
    save_eagle3(source, config, tensors, layout=SPECULATORS, verifier=verifier)
    if bits != 16:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        scheme = Scheme.parse("w4a16-sym")
        quantize_head(source, folder, scheme=scheme, recipe="rtn", device=device, progress=False)


def make_llm(arguments: argparse.Namespace, folder: str, head: str):
    from qserve import LLM

    settings = json.loads(arguments.engine)
    if arguments.drafts:
        settings["speculative_config"] = {
            "method": "eagle3",
            "model": head,
            "num_speculative_tokens": arguments.drafts,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": arguments.length or LENGTHS[arguments.drafts],
            "adaptive": arguments.adaptive,
        }
    length = arguments.input + arguments.output + 64
    settings |= {"max_num_seqs": max(8, *arguments.batch), "max_model_len": length}
    llm = LLM(folder, load_format="dummy", **settings)
    llm.capture_graphs()
    return llm


def seconds(llm, batch: int, num_input: int, num_output: int) -> float:
    """Return the seconds of a batch of new prompts, none of them cached."""
    from qserve import SamplingParams

    seconds.number += 1
    first = seconds.number
    prompts = [
        [(first * 7919 + i * 104729 + j * 31) % 1000 + 2 for j in range(num_input)]
        for i in range(batch)
    ]
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started


seconds.number = 0


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Measure the tokens/s of all batches with one setting."""
    from bench_shapes import write_config

    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        folder, head = Path(place) / "model", Path(place) / "head"
        folder.mkdir()
        write_config(folder, arguments.shape, "w4a16-sym")
        if arguments.drafts:
            write_head(head, arguments.shape, arguments.bits, arguments.device)
        llm = make_llm(arguments, str(folder), str(head))
        for batch in arguments.batch:
            found |= measure_batch(arguments, llm, batch)
            print(arguments.name, json.dumps(found), file=sys.stderr, flush=True)
    return found


def measure_batch(arguments: argparse.Namespace, llm, batch: int) -> dict[str, float]:
    seconds(llm, batch, arguments.input, arguments.output)  # captures graphs, learns step times
    first = min(seconds(llm, batch, arguments.input, 1) for _ in range(2))
    whole = min(
        seconds(llm, batch, arguments.input, arguments.output) for _ in range(arguments.repeats)
    )
    found = {f"tokens_per_s_{batch}": batch * (arguments.output - 1) / (whole - first)}
    speculation = llm.engine.scheduler.speculation
    if speculation is not None:
        verifies, drafts, *accepted = speculation.take_counts()
        found[f"length_{batch}"] = 1 + sum(accepted) / max(1, verifies)
        found[f"drafts_{batch}"] = drafts / max(1, verifies)
    if batch == 1:
        found |= breakdown(llm)
        if arguments.drafts:  # the rest of a step: the drafter, and gaps
            rows = f"{arguments.drafts + 1}_rows"
            step_ms = found["step_ms"] = 1e3 * found["length_1"] / found["tokens_per_s_1"]
            parts = found.get(f"model_ms_{rows}", 0.0) + found.get(f"sampler_ms_{rows}", 0.0)
            found["drafter_ms"] = step_ms - parts
    return found


def breakdown(llm) -> dict[str, float]:
    """Measure the milliseconds of model and sampler at batch 1, by rows, each replayed alone."""
    import torch

    runner = llm.engine.runner
    if runner.graphs is None:
        return {}
    from qkernels import ops
    from qkernels.sampling.settings import SampleSettings
    from qkernels.sampling.words import SampleRow

    def timed(work, count: int = 100) -> float:
        for _ in range(10):
            work()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / count

    found = {}
    for key in runner.graphs._graphs:
        if key.is_chunk or key.num_requests != 1:
            continue
        fill(llm, key)
        found[f"model_ms_{key.num_tokens}_rows"] = timed(lambda key=key: runner.graphs.replay(key))
        logits = runner.graphs.outputs(key).logits_SV
        settings = SampleSettings.of([SampleRow()] * len(logits)).to(logits.device)
        found[f"sampler_ms_{key.num_tokens}_rows"] = timed(
            lambda logits=logits, settings=settings: ops.sample_(logits, settings, None)
        )
    return found


def fill(llm, key, num_keys: int = 256) -> None:
    """Fill a graph's inputs so that its rows read many keys of one page and write none."""
    from dataclasses import replace

    import numpy as np
    import torch

    from qserve.engine.step.step_input import StepInput

    num_keys = min(num_keys, llm.engine.max_model_len)
    step = StepInput.padding(
        num_requests=key.num_requests,
        count=key.count,
        max_context_len=num_keys,
        page_size=llm.engine.config.block_size,
    )
    positions = np.arange(num_keys - key.count, num_keys)
    step = replace(
        step,
        positions_T=np.tile(positions, key.num_requests),
        context_lengths_R=np.full(key.num_requests, num_keys, np.int32),
    )
    with torch.inference_mode():
        llm.engine.runner.graphs.fill_(key, step)


def settings_of(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Return the flags of each process, by name."""
    rows = {"none": []}
    for bits in arguments.heads:
        for drafts in arguments.num_drafts:
            flags = ["--bits", str(bits), "--drafts", str(drafts)]
            name = f"{drafts} drafts, {bits}-bit head"
            rows[f"{name}, adaptive"] = [*flags, "--adaptive"]
            if arguments.fixed:
                small = [str(batch) for batch in arguments.batch if batch <= 32]
                rows[f"{name}, fixed"] = [*flags, "--batch", *small]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=HEAD, default="llama-3-8b")
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument(
        "--heads", type=int, nargs="+", default=[16, 4], help="bits of the heads: 16 and 4"
    )
    parser.add_argument("--num-drafts", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument(
        "--length", type=float, help="tokens per verification; default: the published rate"
    )
    parser.add_argument("--fixed", action="store_true", help="also without adaptive, up to 32")
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--engine", default="{}", help="more of LLM's settings, as JSON")
    parser.add_argument("--device", default="auto", help="where heads are quantized")
    parser.add_argument("--json", help="file to write the results to")
    for name, kind in (("--name", str), ("--bits", int), ("--drafts", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)  # for child processes
    parser.add_argument("--adaptive", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.name:
        logging.basicConfig(level=logging.WARNING)
        print(json.dumps(measure(arguments)))
        return
    shared = ["--shape", arguments.shape, "--input", str(arguments.input)]
    shared += ["--output", str(arguments.output), "--repeats", str(arguments.repeats)]
    shared += ["--engine", arguments.engine, "--device", arguments.device]
    if arguments.length:
        shared += ["--length", str(arguments.length)]
    results: dict[str, dict[str, float]] = {}
    for name, flags in settings_of(arguments).items():
        batches = ["--batch", *map(str, arguments.batch)]
        command = [sys.executable, __file__, "--name", name, *shared, *batches, *flags]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        if done.returncode:
            print(f"{name} failed", file=sys.stderr)
            continue
        results[name] = json.loads(done.stdout.splitlines()[-1])
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(results, indent=1))
    print(table(results, arguments.batch))
    print(f"\nPython {platform.python_version()}; tokens/s, times those without in brackets")


def table(results: dict[str, dict[str, float]], batches: list[int]) -> str:
    """Format a Markdown table of tokens/s, with the speed-up over no speculation."""
    lines = [f"| | {' | '.join(map(str, batches))} |", f"|---{'|---' * len(batches)}|"]
    base = results.get("none", {})
    for name, found in results.items():
        cells = []
        for batch in batches:
            value = found.get(f"tokens_per_s_{batch}")
            without = base.get(f"tokens_per_s_{batch}")
            times = f" ({value / without:.2f})" if value and without else ""
            cells.append("" if value is None else f"{value:,.0f}{times}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
