"""Train a DFlash or DSpark head, which drafts a block in one pass, and write it in both layouts.

    python examples/train_dflash.py MODEL --data texts.jsonl --output head
    python examples/train_dflash.py MODEL --data texts.jsonl --markov-rank 256 --output head

Blocks begin at random positions of the texts. The head learns to predict all tokens of a block in
one pass, from the target's states before the block. With --markov-rank it is a DSpark head, whose
drafts also depend on the preceding token. Embedding and output matrix are the target's;
--draft-vocab keeps only the most frequent tokens of the output matrix.

The folder holds `original/` (z-lab, DeepSpec) and `speculators/` (vLLM).
examples/measure_acceptance.py measures the head in the engine.
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
    read_windows,
    train,
    weights_of,
    write_result,
)
from train_eagle3 import SHARED, draft_vocabulary, tables_of

from calibrate.heads.block import BlockModule, block_losses, even_anchors, start_from_target
from calibrate.heads.fit import in_16_bits
from calibrate.heads.target import Target
from formats.checkpoint import CONFIG, CheckpointReader, read_json
from formats.errors import InputError
from formats.heads.block_config import DFLASH, DSPARK, BlockAttention, BlockConfig
from formats.heads.layers_config import SPECULATORS
from formats.heads.save import LAYOUTS, save_block


def main() -> None:
    arguments = parser().parse_args()
    torch.manual_seed(arguments.seed)
    num_layers = CheckpointReader(arguments.model).config["num_hidden_layers"]
    aux_layers = tuple(arguments.aux_layers or even_aux_layers(num_layers, arguments.states))
    target = Target(arguments.model, device=chosen_device(arguments), aux_layers=aux_layers)
    if target.has_vision:
        raise InputError(
            arguments.model, "is a vision-language model", "train an EAGLE-3 head: train_eagle3.py"
        )
    windows_WS, held_WS = read_windows(arguments, target)
    config, anchors = head_config(arguments, target), num_anchors(arguments, windows_WS)
    draft_ids = draft_vocabulary(windows_WS, config)
    draft_ids = None if draft_ids is None else draft_ids.to(target.device)
    head = BlockModule(config, target.embedding.float())
    start_from_target(head, {"lm_head": target.head, "norm": target.last_norm}, draft_ids)
    head.lm_head.requires_grad_(draft_ids is not None)
    head.to(target.device)
    head.embedding = [target.embedding]

    def losses(ids_BS: torch.Tensor, anchors: int = anchors) -> list:
        seen, ids_BS = target.see(ids_BS), ids_BS.to(target.device)
        count = ids_BS.shape[1] - 1
        if torch.is_grad_enabled():
            last = count - config.max_drafts
            anchors_A = torch.randint(1, last, (anchors,), device=target.device)
        else:
            anchors_A = even_anchors(count, config.max_drafts, anchors).to(target.device)
        with in_16_bits(target.device):
            return list(
                block_losses(
                    head,
                    ids_BS,
                    seen.aux_BSF,
                    seen.logits_BSV,
                    anchors_A,
                    num_drafts=config.max_drafts,
                    draft_ids_U=draft_ids,
                    after_errors=arguments.after_errors,
                )
            )

    markov = head.markov_head if config.markov_rank else None
    tables = () if markov is None else (markov.markov_w1.weight, markov.markov_w2.weight)
    if draft_ids is not None:
        tables += (head.lm_head.weight,)
    trained = train(
        head,
        losses,
        windows_WS,
        held_WS,
        arguments,
        outputs=tables,
        measured=partial(losses, anchors=4 * anchors),
        decay=arguments.decay,
    )
    tensors = weights_of(head.state_dict())
    if draft_ids is None:
        del tensors["lm_head.weight"]  # the target's
    tensors |= tables_of(draft_ids, config)
    verifier = {
        **read_json(Path(arguments.model) / CONFIG),
        "num_hidden_layers": num_layers,
        "name_or_path": arguments.model,
    }
    for layout in LAYOUTS:
        folder = Path(arguments.output) / layout
        save_block(folder, config, tensors, layout=layout, verifier=verifier)
    write_result(arguments, trained, accuracy_of="steps")


def head_config(arguments: argparse.Namespace, target: Target) -> BlockConfig:
    """Return the config of a head whose layers are as wide as the target's."""
    stated = target.config.to_dict()
    values = {key: stated[key] for key in SHARED if stated.get(key) is not None}
    values |= {"model_type": "qwen3", "num_hidden_layers": arguments.layers, "hidden_act": "silu"}
    values |= {"tie_word_embeddings": False, "dtype": "bfloat16", "attention_bias": False}
    if arguments.intermediate_size:
        values["intermediate_size"] = arguments.intermediate_size
    mask = arguments.mask_token
    if mask is None:
        mask = target.tokenizer.pad_token_id
    return BlockConfig(
        kind=DSPARK if arguments.markov_rank else DFLASH,
        layout=SPECULATORS,
        values=values,
        target_hidden_size=values["hidden_size"],
        draft_vocab_size=min(arguments.draft_vocab or math.inf, values["vocab_size"]),
        explicit_aux_layers=target.aux_layers,
        block_size=arguments.block,
        mask_token_id=values["vocab_size"] - 1 if mask is None else mask,
        samples_anchor=bool(arguments.markov_rank),
        attentions=(BlockAttention(is_causal=False, window=None),) * arguments.layers,
        markov_rank=arguments.markov_rank,
        markov_type=arguments.markov_type,
    )


def even_aux_layers(num_layers: int, count: int) -> list[int]:
    """Choose evenly spaced states, from the first layer's output to the last layer's input."""
    spaced = torch.linspace(1, max(1, num_layers - 1), count)
    return sorted({round(float(each)) for each in spaced})


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("model", help="folder of the target")
    add_flags(made)
    add_block_flags(made)
    made.add_argument("--layers", type=int, default=5)
    made.add_argument("--block", type=int, default=8, help="rows of a block")
    made.add_argument("--decay", type=float, default=0.8, help="weight of each draft's loss")
    made.add_argument("--states", type=int, default=5, help="states of the target that it reads")
    made.add_argument("--aux-layers", type=int, nargs="+", help="layers before the states, instead")
    made.add_argument(
        "--draft-vocab", type=int, default=0, help="tokens that the head can draft; 0: all"
    )
    made.add_argument("--intermediate-size", type=int, default=0, help="0: the target's")
    made.add_argument(
        "--mask-token", type=int, help="id that no text has; default: that of padding, or the last"
    )
    made.add_argument("--markov-rank", type=int, default=0, help="more than 0: a DSpark head")
    made.add_argument("--markov-type", choices=("vanilla", "gated", "rnn"), default="vanilla")
    return made


if __name__ == "__main__":
    main()
