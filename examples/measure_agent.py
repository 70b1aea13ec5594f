"""Measure an agent's conversations: turns with a growing prompt, tool results, and branches.

    python examples/measure_agent.py --shape qwen3.6-35b-a3b
    python examples/measure_agent.py --shape tiny-hybrid --turns 8 --tokens 3000 --first 400

The model has random weights in the given shape, in W4A16 or in float (--float). Each turn's prompt
is the whole conversation: a long first prompt, and after each answer a tool result of random
length. Each line shows the prompt's tokens, the turn's own tokens, the tokens computed, and the
time to the first token with the prefix cache (warm); for the last turn also without it (cold).

A turn's own tokens are those after the previous answer. A turn should compute at most its own
tokens plus one interval of state snapshots (the bound). After the turns, branches continue earlier
turns with other tool results. The exit code is 1 if a turn or a branch exceeds the bound.
"""

import argparse
import json
import logging
import platform
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from bench_shapes import SHAPES, write_config

from qserve import LLM, SamplingParams
from qserve.engine.kv_cache.state_snapshots import SPACING

VOCABULARY = 1000  # of the prompts' tokens; the smallest shape has more


@dataclass(slots=True, kw_only=True)
class Turn:
    """One request of a conversation."""

    prompt: list[int]
    own: int  # tokens after the answer before it
    computed: int  # tokens of the prompt that the cache did not have
    ttft_ms: float
    answer: list[int]

    @property
    def after(self) -> list[int]:
        """Return the tokens with which the next turn's prompt begins."""
        return self.prompt + self.answer


@dataclass(slots=True, kw_only=True)
class Conversation:
    """The turns so far, and a source of random tokens for the next ones."""

    source: random.Random
    turns: list[Turn] = field(default_factory=list)

    def tokens(self, count: int) -> list[int]:
        return [self.source.randrange(3, VOCABULARY) for _ in range(count)]


def run(llm: LLM, prompt: list[int], own: int, num_output: int) -> Turn:
    """Send one request, and wait for its answer."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False)
    started, first, answer, num_cached = time.perf_counter(), None, [], 0
    engine.add_request("turn", prompt, params)
    while engine.has_work():
        for event in engine.step():
            first = first or time.perf_counter()
            answer += event.token_ids
            num_cached = event.facts.num_cached
    return Turn(
        prompt=prompt,
        own=own,
        computed=len(prompt) - num_cached,
        ttft_ms=(first - started) * 1e3,
        answer=answer,
    )


def run_turns(llm: LLM, arguments: argparse.Namespace) -> list[Conversation]:
    """Run all conversations, alternating between them after each turn."""
    chats = [Conversation(source=random.Random(number)) for number in range(arguments.chats)]
    rest = arguments.tokens - arguments.first - arguments.turns * arguments.output
    mean = max(1, rest // max(1, arguments.turns - 1))
    for number in range(arguments.turns):
        for chat in chats:
            count = arguments.first
            if number:
                count = chat.source.randint(mean // 4, 2 * mean - mean // 4)
            before = chat.turns[-1].after if number else []
            prompt = before + chat.tokens(count)
            chat.turns.append(run(llm, prompt, count, arguments.output))
    return chats


def run_branches(llm: LLM, chats: list[Conversation], arguments: argparse.Namespace) -> list[Turn]:
    """Continue earlier turns with other tool results, and repeat a prompt."""
    found = []
    for chat in chats:
        turns = chat.turns[:-1]
        for turn in (turns[len(turns) // 3], turns[len(turns) // 2], turns[-1]):
            own = chat.tokens(arguments.branch)
            found.append(run(llm, turn.after + own, len(own), arguments.output))
        found.append(run(llm, turns[len(turns) // 2].prompt, 0, arguments.output))
    return found


def report(label: str, turn: Turn, bound: int) -> bool:
    """Print a turn's line. Returns True if the turn is within the bound."""
    is_fine = turn.computed <= bound
    mark = "" if is_fine else "   above the bound"
    print(
        f"{label:12} {len(turn.prompt):9,} {turn.own:7,} {turn.computed:9,} {bound:7,}"
        f" {turn.ttft_ms:9.1f} ms{mark}"
    )
    return is_fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.6-35b-a3b")
    parser.add_argument("--float", action="store_true", help="float weights instead of W4A16")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument(
        "--tokens", type=int, default=80_000, help="approximate conversation length"
    )
    parser.add_argument("--first", type=int, default=10_000, help="tokens of the first prompt")
    parser.add_argument(
        "--branch", type=int, default=1_000, help="tokens of a branch's tool result"
    )
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--chats", type=int, default=1, help="number of conversations")
    parser.add_argument("--kv-offload-gb", type=float, default=0.0)
    parser.add_argument("--kv-cache-memory", type=float, help="GiB for KV pages on a GPU")
    parser.add_argument("--num-state-snapshots", type=int, help="default: memory decides")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--speculative-config", help="as `qserve serve` takes it")
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), arguments.shape, None if arguments.float else "w4a16-sym")
        llm = LLM(
            folder,
            load_format="dummy",
            max_num_seqs=8,
            max_model_len=2 * arguments.tokens + arguments.branch,
            kv_offload_gb=arguments.kv_offload_gb,
            kv_cache_memory=arguments.kv_cache_memory,
            num_state_snapshots=arguments.num_state_snapshots,
            tensor_parallel_size=arguments.tensor_parallel_size,
            speculative_config=arguments.speculative_config,
        )
        try:
            return measure(llm, arguments)
        finally:
            llm.close()


def measure(llm: LLM, arguments: argparse.Namespace) -> int:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    runner = llm.engine.runner
    print(
        f"{arguments.shape} on {device}: {runner.num_snapshots} snapshots of"
        f" {runner.bytes_per_state / 2**20:.1f} MiB on the device, interval {SPACING} tokens"
    )
    run(llm, Conversation(source=random.Random(-1)).tokens(arguments.first), 0, 4)  # warms up
    llm.reset_prefix_cache()
    chats = run_turns(llm, arguments)
    branches = run_branches(llm, chats, arguments)
    names = ("prompt", "own", "computed", "bound", "first token")
    print(f"{'turn':12} {names[0]:>9} {names[1]:>7} {names[2]:>9} {names[3]:>7} {names[4]:>12}")
    are_fine, shown = [], {0, 1, *range(4, arguments.turns, 5), arguments.turns - 1}
    for number in range(arguments.turns):
        for chat in chats[: 1 if number in shown else 0]:
            bound = chat.turns[number].own + (SPACING if number else 0)
            are_fine.append(report(f"{number + 1}", chat.turns[number], bound))
    for chat in chats:
        are_fine += [turn.computed <= turn.own + SPACING for turn in chat.turns[1:]]
    for turn in branches[:4]:
        are_fine.append(report("branch" if turn.own else "again", turn, turn.own + SPACING))
    are_fine += [turn.computed <= turn.own + SPACING for turn in branches[4:]]
    warm = [turn.ttft_ms for chat in chats for turn in chat.turns[1:]]
    last = chats[0].turns[-1]
    llm.reset_prefix_cache()
    cold = run(llm, last.prompt, last.own, arguments.output)
    report("last, cold", cold, len(cold.prompt))
    print(
        f"first token: warm {statistics.median(warm):.1f} ms (median; last turn"
        f" {last.ttft_ms:.1f}), cold {cold.ttft_ms:.1f} ms: {cold.ttft_ms / last.ttft_ms:.1f} times"
    )
    num_above = are_fine.count(False)
    if arguments.json:
        lines = [asdict(turn) for chat in chats for turn in chat.turns]
        found = {"turns": lines, "branches": [asdict(turn) for turn in branches]}
        for line in (*lines, *found["branches"], cold_line := asdict(cold)):
            line |= {"prompt": len(line["prompt"]), "answer": len(line["answer"])}
        found |= {"device": device, "settings": vars(arguments), "cold": cold_line}
        Path(arguments.json).write_text(json.dumps(found, indent=2))
    print(f"{num_above} of {len(are_fine)} lines above the bound" if num_above else "all in bounds")
    return int(num_above > 0)


if __name__ == "__main__":
    raise SystemExit(main())
