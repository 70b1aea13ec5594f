"""Code shared by the scripts that train draft heads: flags, data, training and its report."""

import argparse
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from calibrate.heads.fit import FitSettings, Losses, accuracies, fit
from calibrate.heads.image_windows import HeadWindows, answer_windows, chat_windows
from calibrate.heads.target import Target
from calibrate.heads.windows import continued_windows, load_windows, save_windows, text_windows
from formats.errors import InputError
from qserve.multimodal.calibration import CalibrationChats


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Time, data and accuracy of a training run."""

    windows: tuple[int, int]  # how many, and their length in tokens
    batches: int
    seconds: float
    parameters: int  # trained, so without an output matrix that is the target's
    accuracy: list[float]  # of each step or head, on the windows held out


def add_flags(made: argparse.ArgumentParser) -> None:
    """Flags for data, training and output."""
    made.add_argument("--data", help="texts: plain, JSON, JSON Lines or parquet")
    made.add_argument("--output", required=True, help="folder to write")
    made.add_argument("--held-out", help="texts to measure on; default: a twentieth of the windows")
    made.add_argument(
        "--held-windows", type=int, default=256, help="largest number of windows to measure on"
    )
    made.add_argument("--windows", help="windows from --save-windows, instead of --data")
    made.add_argument("--save-windows", help="file to save the windows in")
    made.add_argument("--length", type=int, default=512, help="tokens per window")
    made.add_argument("--continued", type=int, default=8192, help="windows that the target writes")
    made.add_argument("--sampling-batch", type=int, default=256)
    made.add_argument(
        "--sampling-seconds",
        type=float,
        default=math.inf,
        help="time limit of the continuations, seconds",
    )
    made.add_argument(
        "--temperature", type=float, default=1.0, help="temperature of the target's texts"
    )
    made.add_argument("--epochs", type=int, default=3, help="more data helps more than more epochs")
    made.add_argument("--batch", type=int, default=32, help="windows per step")
    made.add_argument("--rate", type=float, default=8e-3, help="learning rate of layers")
    made.add_argument(
        "--output-rate", type=float, default=5e-4, help="learning rate of output matrices"
    )
    made.add_argument(
        "--seconds", type=float, default=math.inf, help="time limit of training, seconds"
    )
    made.add_argument("--device", default="auto")
    made.add_argument("--seed", type=int, default=0)


def add_block_flags(made: argparse.ArgumentParser) -> None:
    """Flags for heads that draft in one pass."""
    made.add_argument(
        "--anchors",
        type=int,
        default=0,
        help="blocks of a window in each step; 0: a sixth of the window's tokens",
    )
    made.add_argument(
        "--after-errors",
        type=float,
        default=1.0,
        help="weight of the losses of a block after its first wrong draft",
    )


def num_anchors(arguments: argparse.Namespace, windows_WS: torch.Tensor) -> int:
    """Return the number of blocks per window of a training step."""
    return arguments.anchors or max(1, windows_WS.shape[1] // 6)


def chosen_device(arguments: argparse.Namespace) -> str:
    """Return the device of --device; `auto` means the GPU if there is one."""
    if arguments.device != "auto":
        return arguments.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def read_windows(
    arguments: argparse.Namespace, target: Target
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (training windows, held-out windows), token ids [W, S] each.

    They come from --windows, or from the texts of --data and the target's continuations of the
    texts' beginnings. With --save-windows they are also saved.
    """
    if arguments.windows:
        windows_WS = load_windows(arguments.windows)
        length = windows_WS.shape[1]
    else:
        length = arguments.length
        texts_WS = text_windows(arguments.data, target, length, seed=arguments.seed)
        windows_WS = texts_WS
        if arguments.continued:
            made_WS = continued_windows(
                target,
                texts_WS,
                arguments.continued,
                batch=arguments.sampling_batch,
                temperature=arguments.temperature,
                seconds=arguments.sampling_seconds,
                seed=arguments.seed,
            )
            windows_WS = torch.cat([texts_WS, made_WS])
    if arguments.held_out:
        held_WS = text_windows(arguments.held_out, target, length, most=arguments.held_windows)
    else:
        most = max(1, min(arguments.held_windows, len(windows_WS) // 20))
        held_WS, windows_WS = windows_WS[:most], windows_WS[most:]
    if arguments.save_windows:
        save_windows(arguments.save_windows, windows_WS)
    return windows_WS, held_WS


def read_image_windows(
    arguments: argparse.Namespace, target: Target
) -> tuple[HeadWindows, torch.Tensor, torch.Tensor]:
    """Return windows for a vision-language model, and the numbers [W, 1] to train on and held out.

    The windows come from the chats and texts of --data, and from the target's answers to the chats
    with images.
    """
    for name in ("windows", "save_windows"):
        if getattr(arguments, name):
            raise InputError(
                f"--{name.replace('_', '-')}", "does not keep images", "remove it: use --data"
            )
    chats, length = CalibrationChats(arguments.model), arguments.length
    found = chat_windows(arguments.data, target, chats, length, seed=arguments.seed)
    if arguments.continued and found.num_images:
        answers = answer_windows(
            arguments.data,
            target,
            chats,
            length,
            arguments.continued,
            temperature=arguments.temperature,
            seconds=arguments.sampling_seconds,
            seed=arguments.seed,
        )
        found = answers.joined(found)
    if arguments.held_out:
        count, most = len(found), arguments.held_windows
        held = chat_windows(arguments.held_out, target, chats, length, most=most)
        found = found.joined(held)
        numbers_W1 = torch.arange(len(found))[:, None]
        return found, numbers_W1[:count], numbers_W1[count:]
    most = max(1, min(arguments.held_windows, len(found) // 20))
    numbers_W1 = torch.arange(len(found))[:, None]
    return found, numbers_W1[most:], numbers_W1[:most]


def train(
    head: torch.nn.Module,
    losses: Losses,
    windows_WS: torch.Tensor,
    held_WS: torch.Tensor,
    arguments: argparse.Namespace,
    *,
    outputs: tuple[torch.nn.Parameter, ...],
    measured: Losses | None = None,
    **settings: float,
) -> Trained:
    """Train a head in place and measure it on the held-out windows.

    `outputs`: as in `fit`. `measured`: computes the accuracy; default: `losses`. `settings`: fields
    of FitSettings in addition to the flags.
    """
    chosen = FitSettings(
        epochs=arguments.epochs,
        batch=arguments.batch,
        rate=arguments.rate,
        output_rate=arguments.output_rate,
        seconds=arguments.seconds,
        seed=arguments.seed,
        **settings,
    )
    started = time.monotonic()
    watched_WS = held_WS[: arguments.batch]
    batches = fit(head, windows_WS, losses, chosen, outputs=outputs, held_WS=watched_WS)
    return Trained(
        windows=tuple(windows_WS.shape),
        batches=batches,
        seconds=time.monotonic() - started,
        parameters=sum(each.numel() for each in head.parameters() if each.requires_grad),
        accuracy=accuracies(held_WS, measured or losses, arguments.batch),
    )


def weights_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the head's tensors in the written form: bfloat16, on the CPU."""
    return {name: each.detach().to("cpu", torch.bfloat16) for name, each in tensors.items()}


def write_result(
    arguments: argparse.Namespace, trained: Trained, accuracy_of: Literal["steps", "heads"]
) -> None:
    """Write training.json into the folder, and print it."""
    result = {
        "target": arguments.model,
        "windows": list(trained.windows),
        "batches": trained.batches,
        "seconds": round(trained.seconds, 1),
        "parameters": trained.parameters,
        f"accuracy_of_{accuracy_of}": [round(each, 4) for each in trained.accuracy],
        "expected_acceptance_length": round(expected_length(trained.accuracy), 3),
    }
    (Path(arguments.output) / "training.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def expected_length(accuracy: list[float]) -> float:
    """Return the tokens per verification, with the bonus token, if steps were independent."""
    return 1 + sum(math.prod(accuracy[: count + 1]) for count in range(len(accuracy)))
