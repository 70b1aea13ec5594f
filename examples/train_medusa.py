"""Train Medusa heads for a model, and write them as Medusa's authors do.

    python examples/train_medusa.py MODEL --data texts.jsonl --output heads

Data and flags are those of train_eagle3.py; windows that it kept (--save-windows) serve here, too.
The heads learn the target's distribution one, two, ... tokens later from its frozen last state.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from train_eagle3 import add_data_flags, expected_length, read_windows

from calibrate.heads.fit import FitSettings, accuracies, fit, in_16_bits
from calibrate.heads.medusa import MedusaModule, head_losses
from calibrate.heads.target import Target
from formats.heads.config import MedusaConfig
from formats.heads.save import save_medusa


def main() -> None:
    arguments = parser().parse_args()
    torch.manual_seed(arguments.seed)
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    target = Target(arguments.model, device=device, taps=())
    windows_WS, held_WS = read_windows(arguments, target)
    heads = MedusaModule(target.head.float(), arguments.heads, arguments.layers)
    heads.to(target.device)

    def losses(ids_BS: torch.Tensor) -> list:
        seen = target.see(ids_BS)
        with in_16_bits(target.device):
            return list(head_losses(heads, seen.last_BSC.to(heads_dtype), seen.logits_BSV))

    heads_dtype = target.embedding.dtype
    settings = FitSettings(
        epochs=arguments.epochs,
        batch=arguments.batch,
        rate=arguments.rate,
        output_rate=arguments.output_rate,
        warm_up=0.1,
        decay=0.8,
        seconds=arguments.seconds,
        seed=arguments.seed,
    )
    started = time.monotonic()
    outputs = tuple(head[-1].weight for head in heads.heads)
    held = held_WS[: arguments.batch]
    steps = fit(heads, windows_WS, losses, settings, outputs=outputs, held_WS=held)
    seconds = time.monotonic() - started
    found = accuracies(held_WS, losses, arguments.batch)
    tensors = {n: t.detach().to("cpu", torch.bfloat16) for n, t in heads.tensors().items()}
    config = MedusaConfig(num_heads=arguments.heads, num_layers=arguments.layers)
    save_medusa(Path(arguments.output) / "medusa", config, tensors, arguments.model)
    result = {
        "target": arguments.model,
        "windows": list(windows_WS.shape),
        "batches": steps,
        "seconds": round(seconds, 1),
        "parameters": sum(each.numel() for each in heads.parameters()),
        "accuracy_of_heads": [round(each, 4) for each in found],
        "expected_acceptance_length": round(expected_length(found), 3),
    }
    (Path(arguments.output) / "training.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("model", help="folder of the target")
    add_data_flags(made)
    made.add_argument("--heads", type=int, default=4, help="tokens that are drafted")
    made.add_argument("--layers", type=int, default=1, help="residual blocks of a head")
    return made


if __name__ == "__main__":
    main()
