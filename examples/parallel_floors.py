"""Predict the gain of several GPUs, from bytes, operations and measured constants.

    python examples/parallel_floors.py --shape qwen3-30b-a3b gpt-oss-120b --json floors.json

It prints times in ms on 1, 2, 4 and 8 GPUs. A decode step is predicted with a slice of each expert
per GPU (tp) and with whole experts (ep), a long prompt with layers divided (tp) and with tokens
divided (cp). measure_parallel.py measures the same. The time of a decode step is the time to read
the weights, plus fixed costs and sums over ranks. Reading keys and computing are left out, so
predictions hold for few requests and short contexts. The lower efficiency of kernels with less work
is not modelled.

An expert-parallel step waits for the GPU with the most active experts. Their number is the mean
over random choices. Real texts use fewer distinct experts, and use them less evenly.
"""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

from bench_shapes import SHAPES

SIZES = (1, 2, 4, 8)
DRAWS = 200  # random choices of experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Constants of an H200 (examples/MEASURED.md, qkernels/notes)."""

    bytes_per_s: float = 4.3e12  # weights of decode steps
    operations_per_s: float = 7.2e14  # products and attention of prompts: Llama-3-8B, 8000 tokens
    layer_us: float = 23.0  # all else in a dense layer of a step
    expert_layer_us: float = 30.0  # in a layer with experts: Qwen3-30B at one token, less its bytes
    sum_us: float = 1.4  # an all-reduce in the kernel of the norm, less the norm; one row
    two_shot_us: float = 4.0  # that a sum in two steps takes longer
    wire_bytes_per_s: float = 2.8e11  # to a GPU, for long tensors
    exchange_us: float = 60.0  # of a layer's keys and values: launches, and NCCL's latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes of a model on which times depend. By default, weights have 4 bits in groups of 128."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    inner: int  # of a feed-forward, or of one expert
    experts: int = 0
    top_k: int = 1
    shared: int = 0  # inner size of the shared experts together
    bits: float = 4.125

    @classmethod
    def of(cls, shape: str, bits: float | None = None) -> "Model":
        config = SHAPES[shape]
        heads = config["num_attention_heads"]
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next((config[name] for name in names if name in config), 0)
        inner = config.get("moe_intermediate_size") or config["intermediate_size"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            inner=inner,
            experts=experts,
            top_k=config.get("num_experts_per_tok", 1),
            shared=config.get("n_shared_experts", 0) * inner,
            bits=bits or (4.25 if config.get("model_type") == "gpt_oss" else 4.125),
        )

    @property
    def attention_weights(self) -> int:
        """Return the number of weights of a layer's attention."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def shared_weights(self) -> int:
        """Return the number of weights of a layer's shared experts."""
        return 3 * self.hidden * self.shared

    @property
    def expert_weights(self) -> int:
        """Return the number of weights of one expert, or of a dense feed-forward."""
        return 3 * self.hidden * self.inner


def active_experts(model: Model, tokens: int, ranks: int) -> tuple[float, float]:
    """Return the mean number of active experts of a layer, and of the rank with the most."""
    rng, total, most = random.Random(0), 0, 0
    for _ in range(DRAWS):
        chosen = {e for _ in range(tokens) for e in rng.sample(range(model.experts), model.top_k)}
        on_rank = [0] * ranks
        for expert in chosen:
            on_rank[expert * ranks // model.experts] += 1
        total, most = total + len(chosen), most + max(on_rank)
    return total / DRAWS, most / DRAWS


def step_ms(model: Model, gpu: Gpu, tokens: int, ranks: int, whole_experts: bool) -> float:
    """Return the ms of a decode step, without reading keys."""
    share = 1 / ranks
    weights = (model.attention_weights + model.shared_weights) * share
    if model.experts:
        distinct, most = active_experts(model, tokens, ranks)
        weights += model.expert_weights * (most if whole_experts else distinct * share)
    else:
        weights += model.expert_weights * share
    layer_bytes = weights * model.bits / 8 + 2 * model.hidden * model.experts
    head_bytes = 2 * model.hidden * model.vocab * share
    fixed_us = gpu.expert_layer_us if model.experts else gpu.layer_us
    sums_us = 0.0
    if ranks > 1:
        one_shot = 4 * model.hidden * tokens * (ranks - 1)  # float32, from every other rank
        two_shot = one_shot / ranks  # 16 bits, twice
        received_us = [each / gpu.wire_bytes_per_s * 1e6 for each in (one_shot, two_shot)]
        sums_us = 2 * (gpu.sum_us + min(received_us[0], received_us[1] + gpu.two_shot_us))
    seconds = (model.layers * layer_bytes + head_bytes) / gpu.bytes_per_s
    return 1e3 * seconds + model.layers * (fixed_us + sums_us) / 1e3


def prompt_ms(model: Model, gpu: Gpu, tokens: int, chunk: int, tensor: int, contexts: int) -> float:
    """Return the ms of a prompt computed in steps of `chunk` tokens."""
    per_token = model.attention_weights + model.shared_weights
    per_token += model.expert_weights * model.top_k
    operations = 2 * per_token * tokens + 2 * model.heads * model.head_dim * tokens**2
    seconds = model.layers * operations / gpu.operations_per_s / (tensor * contexts)
    steps = -(-tokens // chunk)
    if tensor > 1:  # of activations in 16 bits: what a rank receives, two sums a layer
        received = 2 * 2 * (tensor - 1) / tensor * model.hidden * tokens / contexts
        seconds += 2 * model.layers * received / gpu.wire_bytes_per_s
    if contexts > 1:  # keys and values in 16 bits, and the copies around the exchange
        stored = 2 * 2 * model.kv_heads * model.head_dim * tokens / min(tensor, model.kv_heads)
        received = stored * (contexts - 1) / contexts
        seconds += model.layers * (received / gpu.wire_bytes_per_s + 4 * stored / gpu.bytes_per_s)
        seconds += model.layers * steps * gpu.exchange_us / 1e6
    return 1e3 * seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["qwen3-30b-a3b"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=64000)
    parser.add_argument("--chunk", type=int, default=8192, help="--max-num-batched-tokens")
    parser.add_argument("--bits", type=float, help="of a weight with its scales, e.g. 8 for W8A8")
    parser.add_argument("--json", help="file to write the results to")
    arguments = parser.parse_args()
    gpu, results = Gpu(), {}
    for shape in arguments.shape:
        model, found = Model.of(shape, arguments.bits), {}
        for ranks in SIZES:
            kinds = {"tp": False} | ({"ep": True} if model.experts and ranks > 1 else {})
            for kind, whole in kinds.items():
                found[f"{kind}{ranks}_step_ms"] = {
                    batch: round(step_ms(model, gpu, batch, ranks, whole), 2)
                    for batch in arguments.batches
                }
        for ranks in SIZES:
            prompt = arguments.prompt, arguments.chunk
            found[f"tp{ranks}_prompt_ms"] = round(prompt_ms(model, gpu, *prompt, ranks, 1))
            found[f"cp{ranks}_prompt_ms"] = round(prompt_ms(model, gpu, *prompt, 1, ranks))
        results[shape] = found
        print(shape)
        for name, value in found.items():
            print(f"  {name:16} {value}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
