"""Measure a vision-language model: the tower, first tokens after images, and concurrent decodes.

    python examples/measure_images.py --json images.json

Qwen3-VL-8B's shape with random weights in W4A16:

- host: ms to decode a PNG of 1024 x 1024 pixels, and to divide it into patches, on one core;
- encoder: images/s of the vision tower for several numbers of images per call;
- first: ms to the first token of a chat with one image (full size, or a third of its sides); of a
  text prompt of the same length; and of the second turn of the chat, whose pages are cached;
- beside: inter-token latency (ITL) of decodes alone, and while requests with an image, or with text
  of the same length, arrive together or one every --apart-ms; also the time to their first tokens;
- profile: device time of the tower by operator class.

Images are preprocessed before they are sent, as in the server's worker processes. No image is sent
twice, except in the second turn.
"""

import argparse
import io
import logging
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vision_shapes import IMAGE_TOKEN, VISION_SHAPES, write_vision_folder

from qserve import LLM, SamplingParams
from qserve.bench.machine import machine, write_json
from qserve.engine.engine import Engine
from qserve.multimodal.decode import decode_image
from qserve.multimodal.media import MediaItem
from qserve.multimodal.processor import MediaProcessor, image_digest
from qserve.params.request_options import RequestOptions
from qserve.profile.chrome_trace import summarize
from qserve.text.tokenizer import Tokenizer

VOCABULARY = 800  # of the prompts' tokens; those of images come after them
TEXT_TOKENS = 32  # of a chat, before and after an image
Prompt = tuple[list[int], tuple[MediaItem, ...]]


class Source:
    """Source of prompts and images that were not used before."""

    def __init__(self, folder: Path, side: int) -> None:
        self.side = side
        self._processor = MediaProcessor(folder, Tokenizer(str(folder)).encode)
        self._random = random.Random(1)
        self._pixels = np.random.default_rng(1)

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(3, VOCABULARY) for _ in range(count)]

    def image(self, side: int | None = None) -> Any:
        from PIL import Image

        blocks = self._pixels.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        size = side or self.side
        return Image.fromarray(blocks).resize((size, size), Image.Resampling.BICUBIC)

    def chat(self, image: Any = None) -> Prompt:
        """Return a prompt with one image between texts."""
        image = self.image() if image is None else image
        ids = [*self.tokens(TEXT_TOKENS), IMAGE_TOKEN, *self.tokens(TEXT_TOKENS)]
        return self._processor.prepare(ids, [image], [image_digest(image)])

    def items(self, count: int, side: int) -> list[MediaItem]:
        """Images, processed."""
        return [self.chat(self.image(side))[1][0] for _ in range(count)]

    def text(self, like: Prompt) -> Prompt:
        """Return a text prompt of the same length as another prompt."""
        return self.tokens(len(like[0])), ()


class Answers:
    """Arrival times of the tokens of requests that run together."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._name = engine, name
        self.sent: dict[str, float] = {}
        self.times: dict[str, list[float]] = defaultdict(list)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.num_cached: dict[str, int] = {}

    def send(self, prompts: Sequence[Prompt], num_tokens: int) -> list[str]:
        """Add requests. Returns their names."""
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        names = []
        for ids, media in prompts:
            name = f"{self._name}{len(self.sent)}"
            self.sent[name] = time.perf_counter()
            names.append(name)
            self._engine.add_request(
                name, ids, params, group=name, options=RequestOptions(media=media)
            )
        return names

    def step(self) -> None:
        for event in self._engine.step():
            self.times[event.request_id].append(time.perf_counter())
            self.tokens[event.request_id] += event.token_ids
            self.num_cached[event.request_id] = event.facts.num_cached

    def run(self, is_done: Callable[[], bool] = lambda: False) -> "Answers":
        while self._engine.has_work() and not is_done():
            self.step()
        return self

    def arrive(self, prompts: Sequence[Prompt], num_tokens: int, apart_s: float) -> list[str]:
        """Add requests, one every `apart_s`, and run until all have a token. Returns names."""
        started, names = time.perf_counter(), []
        while len(names) < len(prompts) or not all(self.times[name] for name in names):
            due = len(prompts)
            if apart_s:
                due = min(due, 1 + int((time.perf_counter() - started) / apart_s))
            names += self.send(prompts[len(names) : due], num_tokens)
            self.step()
        return names

    def first_ms(self, names: Sequence[str]) -> list[float]:
        return [1e3 * (self.times[name][0] - self.sent[name]) for name in names]

    def itl_ms(self, names: Sequence[str], start: float, end: float) -> list[float]:
        """Return the inter-token latencies, in ms, between two moments."""
        found = []
        for name in names:
            times = [each for each in self.times[name] if start <= each <= end]
            found += list(1e3 * np.diff(times))
        return found


def host(source: Source, repeats: int) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        stored = io.BytesIO()
        source.image().save(stored, "PNG")
        started = time.perf_counter()
        image = decode_image(stored.getvalue(), 2**28)
        found["decode_ms"].append(1e3 * (time.perf_counter() - started))
        started = time.perf_counter()
        source.chat(image)
        found["patches_ms"].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(each) for name, each in found.items()}


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Return the best time of some work on the device, in seconds."""
    best = float("inf")
    for _ in range(repeats + 1):  # the first warms up
        _synchronize()
        started = time.perf_counter()
        work()
        _synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def encoder(llm: LLM, source: Source, arguments: argparse.Namespace) -> dict[str, float]:
    tower, found = llm.engine.runner.encoder.tower, {}
    for side in (source.side, source.side // 3):
        for count in arguments.counts:
            items = source.items(count, side)
            seconds = seconds_of(lambda items=items: tower.encode(items), arguments.repeats)
            found[f"images_per_s_{count}x{side}"] = count / seconds
            found[f"call_ms_{count}x{side}"] = 1e3 * seconds
    return found


def first(llm: LLM, source: Source, arguments: argparse.Namespace) -> dict[str, float]:
    engine, found = llm.engine, defaultdict(list)
    for number in range(arguments.repeats + 1):
        prompt, small = source.chat(), source.chat(source.image(source.side // 3))
        runs = {"image": prompt, "text": source.text(prompt)}
        runs |= {"small_image": small, "small_text": source.text(small)}
        for name, each in runs.items():
            answers = Answers(engine, f"{name}{number}-")
            names = answers.send([each], 16)
            answers.run()
            found[f"{name}_ms"] += answers.first_ms(names)
            ids = [*each[0], *answers.tokens[names[0]], *source.tokens(TEXT_TOKENS)]
            again = Answers(engine, f"{name}{number}-again-")
            names = again.send([(ids, each[1])], 2)
            again.run()
            found[f"second_{name}_ms"] += again.first_ms(names)
            found[f"second_{name}_cached"].append(again.num_cached[names[0]])
    found = {name: min(each[1:]) for name, each in found.items()}  # without the warm-up
    return {**found, "prompt_tokens": len(prompt[0]), "small_prompt_tokens": len(small[0])}


def beside(llm: LLM, source: Source, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure decodes alone, with concurrent image requests, and with text of the same length."""
    found: dict[str, Any] = {}
    chats = [source.chat() for _ in range(2 * arguments.requests)]
    texts = [source.text(each) for each in chats[: arguments.requests]]
    apart = [source.chat() for _ in range(arguments.requests)]
    arriving = {
        "warm": chats[arguments.requests :],
        "alone": [],
        "images": chats[: arguments.requests],
        "text": texts,
        "images apart": apart,
        "text apart": [source.text(each) for each in apart],
    }
    for name, prompts in arriving.items():
        answers = Answers(llm.engine, f"{name}-")
        decodes = answers.send(
            [(source.tokens(512), ()) for _ in range(arguments.decodes)], arguments.decode_tokens
        )
        answers.run(lambda a=answers, d=decodes: all(len(a.times[each]) > 8 for each in d))
        start = time.perf_counter()
        apart_s = 1e-3 * arguments.apart_ms if "apart" in name else 0
        arrived = answers.arrive(prompts, 64, apart_s)
        if not prompts:
            answers.run(lambda a=answers, d=decodes: all(len(a.times[each]) > 128 for each in d))
        end = time.perf_counter()
        answers.run()
        if name == "warm":
            continue
        itl = answers.itl_ms(decodes, start - 0.05, end)
        p50, p99 = np.percentile(itl, [50, 99])
        found[name] = {"itl_p50_ms": p50, "itl_p99_ms": p99, "itl_max_ms": max(itl)}
        found[name]["decode_tokens_per_s"] = len(itl) / (end - start)
        if prompts:
            firsts = answers.first_ms(arrived)
            found[name] |= {
                "first_p50_ms": statistics.median(firsts),
                "first_max_ms": max(firsts),
                "seconds": end - start,
            }
    return found


def profile(llm: LLM, source: Source, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the tower's device time by operator class, in ms, and its longest kernels."""
    tower, found = llm.engine.runner.encoder.tower, {}
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for count in (1, 8):
        items = source.items(count, source.side)
        tower.encode(items)
        _synchronize()
        with torch.profiler.profile(activities=activities) as profiler:
            tower.encode(items)
            _synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            summary = summarize(path)
        found[f"{count}x{source.side}"] = {
            "span_ms": summary.span_us / 1e3,
            "busy_ms": summary.busy_us / 1e3,
            "classes": {name: (us / 1e3, calls) for name, (us, calls) in summary.classes.items()},
            "kernels": [
                (round(each.us / 1e3, 3), each.calls, each.kind, each.name[:80])
                for each in summary.kernels[:14]
            ],
        }
    return found


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def show(title: str, found: Any, indent: str = "") -> None:
    """Print figures, one per line."""
    if not isinstance(found, dict):
        values = [found] if not isinstance(found, list | tuple) else found
        texts = [f"{each:,.2f}" if isinstance(each, float) else str(each) for each in values]
        if isinstance(found, list):
            print(f"{indent}{title}")
            texts = [f"{indent}  {each}" for each in values]
            print("\n".join(texts), flush=True)
        else:
            print(f"{indent}{title:<24}{'  '.join(texts)}", flush=True)
        return
    print(f"{indent}{title}", flush=True)
    for name, value in found.items():
        show(name, value, f"{indent}  ")


def main() -> None:
    arguments = parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    scheme = None if arguments.scheme == "bf16" else arguments.scheme
    results: dict[str, Any] = {**machine(), "shape": arguments.shape, "scheme": arguments.scheme}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_vision_folder(folder, arguments.shape, scheme)
        source = Source(folder, arguments.side)
        settings = {"max_num_batched_tokens": arguments.max_num_batched_tokens}
        if arguments.target_itl_ms:
            settings["target_itl_ms"] = arguments.target_itl_ms
        if arguments.tower:
            settings["mm_encoder_quantization"] = arguments.tower
        llm = LLM(name, load_format="dummy", max_num_seqs=64, max_model_len=8192, **settings)
        llm.capture_graphs()
        show("engine", {**results, **settings})
        for part in arguments.parts:
            results[part] = (
                host(source, arguments.repeats)
                if part == "host"
                else {"encoder": encoder, "first": first, "beside": beside, "profile": profile}[
                    part
                ](llm, source, arguments)
            )
            show(part, results[part])
    write_json(arguments.json, results)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--shape", choices=VISION_SHAPES, default="qwen3-vl-8b")
    made.add_argument("--scheme", default="w4a16-sym", help="or bf16")
    parts = ["host", "encoder", "first", "beside", "profile"]
    made.add_argument("--parts", nargs="+", choices=parts, default=parts)
    made.add_argument("--side", type=int, default=1024, help="pixels of an image's side")
    made.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    made.add_argument(
        "--requests",
        type=int,
        default=16,
        help="number of requests with an image, sent during decodes",
    )
    made.add_argument("--decodes", type=int, default=32)
    made.add_argument("--decode-tokens", type=int, default=1024)
    made.add_argument("--apart-ms", type=float, default=100, help="between two requests")
    made.add_argument("--max-num-batched-tokens", type=int, default=8192)
    made.add_argument("--target-itl-ms", type=float)
    made.add_argument("--tower", help="scheme of the vision tower; default: float")
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--json", help="file to write the results to")
    return made


if __name__ == "__main__":
    main()
