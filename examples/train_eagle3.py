"""Train an EAGLE-3 draft head for a model, and write it in both layouts that servers read.

    python examples/train_eagle3.py MODEL --data texts.jsonl --output head

The target's own continuations of the texts are sampled first, then the head is trained on texts and
continuations by the training-time test: each step takes the state that the step before made. What
is printed at the end is the share of held-out positions where each step's likeliest token is the
target's; examples/measure_acceptance.py measures the head in the engine.

The folder holds `original/` (SafeAILab, SGLang) and `speculators/` (vLLM).
"""

import argparse
import json
import math
import time
from functools import partial
from pathlib import Path

import torch

from calibrate.heads.eagle3 import Eagle3Module, start_from_target, step_losses
from calibrate.heads.fit import FitSettings, accuracies, fit, in_16_bits
from calibrate.heads.target import Target
from calibrate.heads.windows import continued_windows, load_windows, save_windows, text_windows
from formats.checkpoint import CONFIG, read_json
from formats.heads.config import EAGLE3, SPECULATORS, EagleConfig, usual_taps
from formats.heads.save import LAYOUTS, save_eagle3

# of the target's config.json: what the head's layer has in common with its layers
SHARED = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_theta"),
    *("rope_scaling", "rope_parameters", "bos_token_id", "eos_token_id"),
)


def main() -> None:
    arguments = parser().parse_args()
    torch.manual_seed(arguments.seed)
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    num_layers = read_json(Path(arguments.model) / CONFIG)["num_hidden_layers"]
    target = Target(arguments.model, device=device, taps=chosen_taps(arguments.taps, num_layers))
    windows_WS, held_WS = read_windows(arguments, target)
    config = head_config(arguments, target)
    draft_ids = draft_vocabulary(windows_WS, config)
    draft_ids = None if draft_ids is None else draft_ids.to(target.device)

    head = Eagle3Module(config, target.embedding.float())
    start_from_target(head, {"lm_head": target.head, "norm": target.last_norm}, draft_ids)
    head.to(target.device)
    head.embedding = [target.embedding]

    def losses(ids_BS: torch.Tensor, num_steps: int = arguments.steps) -> list:
        ids_BS = ids_BS.to(target.device)
        seen = target.see(ids_BS)
        with in_16_bits(target.device):
            return list(
                step_losses(
                    head,
                    ids_BS,
                    seen.taps_BSF,
                    seen.logits_BSV,
                    num_steps=num_steps,
                    draft_ids_U=draft_ids,
                )
            )

    settings = FitSettings(
        epochs=arguments.epochs,
        batch=arguments.batch,
        rate=arguments.rate,
        output_rate=arguments.output_rate,
        decay=arguments.decay,
        seconds=arguments.seconds,
        seed=arguments.seed,
    )
    started = time.monotonic()
    steps = fit(
        head,
        windows_WS,
        losses,
        settings,
        outputs=(head.lm_head.weight,),
        held_WS=held_WS[: arguments.batch],
    )
    seconds = time.monotonic() - started
    found = accuracies(held_WS, partial(losses, num_steps=arguments.eval_steps), arguments.batch)
    tables = {}
    if draft_ids is not None:
        in_draft = torch.zeros(config.vocab_size, dtype=torch.bool)
        in_draft[draft_ids.cpu()] = True
        offsets = draft_ids.cpu() - torch.arange(len(draft_ids))
        tables = {"d2t": offsets, "t2d": in_draft}
    tensors = {n: t.detach().to("cpu", torch.bfloat16) for n, t in head.state_dict().items()}
    verifier = {**read_json(Path(arguments.model) / CONFIG), "name_or_path": arguments.model}
    for layout in LAYOUTS:
        save_eagle3(
            Path(arguments.output) / layout,
            config,
            {**tensors, **tables},
            layout=layout,
            verifier=verifier,
        )
    result = {
        "target": arguments.model,
        "windows": list(windows_WS.shape),
        "batches": steps,
        "seconds": round(seconds, 1),
        "parameters": sum(each.numel() for each in head.parameters()),
        "accuracy_of_steps": [round(each, 4) for each in found],
        "expected_acceptance_length": round(expected_length(found), 3),
    }
    (Path(arguments.output) / "training.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def expected_length(accuracy: list[float]) -> float:
    """Tokens of a verify, its own included, were each step right on its own."""
    return 1 + sum(math.prod(accuracy[: count + 1]) for count in range(len(accuracy)))


def read_windows(
    arguments: argparse.Namespace, target: Target
) -> tuple[torch.Tensor, torch.Tensor]:
    """(windows to train on, windows held out)."""
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


def head_config(arguments: argparse.Namespace, target: Target) -> EagleConfig:
    """A head whose layer is as wide as the target's."""
    stated, num_layers = target.config.to_dict(), target.config.num_hidden_layers
    values = {key: stated[key] for key in SHARED if stated.get(key) is not None}
    values |= {"model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu"}
    values |= {"tie_word_embeddings": False, "dtype": "bfloat16"}
    if arguments.intermediate_size:
        values["intermediate_size"] = arguments.intermediate_size
    return EagleConfig(
        kind=EAGLE3,
        layout=SPECULATORS,
        values=values,
        target_hidden_size=values["hidden_size"],
        draft_vocab_size=min(arguments.draft_vocab or math.inf, values["vocab_size"]),
        num_taps=len(target.taps),
        stated_taps=() if target.taps == usual_taps(num_layers) else target.taps,
        norm_before_residual=True,
        norm_output=False,
        norm_before_fc=False,
        fc_norm=False,
    )


def chosen_taps(stated: list[int] | None, num_layers: int) -> tuple[int, ...]:
    """Those stated, else the usual ones; of a model too shallow for them, others that differ."""
    usual = usual_taps(num_layers)
    if stated:
        return tuple(stated)
    if list(usual) == sorted(set(usual)):
        return usual
    return tuple(sorted({1, num_layers // 2, num_layers - 1}))


def draft_vocabulary(windows_WS: torch.Tensor, config: EagleConfig) -> torch.Tensor | None:
    """The most frequent tokens in ascending order; None: the head has all."""
    if config.draft_vocab_size == config.vocab_size:
        return None
    counts = torch.bincount(windows_WS.flatten(), minlength=config.vocab_size)
    return counts.topk(config.draft_vocab_size).indices.sort().values


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("model", help="folder of the target")
    add_data_flags(made)
    made.add_argument("--steps", type=int, default=3, help="of the training-time test")
    made.add_argument("--eval-steps", type=int, default=5, help="of which accuracy is told")
    made.add_argument("--draft-vocab", type=int, default=0, help="tokens of the head; 0: all")
    made.add_argument(
        "--taps", type=int, nargs="+", help="layers before the states to read; default: 2, L/2, L-3"
    )
    made.add_argument("--intermediate-size", type=int, default=0, help="0: the target's")
    made.set_defaults(decay=0.8)
    return made


def add_data_flags(made: argparse.ArgumentParser) -> None:
    """What the trainings of all heads are told."""
    made.add_argument("--data", help="texts: .jsonl, .txt or .md")
    made.add_argument("--output", required=True, help="folder to write")
    made.add_argument("--held-out", help="texts to measure on; default: a twentieth of the windows")
    made.add_argument("--held-windows", type=int, default=256, help="most windows to measure on")
    made.add_argument("--windows", help="windows that --save-windows kept, in place of --data")
    made.add_argument("--save-windows", help="file to keep the windows in")
    made.add_argument("--length", type=int, default=512, help="tokens of a window")
    made.add_argument("--continued", type=int, default=8192, help="windows that the target writes")
    made.add_argument("--sampling-batch", type=int, default=256)
    made.add_argument("--sampling-seconds", type=float, default=math.inf, help="most time for it")
    made.add_argument("--temperature", type=float, default=1.0, help="of the target's own texts")
    made.add_argument("--epochs", type=int, default=3, help="more data is better than more of them")
    made.add_argument("--batch", type=int, default=32, help="windows of a step")
    made.add_argument("--rate", type=float, default=8e-3, help="of layers")
    made.add_argument("--output-rate", type=float, default=5e-4, help="of output matrices")
    made.add_argument("--seconds", type=float, default=math.inf, help="most time for training")
    made.add_argument("--device", default="auto")
    made.add_argument("--seed", type=int, default=0)


if __name__ == "__main__":
    main()
