"""Train Medusa heads for a model, and write them in the layout of Medusa's authors.

    python examples/train_medusa.py MODEL --data texts.jsonl --output heads

Data and flags are the same as for train_eagle3.py, and windows that it saved (--save-windows) can
be used here. From the target's frozen last state, the heads learn its distribution one, two, ...
tokens later.
"""

import argparse
from pathlib import Path

import torch
from head_training import add_flags, chosen_device, read_windows, train, weights_of, write_result

from calibrate.heads.fit import in_16_bits
from calibrate.heads.medusa import MedusaModule, head_losses
from calibrate.heads.target import Target
from formats.heads.config import MedusaConfig
from formats.heads.save import save_medusa


def main() -> None:
    arguments = parser().parse_args()
    torch.manual_seed(arguments.seed)
    target = Target(arguments.model, device=chosen_device(arguments), aux_layers=())
    windows_WS, held_WS = read_windows(arguments, target)
    heads = MedusaModule(target.head.float(), arguments.heads, arguments.layers)
    heads.to(target.device)
    dtype = target.embedding.dtype

    def losses(ids_BS: torch.Tensor) -> list:
        seen = target.see(ids_BS)
        with in_16_bits(target.device):
            return list(head_losses(heads, seen.last_BSC.to(dtype), seen.logits_BSV))

    outputs = tuple(head[-1].weight for head in heads.heads)
    trained = train(heads, losses, windows_WS, held_WS, arguments, outputs=outputs, warm_up=0.1)
    config = MedusaConfig(num_heads=arguments.heads, num_layers=arguments.layers)
    folder = Path(arguments.output) / "medusa"
    save_medusa(folder, config, weights_of(heads.tensors()), arguments.model)
    write_result(arguments, trained, accuracy_of="heads")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("model", help="folder of the target")
    add_flags(made)
    made.add_argument("--heads", type=int, default=4, help="tokens that are drafted")
    made.add_argument("--layers", type=int, default=1, help="residual blocks of a head")
    return made


if __name__ == "__main__":
    main()
