"""Measure one model over 1 to 8 GPUs: decode steps, a long prompt, throughput.

    python examples/measure_parallel.py --gpus 4 --json parallel.json

Each part runs in its own process with a time limit. Its results are printed when it ends. A part is
MODEL-LAYOUT, such as 70b-tp4 or qwen3-30b-ep4. Layouts are: tp (each layer is divided over the
GPUs), tp2-pp2 (two pipeline stages of two GPUs), ep (like tp, but each GPU has whole experts) and
cp (the tokens of a long prompt are divided). Parts are:

- check-tp2, -tp4, -tp8, -tp2-pp2: the bundled model in W4A16. Tokens and logits of several ranks
  are compared with those of one, and with tp2 those after a prompt that two ranks divide.
- 70b, 70b-w8a8, 70b-w4a8, 8b, and the mixtures of experts qwen3-30b, gpt-oss-120b and glm-4.5-air:
  the shape of Llama-3-70B and so on, with random weights in W4A16 unless the name says otherwise.
  Printed are: ms of a decode step at batch 1, 8, 32 and 128; ms to the first token of one prompt of
  8000; output tokens/s of --requests concurrent requests of 256 tokens in, 128 out.
- 8b-long: time to the first token after a prompt of 64000.
- 70b-tp2-prompt, 8b-tp2-prompt and so on: ms to the first token of a prompt of 8000, and of one of
  4000, with sums over GPUs that run during the products and without, in turn in one run.

Without --parts all parts run that need at most --gpus GPUs. parallel_floors.py predicts the times.

If a check fails, no part with several ranks is measured. With --shape and --device cpu everything
runs on a CPU:

    python examples/measure_parallel.py --device cpu --shape tiny --max-model-len 256 --batches 1 2
"""

import argparse
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TENSOR, STAGES, CONTEXT = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
)
# layout -> settings of the engine
LAYOUTS: dict[str, dict] = {
    "tp1": {},
    **{f"tp{size}": {TENSOR: size} for size in (2, 4, 8)},
    **{f"tp{size}-pp2": {TENSOR: size, STAGES: 2} for size in (2, 4)},
    **{f"ep{size}": {TENSOR: size, "enable_expert_parallel": True} for size in (2, 4, 8)},
    **{f"cp{size}": {CONTEXT: size} for size in (2, 4, 8)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A shape of bench_shapes.py, and the layouts in which it is measured."""

    shape: str
    layouts: tuple[str, ...]  # the last one is the baseline of the others
    seconds: int  # limit of a part
    scheme: str = "w4a16-sym"
    max_model_len: int | None = None


DENSE = ("tp8", "tp4-pp2", "tp4", "tp2-pp2", "tp2", "tp1")
EXPERTS = ("ep8", "tp8", "ep4", "tp4", "ep2", "tp2", "tp1")
MODELS: dict[str, Model] = {
    "70b": Model(shape="llama-3-70b", layouts=DENSE, seconds=300),
    "70b-w8a8": Model(shape="llama-3-70b", layouts=DENSE, seconds=300, scheme="w8a8"),
    "70b-w4a8": Model(shape="llama-3-70b", layouts=DENSE, seconds=300, scheme="w4a8"),
    "8b": Model(shape="llama-3-8b", layouts=("tp4", "tp2", "tp1"), seconds=200),
    "qwen3-30b": Model(shape="qwen3-30b-a3b", layouts=EXPERTS, seconds=200),
    "gpt-oss-120b": Model(shape="gpt-oss-120b", layouts=EXPERTS, seconds=300, scheme="w4a16-mxfp4"),
    "glm-4.5-air": Model(shape="glm-4.5-air", layouts=EXPERTS, seconds=300),
    "8b-long": Model(
        shape="llama-3-8b",
        layouts=("cp8", "tp8", "cp4", "tp4", "cp2", "tp2", "tp1"),
        seconds=200,
        max_model_len=65536,
    ),
}
CHECK = "check"
CHECK_SECONDS = 180


def gpus_of(layout: str) -> int:
    """Return the number of GPUs of a layout."""
    settings = LAYOUTS[layout]
    return math.prod(settings.get(name, 1) for name in (TENSOR, STAGES, CONTEXT))


# part -> (model, or CHECK; layout)
PARTS: dict[str, tuple[str, str]] = {
    f"{CHECK}-{layout}": (CHECK, layout) for layout in ("tp2", "tp2-pp2", "tp4", "tp8")
} | {f"{name}-{layout}": (name, layout) for name, of in MODELS.items() for layout in of.layouts}
PROMPT = "-prompt"  # end of the name of a part that compares long prompts
PARTS |= {f"{name}-tp2{PROMPT}": (name, "tp2") for name in ("70b", "70b-w8a8", "70b-w4a8", "8b")}
PROMPT_LENGTHS = (8000, 4000)
LONG_PROMPT = 64000
DIVIDED = {CONTEXT: 2, "prefill_context_parallel_min_tokens": 8}
RESULT = "RESULT "
TIE = 0.02  # between the two likeliest tokens' log probabilities: either may be chosen
# of logits: ranks add in another order than one GPU, and round what they have added
LIMIT = 0.02
# NCCL can detect NVLink multicast on hosts where it does not work.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def tell(**result: object) -> None:
    print(RESULT + json.dumps(result), flush=True)


def check(arguments: argparse.Namespace, layout: str) -> None:
    """Raise an error if several ranks compute another result than one rank."""
    from calibrate.pipeline import quantize_checkpoint
    from formats.scheme import Scheme
    from qserve import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    texts = [
        "The borrow checker rejects a program in which",
        "A trait object is",
        "In this chapter we",
        "fn main() {\n    let mut values = vec![1, 2, 3];\n",
    ]
    ids = list(range(3, 203))
    found = []
    checked = {"one rank": {}, layout: LAYOUTS[layout]}
    if layout == "tp2":
        checked["divided prompts"] = DIVIDED
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "docs-5m-w4a16"
        scheme = Scheme.parse("w4a16-sym-g32")
        quantize_checkpoint(HERE / "models" / "docs-5m", model, scheme=scheme, progress=False)
        for name, settings in checked.items():
            llm = LLM(
                str(model),
                device=arguments.device,
                dtype="float32" if arguments.device == "cpu" else "float16",
                max_model_len=512,
                max_num_seqs=4,
                num_gpu_blocks_override=256,
                **settings,
            )
            tell(ready=name)
            outputs = [each.outputs[0] for each in llm.generate(texts, params, use_tqdm=False)]
            again = llm.generate(texts, params, use_tqdm=False)
            same = [each.outputs[0].token_ids for each in again]
            if same != [each.token_ids for each in outputs]:
                raise SystemExit(f"{name}: answers differ when they are asked again")
            tell(answered=name)
            found.append((outputs, llm.logits(ids).float().cpu()))
            tell(told_logits=name)
            llm.close()
            del llm
    (ours, logits), *others = found
    differences, errors = 0, [float((other - logits).norm() / logits.norm()) for _, other in others]
    for one, two in [pair for theirs, _ in others for pair in zip(ours, theirs, strict=True)]:
        pairs = zip(one.token_ids, two.token_ids, strict=True)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if place is None:
            continue
        differences += 1
        first, second = sorted(
            (each.logprob for each in one.logprobs[place].values()), reverse=True
        )[:2]
        if first - second > TIE:
            raise SystemExit(f"token {place} differs: {one.token_ids} and {two.token_ids}")
    if max(errors) > LIMIT:
        raise SystemExit(f"logits differ by {max(errors):.4f} of their norm, more than {LIMIT}")
    tell(
        ok=True,
        logits_error=max(errors),
        prompts=len(texts) * len(others),
        prompts_that_part_at_a_tie=differences,
    )


def measure(arguments: argparse.Namespace, model: Model, settings: dict) -> None:
    """Measure one model with these settings of the engine, and print each result."""
    import torch
    from bench_shapes import SHAPES, write_config
    from measure_engine import Workloads

    from qserve import LLM

    shape = arguments.shape or model.shape
    if model.max_model_len is not None:
        length = {"max_position_embeddings": model.max_model_len}
        SHAPES[shape] = SHAPES[shape] | length
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), shape, model.scheme)
        common = {
            "max_num_seqs": max(arguments.batches),
            "max_model_len": model.max_model_len or arguments.max_model_len,
            "load_format": "dummy",
            "device": arguments.device,
        }
        llm = LLM(folder, **common | settings | json.loads(arguments.engine))
        llm.capture_graphs()
    is_cuda = llm.engine.runner.device.type == "cuda"
    name = torch.cuda.get_device_name() if is_cuda else "CPU"
    tell(device=name, torch=torch.__version__, ready_s=time.perf_counter() - started)
    if is_cuda:
        tell(gpu_gib_of_rank_0=torch.cuda.memory_allocated() / 2**30)
    work = Workloads(llm, SHAPES[shape]["vocab_size"])
    longest = llm.engine.max_model_len
    if model.max_model_len is not None:
        length = min(LONG_PROMPT, longest - 2)
        tell(**{f"first_ms_{length}": work.first_ms(length, arguments.repeats)})
        llm.close()
        return
    for batch in arguments.batches:
        length = min(128 if batch < 32 else 64, longest // 4)
        step_ms = work.step_ms(batch, length, arguments.output, arguments.repeats)
        tell(**{f"step_ms_{batch}": step_ms})
    length = min(8000, longest - 2)
    tell(**{f"first_ms_{length}": work.first_ms(length, arguments.repeats)})
    if arguments.requests:
        sizes = (arguments.requests, min(256, longest // 4), min(128, longest // 4))
        tell(tokens_per_s=work.tokens_per_s(*sizes), requests=sizes)
    llm.close()


def measure_prompts(arguments: argparse.Namespace, model: Model, settings: dict) -> None:
    """Measure long prompts with sums that overlap with products, and without, in turn."""
    from bench_shapes import SHAPES, write_config
    from measure_engine import Workloads

    from qserve import LLM

    shape, started = arguments.shape or model.shape, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), shape, model.scheme)
        common = {
            "max_num_seqs": 1,
            "max_model_len": arguments.max_model_len,
            "load_format": "dummy",
            "device": arguments.device,
            "enforce_eager": True,  # steps of long prompts use no CUDA graphs
        }
        llm = LLM(folder, **common | settings | json.loads(arguments.engine))
    tell(ready_s=time.perf_counter() - started)
    work = Workloads(llm, SHAPES[shape]["vocab_size"])
    for length in PROMPT_LENGTHS:
        length = min(length, llm.engine.max_model_len - 2)
        found: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(arguments.repeats + 1):
            for overlaps, times in found.items():
                llm.engine.workers.overlap_sums(overlaps)
                ms = 1e3 * work.seconds(work.prompts(1, length), 1)
                if turn:  # the first turn warms up
                    times.append(ms)
        for overlaps, name in ((True, "overlapped"), (False, "in_turn")):
            tell(**{f"first_ms_{length}_{name}": min(found[overlaps])})
        tell(**{f"all_ms_{length}": [[round(ms, 1) for ms in each] for each in found.values()]})
    llm.close()


def run_part(part: str, limit: float) -> dict | None:
    """Run a part and print its results. Returns None if it failed or took too long."""
    command = [sys.executable, __file__, *sys.argv[1:], "--part", part]
    environment = {**ENVIRONMENT, **os.environ}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    timer = threading.Timer(limit, process.kill)  # its ranks see it go, and end, too
    timer.start()
    found: dict = {}
    started = time.perf_counter()
    for line in process.stdout:
        if line.startswith(RESULT):
            result = json.loads(line.removeprefix(RESULT))
            found |= result
            seconds = time.perf_counter() - started
            print(f"{seconds:6.1f} s {part}: {result}", flush=True)
    code = process.wait()
    timer.cancel()
    if code:
        print(f"{part} ended with code {code} after {time.perf_counter() - started:.1f} s")
        found["failed"] = code
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: see --gpus")
    parser.add_argument(
        "--gpus", type=int, default=2, help="without --parts: most GPUs that a part may need"
    )
    parser.add_argument("--shape", help="a shape of bench_generate.py, instead of Llama's")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--output", type=int, default=64, help="tokens per decode run")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--requests", type=int, default=128, help="number in the throughput run; 0: none"
    )
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--limit", type=float, help="seconds for each part, instead of its own")
    parser.add_argument("--engine", default="{}", help="more of LLM's settings, as JSON")
    parser.add_argument("--json", help="file to write the results to")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # that of one of the processes
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if arguments.part is not None:
        sys.path[:0] = [str(HERE), str(HERE.parent)]
        name, layout = PARTS[arguments.part]
        if name == CHECK:
            check(arguments, layout)
        elif arguments.part.endswith(PROMPT):
            measure_prompts(arguments, MODELS[name], LAYOUTS[layout])
        else:
            measure(arguments, MODELS[name], LAYOUTS[layout])
        sys.stdout.flush()
        os._exit(0)  # a normal exit would wait for NCCL's threads
    results: dict[str, dict] = {}
    is_right = True
    fitting = [part for part, (_, layout) in PARTS.items() if gpus_of(layout) <= arguments.gpus]
    for part in arguments.parts or fitting:
        name, layout = PARTS[part]
        if gpus_of(layout) > 1 and not is_right:
            print(f"{part} is left out: a check failed", flush=True)
            continue
        limit = CHECK_SECONDS if name == CHECK else MODELS[name].seconds
        results[part] = run_part(part, arguments.limit or limit)
        if name == CHECK:
            is_right = is_right and "ok" in results[part]
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(results, indent=2))
    for model, (*layouts, base) in ((name, of.layouts) for name, of in MODELS.items()):
        one = results.get(f"{model}-{base}", {})
        for layout in layouts:
            other = results.get(f"{model}-{layout}", {})
            for name in one.keys() & other.keys():
                if name.startswith(("step_ms", "first_ms")):
                    before, after = one[name], other[name]
                    gain = f"{before:.3f} to {after:.3f} ms, {before / after:.2f} times"
                    print(f"{model} {name}, {base} to {layout}: {gain}")
    sys.exit(not is_right or any("failed" in found for found in results.values()))


if __name__ == "__main__":
    main()
