"""Train an EAGLE-3 draft head for a model, and write it in both layouts that servers read.

    python examples/train_eagle3.py MODEL --data texts.jsonl --output head
    python examples/train_eagle3.py MODEL --data texts.jsonl --parallel 8 --output head

First the target's continuations of the texts are sampled. Then the head is trained on texts and
continuations by the training-time test: each step reads the state that the previous step produced.
At the end it prints the fraction of held-out positions where each step's most likely token equals
the target's. examples/measure_acceptance.py measures the head in the engine.

With --eagle31 it is an EAGLE-3.1 head: each state is normalized, and the next step reads the
normalized state. With --parallel it is a P-EAGLE head, which makes all drafts in one pass: rows of
mask tokens follow random positions of the texts.

The folder holds `original/` (SafeAILab, SGLang) and `speculators/` (vLLM).
"""

import argparse
import math
from functools import partial
from pathlib import Path

import torch
from head_training import (
    add_block_flags,
    add_flags,
    chosen_device,
    num_anchors,
    read_image_windows,
    read_windows,
    train,
    weights_of,
    write_result,
)

from calibrate.heads.block import even_anchors
from calibrate.heads.eagle3 import Eagle3Module, start_from_target, step_losses
from calibrate.heads.fit import in_16_bits
from calibrate.heads.parallel import ParallelModule, parallel_losses
from calibrate.heads.target import Target, TargetOutputs
from formats.checkpoint import CONFIG, CheckpointReader, read_json
from formats.errors import InputError
from formats.heads.config import EAGLE3, PEAGLE, EagleConfig, default_aux_layers
from formats.heads.layers_config import SPECULATORS, LayersConfig
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
    num_layers = CheckpointReader(arguments.model).config["num_hidden_layers"]
    aux_layers = chosen_aux_layers(arguments.aux_layers, num_layers)
    target = Target(arguments.model, device=chosen_device(arguments), aux_layers=aux_layers)
    image_data = None
    if target.has_vision and arguments.parallel:
        raise InputError("--parallel", "does not train for vision-language models", "remove it")
    if target.has_vision:
        image_data, windows_WS, held_WS = read_image_windows(arguments, target)
        ids_WS = image_data.ids_WS[windows_WS[:, 0]]
    else:
        windows_WS, held_WS = read_windows(arguments, target)
        ids_WS = windows_WS
    config, anchors = head_config(arguments, target), num_anchors(arguments, ids_WS)
    draft_ids = draft_vocabulary(ids_WS, config)
    draft_ids = None if draft_ids is None else draft_ids.to(target.device)

    made = ParallelModule if arguments.parallel else Eagle3Module
    head = made(config, target.embedding.float())
    start_from_target(head, {"lm_head": target.head, "norm": target.last_norm}, draft_ids)
    head.to(target.device)
    head.embedding = [target.embedding]

    def of_drafts(ids_BS: torch.Tensor, seen: TargetOutputs) -> list:
        count, most = ids_BS.shape[1] - 1, arguments.parallel
        if torch.is_grad_enabled():
            anchors_A = torch.randint(0, count - most, (anchors,))
        else:
            anchors_A = even_anchors(count, most, 4 * anchors)
        with in_16_bits(target.device):
            return list(
                parallel_losses(
                    head,
                    ids_BS,
                    seen.aux_BSF,
                    seen.logits_BSV,
                    anchors_A.to(target.device),
                    num_drafts=most,
                    draft_ids_U=draft_ids,
                    after_errors=arguments.after_errors,
                )
            )

    def losses(ids_BS: torch.Tensor, num_steps: int = arguments.steps) -> list:
        if image_data is None:
            seen = target.see(ids_BS)
        else:  # numbers of windows
            chosen = image_data.of(ids_BS[:, 0].tolist())
            ids_BS, seen = chosen.ids_WS, chosen.seen(target)
        ids_BS = ids_BS.to(target.device)
        if arguments.parallel:
            return of_drafts(ids_BS, seen)
        with in_16_bits(target.device):
            return list(
                step_losses(
                    head,
                    ids_BS,
                    seen.aux_BSF,
                    seen.logits_BSV,
                    num_steps=num_steps,
                    draft_ids_U=draft_ids,
                    images=seen.images,
                )
            )

    trained = train(
        head,
        losses,
        windows_WS,
        held_WS,
        arguments,
        outputs=(head.lm_head.weight,),
        measured=partial(losses, num_steps=arguments.eval_steps),
    )
    tensors = weights_of(head.state_dict())
    if arguments.parallel:
        tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, -1)
    verifier = {
        **read_json(Path(arguments.model) / CONFIG),
        "num_hidden_layers": num_layers,
        "name_or_path": arguments.model,
    }
    for layout in LAYOUTS:
        save_eagle3(
            Path(arguments.output) / layout,
            config,
            {**tensors, **tables_of(draft_ids, config)},
            layout=layout,
            verifier=verifier,
        )
    write_result(arguments, trained, accuracy_of="steps")


def head_config(arguments: argparse.Namespace, target: Target) -> EagleConfig:
    """Return the config of a head whose layers are as wide as the target's."""
    stated, num_layers = target.config.to_dict(), target.config.num_hidden_layers
    values = {key: stated[key] for key in SHARED if stated.get(key) is not None}
    values |= {"model_type": "llama", "num_hidden_layers": arguments.layers, "hidden_act": "silu"}
    values |= {"tie_word_embeddings": False, "dtype": "bfloat16"}
    if target.axes:  # also if the target's config leaves them to its class
        ropes = values.get("rope_parameters") or values.get("rope_scaling") or {}
        values["rope_parameters"] = {**ropes, **target.axes}
    if arguments.intermediate_size:
        values["intermediate_size"] = arguments.intermediate_size
    mask = target.tokenizer.pad_token_id
    return EagleConfig(
        kind=PEAGLE if arguments.parallel else EAGLE3,
        mask_token_id=values["vocab_size"] - 1 if mask is None else mask,
        layout=SPECULATORS,
        values=values,
        target_hidden_size=values["hidden_size"],
        draft_vocab_size=min(arguments.draft_vocab or math.inf, values["vocab_size"]),
        num_aux=len(target.aux_layers),
        explicit_aux_layers=()
        if target.aux_layers == default_aux_layers(num_layers)
        else target.aux_layers,
        norm_before_residual=True,
        norm_output=arguments.eagle31,
        norm_before_fc=False,
        fc_norm=arguments.eagle31,
        image_embeddings=arguments.image_inputs == "embeddings" if target.has_vision else None,
    )


def chosen_aux_layers(stated: list[int] | None, num_layers: int) -> tuple[int, ...]:
    """Choose the states to read: those given, else EAGLE-3's; three distinct in shallow models."""
    default = default_aux_layers(num_layers)
    if stated:
        return tuple(stated)
    if list(default) == sorted(set(default)):
        return default
    return tuple(sorted({1, num_layers // 2, num_layers - 1}))


def draft_vocabulary(windows_WS: torch.Tensor, config: LayersConfig) -> torch.Tensor | None:
    """Return the most frequent tokens in ascending order, or None if the head has all tokens."""
    if config.draft_vocab_size == config.vocab_size:
        return None
    counts = torch.bincount(windows_WS.flatten(), minlength=config.vocab_size)
    return counts.topk(config.draft_vocab_size).indices.sort().values


def tables_of(draft_ids: torch.Tensor | None, config: LayersConfig) -> dict[str, torch.Tensor]:
    """Return the draft vocabulary's tables in a head's file, or {} if it has all tokens."""
    if draft_ids is None:
        return {}
    in_draft = torch.zeros(config.vocab_size, dtype=torch.bool)
    in_draft[draft_ids.cpu()] = True
    return {"d2t": draft_ids.cpu() - torch.arange(len(draft_ids)), "t2d": in_draft}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("model", help="folder of the target")
    add_flags(made)
    made.add_argument("--steps", type=int, default=3, help="steps of the training-time test")
    made.add_argument("--eval-steps", type=int, default=5, help="steps whose accuracy is reported")
    made.add_argument(
        "--draft-vocab", type=int, default=0, help="tokens that the head can draft; 0: all"
    )
    made.add_argument(
        "--aux-layers",
        type=int,
        nargs="+",
        help="layers before the states to read; default: 2, L/2, L-3",
    )
    made.add_argument(
        "--image-inputs",
        choices=("embeddings", "placeholders"),
        default="embeddings",
        help="what the head of a vision-language model reads at the positions of images",
    )
    made.add_argument("--layers", type=int, default=1)
    made.add_argument("--eagle31", action="store_true", help="train an EAGLE-3.1 head")
    made.add_argument(
        "--parallel", type=int, default=0, help="more than 0: a P-EAGLE head of so many drafts"
    )
    add_block_flags(made)
    made.add_argument("--intermediate-size", type=int, default=0, help="0: the target's")
    return made


if __name__ == "__main__":
    main()
