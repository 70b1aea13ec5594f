"""`qserve bench throughput`: measure the time of many requests, sent together in this process."""

import dataclasses
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tqdm import tqdm

from qserve.bench.machine import engine_settings, machine, write_json
from qserve.bench.offline.offline_settings import ThroughputSettings
from qserve.bench.requests.dataset import Sample, load_samples
from qserve.bench.requests.dataset_settings import DatasetSettings
from qserve.bench.requests.token_text import TokenText
from qserve.bench.statistics import mean
from qserve.config import EngineConfig
from qserve.hub.local import local_config
from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams
from qserve.profile.recorder import recorded
from qserve.profile.report import write_report


def bench_throughput(
    model: str, engine: EngineConfig, data: DatasetSettings, settings: ThroughputSettings
) -> int:
    """Run `bench throughput`. Prompts share a prefix only if the data set has one."""
    engine = local_config(engine)
    llm = LLM(**dataclasses.asdict(engine))
    llm.capture_graphs()
    llm.get_tokenizer()  # its import takes seconds, which are not the engine's
    text = TokenText(
        engine.tokenizer or data.tokenizer or engine.model,
        data.random_vocab_size or llm.engine.vocab_size,
    )
    samples = load_samples(data, text, engine.seed)
    if settings.num_warmups:
        warm = [samples[i % len(samples)] for i in range(settings.num_warmups)]
        run(llm, warm, settings, show=False)
        llm.reset_prefix_cache()
    trace = Path(settings.profile_dir) / "throughput.trace.json.gz"
    with recorded(llm.engine.profiler.recorder, trace) if settings.profile else nullcontext():
        found = run(llm, samples, settings, show=not settings.disable_tqdm)
    elapsed, num_input, num_output = (found[k] for k in ("elapsed_time", "input", "output"))
    print(
        f"Throughput: {len(samples) / elapsed:.2f} requests/s,"
        f" {(num_input + num_output) / elapsed:.2f} total tokens/s,"
        f" {num_output / elapsed:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_input}")
    print(f"Total num output tokens:  {num_output}")
    print(
        f"Steps: {found['num_steps']}, mean {found['mean_batch']:.1f} requests,"
        f" {found['num_preempted']} preemptions, at most {found['peak_pages']} of"
        f" {found['num_pages']} KV pages"
    )
    result = {
        "model_id": model,
        "elapsed_time": elapsed,
        "num_requests": len(samples),
        "total_num_tokens": num_input + num_output,
        "requests_per_second": len(samples) / elapsed,
        "tokens_per_second": (num_input + num_output) / elapsed,
        "output_tokens_per_second": num_output / elapsed,
        **{k: found[k] for k in ("num_steps", "mean_batch", "num_preempted", "peak_pages")},
        "machine": machine(),
        "engine": engine_settings(engine),
    }
    write_json(settings.output_json, result)
    if settings.profile:
        print(write_report(trace))
    return 0


def run(
    llm: LLM, samples: list[Sample], settings: ThroughputSettings, show: bool
) -> dict[str, Any]:
    """Run all samples. Return the duration, token counts and statistics of the steps."""
    engine = llm.llm_engine
    batches, num_preempted, peak_pages, num_input, num_output = [], 0, 0, 0, 0
    with tqdm(total=len(samples), desc="Processed prompts", disable=not show) as bar:
        started = time.perf_counter()
        for index, sample in enumerate(samples):
            params = SamplingParams(
                n=settings.n,
                temperature=1.0,
                ignore_eos=True,
                max_tokens=sample.output_len,
                detokenize=not settings.disable_detokenize,
            )
            engine.add_request(
                f"bench-{index}",
                sample.prompt,
                params,
            )
        while engine.has_unfinished_requests():
            outputs = engine.run_step()
            report = engine.engine.report()
            if report.num_step_tokens:
                batches.append(report.num_running)
            num_preempted += report.num_preempted
            peak_pages = max(peak_pages, report.num_pages_used)
            for output in outputs:
                if output.finished:
                    bar.update()
                    num_input += len(output.prompt_token_ids)
                    num_output += sum(len(each.token_ids) for each in output.outputs)
        elapsed = time.perf_counter() - started
    return {
        "elapsed_time": elapsed,
        "input": num_input,
        "output": num_output,
        "num_steps": len(batches),
        "mean_batch": mean(batches),
        "num_preempted": num_preempted,
        "peak_pages": peak_pages,
        "num_pages": report.num_pages,
    }
