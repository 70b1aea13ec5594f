"""Measure the cost of LoRA adapters in a decode step.

    python examples/measure_lora.py --json lora.json

The model has Llama-3-8B's shape, with random weights in W4A16 and random adapters. For each batch
these cases alternate within one run: an engine without adapters; an engine with adapters that no
request uses; all rows with the same adapter; each row with its own (up to --max-loras); half of the
rows with one. Then each linear of a layer is checked against plain torch and measured, with and
without adapters.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import torch
from bench_shapes import SHAPES, write_config
from safetensors.torch import save_file

BATCHES = (1, 8, 32, 128)
KINDS = ("plain engine", "none", "one", "own", "half")


def write_adapters(folder: Path, shape: str, count: int, rank: int) -> list:
    """Write PEFT folders of random numbers for every linear; return their LoRARequests."""
    from formats.families import FAMILIES
    from formats.peft.lora import adapted_shapes
    from qserve.lora.request import LoRARequest

    write_config(folder, shape, None)
    config = json.loads((folder / "config.json").read_text())
    shapes = adapted_shapes(FAMILIES[config["architectures"][0]], config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stated = {"peft_type": "LORA", "r": rank, "lora_alpha": rank // 2, "bias": "none"}
    stated["target_modules"] = sorted({name.rpartition(".")[2] for name in shapes})
    found = []
    for number in range(1, count + 1):
        tensors = {}
        for module, (outputs, inputs) in shapes.items():
            for part, size in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = torch.randn(size, device=device, dtype=torch.bfloat16) * 0.01
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = values.cpu()
        adapter = folder / f"a{number}"
        adapter.mkdir()
        save_file(tensors, adapter / "adapter_model.safetensors")
        (adapter / "adapter_config.json").write_text(json.dumps(stated))
        found.append(LoRARequest(adapter.name, number, str(adapter)))
    return found


def loras_of(kind: str, loras: list, batch: int) -> list | None:
    if kind in ("plain engine", "none"):
        return None
    if kind == "half":
        return [loras[0] if n % 2 else None for n in range(batch)]
    return [loras[n % len(loras) if kind == "own" else 0] for n in range(batch)]


def step_ms(llm, batch: int, length: int, num_output: int, loras, rng: random.Random) -> float:
    """Return the time of a decode step: a whole run minus the time to its first tokens."""
    from qserve import SamplingParams

    def seconds(count: int) -> float:
        prompts = [[rng.randrange(2, 500) for _ in range(length)] for _ in range(batch)]
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False, lora_request=loras)
        return time.perf_counter() - started

    seconds(4)
    return 1e3 * (seconds(num_output) - seconds(1)) / (num_output - 1)


def measure_steps(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    from qserve import LLM

    settings = {"load_format": "dummy", "max_num_seqs": 128, "kv_cache_memory": arguments.kv_gb}
    settings["batch_invariant"] = arguments.batch_invariant
    adapted = {"max_loras": arguments.max_loras, "max_lora_rank": arguments.rank}
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), arguments.shape, "w4a16-sym")
        plain = LLM(folder, **settings)
        llm = LLM(folder, enable_lora=True, **adapted, **settings)
        plain.capture_graphs()
        llm.capture_graphs()
    with tempfile.TemporaryDirectory() as folder:
        loras = write_adapters(Path(folder), arguments.shape, arguments.max_loras, arguments.rank)
        step_ms(llm, len(loras), 8, 2, loras, random.Random(0))  # reads them
    rng, found = random.Random(1), {}
    for batch in BATCHES:
        if batch > arguments.max_batch:
            continue
        best = dict.fromkeys(KINDS, float("inf"))
        for _ in range(arguments.repeats):
            for kind in KINDS:
                one = plain if kind == "plain engine" else llm
                asked = loras_of(kind, loras, batch)
                took = step_ms(one, batch, 128, arguments.output, asked, rng)
                best[kind] = min(best[kind], took)
        found[f"batch {batch}"] = best
        base = best["plain engine"]
        text = ", ".join(f"{k} {v:.3f} ({100 * (v / base - 1):+.1f} %)" for k, v in best.items())
        print(f"batch {batch}, ms a step: {text}", flush=True)
    return found


def random_lora(K: int, sizes: tuple[int, ...], num_slots: int, rank: int):
    from qkernels.lora.weights import TABLE_COLUMNS, LoraWeights

    N, S = sum(sizes), len(sizes)
    return LoraWeights(
        a_LRSK=torch.randn(num_slots, rank, S, K, device="cuda").bfloat16() / K**0.5,
        b_LRN=torch.randn(num_slots, rank, N, device="cuda").bfloat16(),
        ranks_LS=torch.full((num_slots, TABLE_COLUMNS), rank, dtype=torch.int32, device="cuda"),
        scales_LS=torch.full((num_slots, TABLE_COLUMNS), 0.5, device="cuda"),
        sizes=sizes,
    )


def adapted_product(plan, x, weight, lora, slots):
    """Run a linear's kernels after the norm: shrink, product, and expand if it is separate.

    `x`: the input as a tensor, and in the form that the norm produces.
    """
    from qkernels import ops

    x_TK, taken = x
    if plan.adds_adapters:
        return ops.linear(taken, weight, None, plan, ops.lora_term(x_TK, slots, lora))
    h = ops.lora_shrink(x_TK, slots, lora)
    y = ops.linear(taken, weight, None, plan)
    ops.lora_expand_(y, h, slots, lora)
    return y


def measure_kernels(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure the microseconds of each linear of a layer in W4A16, all rows with an adapter.

    Weights and adapters are read from memory. `shrink` alone is measured with one adapter.
    """
    from qkernels import ops, reference
    from qkernels.bench.linear import w4a16_weights
    from qkernels.bench.measure import time_calls

    shape = SHAPES[arguments.shape]
    C, I = shape["hidden_size"], shape["intermediate_size"]  # noqa: E741
    kv = C // shape["num_attention_heads"] * shape["num_key_value_heads"]
    linears = {"qkv": (C, (C, kv, kv)), "o": (C, (C,)), "gate_up": (C, (I, I)), "down": (I, (C,))}
    L, found = arguments.max_loras, {}
    for name, (K, sizes) in linears.items():
        weights, _ = w4a16_weights(sum(sizes), K)
        loras = [random_lora(K, sizes, L, arguments.rank) for _ in weights]
        for T in (1, 8, 32, 64, 128, 2048):
            plain = ops.plan_linear(weights[0], T)
            plan = ops.plan_linear(weights[0], T, adapted=sizes)
            x = torch.randn(T, K, device="cuda").bfloat16()
            made = (x, ops.in_form(x, plan.input))
            one, own = (torch.arange(T, device="cuda") % count for count in (1, L))
            one, own = one.int(), own.int()
            y = ops.linear(made[1], weights[0], None, plain)
            got = adapted_product(plan, made, weights[0], loras[0], own).float() - y.float()
            want = torch.zeros_like(got)
            h = reference.lora_shrink(x, own, loras[0])
            reference.lora_expand_(want, h, own, loras[0])
            error = ((got - want).norm() / (want.norm() + y.float().norm())).item()
            assert error < 0.01, f"{name} T={T}: {error}"

            def times(run, weights=weights, loras=loras):
                calls = [lambda w=w, a=a: run(w, a) for w, a in zip(weights, loras, strict=True)]
                return time_calls(calls * max(1, 32 // len(calls)))

            figures = {
                "product": times(lambda w, a, x=made[1], p=plain: ops.linear(x, w, None, p)),
                "shrink": times(lambda w, a, x=x, s=one: ops.lora_term(x, s, a)),
                "one": times(lambda w, a, x=made, s=one, p=plan: adapted_product(p, x, w, a, s)),
                "own": times(lambda w, a, x=made, s=own, p=plan: adapted_product(p, x, w, a, s)),
            }
            found[f"{name} T={T}"] = figures
            text = ", ".join(f"{kind} {us:.2f}" for kind, us in figures.items())
            print(f"{name} T={T}, us: {text}; error {error:.1e}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="llama-3-8b", choices=list(SHAPES))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-loras", type=int, default=8)
    parser.add_argument("--max-batch", type=int, default=128)
    parser.add_argument("--output", type=int, default=128, help="tokens per request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-gb", type=float, default=8.0, help="memory of each engine's KV pages")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--steps-only", action="store_true", help="measure decode steps only")
    parser.add_argument("--json", help="also write the results here")
    arguments = parser.parse_args()
    found = {"steps": measure_steps(arguments)}
    if torch.cuda.is_available() and not arguments.steps_only:
        found["kernels"] = measure_kernels(arguments)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
