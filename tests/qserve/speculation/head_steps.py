"""Random heads of a tiny target, and the steps that a drafter is given: for tests of heads.

Legend: T rows of a step, K drafts, V vocabulary.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from formats.checkpoint import CheckpointReader
from formats.heads import tensors as names
from formats.heads.config import HeadConfig, head_kind, read_head_config
from qkernels.drafts.reference import draft_positions
from qserve.engine.step.device_step import Batch
from qserve.model.cache_spec import KvFormat
from qserve.model.loading.loader import load
from qserve.model.loading.weight_source import WeightSource
from qserve.model.model_config import ModelConfig
from qserve.parallel.ranks import ALONE
from qserve.speculation.config import SpeculativeConfig
from qserve.speculation.draft_step import DraftStep
from qserve.speculation.drafter import BuildContext

PAGE = 4
MAX_LEN = 64
# page numbers out of order, so that a slot is not a position by chance
PAGES = (5, 2, 9, 7, 1, 8, 3, 6)
HEAD = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16,  # shorter than the texts: what it was trained on, no limit
    "rope_theta": 100.0,
}


def load_target(folder, ranks=ALONE):
    """A tiny model as the engine's decoder, float32."""
    config = ModelConfig.from_folder(folder)
    source = WeightSource(CheckpointReader(folder), config)
    device = torch.device("cpu")
    return load(
        config,
        source,
        device=device,
        dtype=torch.float32,
        max_model_len=MAX_LEN,
        progress=False,
        ranks=ranks,
    )


def write_head(folder: Path, config: dict, *, first="midlayer", without=(), extra=()) -> dict:
    """A random head of a config.json. Returns its tensors by canonical name."""
    kind = head_kind(config) or "eagle"
    config = {"architectures": ["LlamaForCausalLMEagle3"], **config} if kind == "eagle3" else config
    read = read_head_config(config, kind)
    made = random_tensors(read, extra)
    for name in without:
        del made[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name.replace("layers.0", first): tensor for name, tensor in made.items()}
    save_file(stored, folder / "model.safetensors")
    return made


def random_tensors(config: HeadConfig, extra=()) -> dict:
    """Every tensor that the head must have, and those optional ones that `extra` names."""
    generator = torch.Generator().manual_seed(7)
    shapes = {f"{name}.weight": shape for name, shape in names.linears(config).items()}
    shapes |= names.required(config)
    if config.kind == "eagle":
        del shapes["lm_head.weight"]
    shapes |= {n: s for n, s in names.optional(config).items() if n in extra}
    if names.MASK_HIDDEN in extra:
        shapes[names.MASK_HIDDEN] = (1, 1, names.fc_inputs(config))
    if names.MASK_EMBEDDING in extra:
        shapes[names.MASK_EMBEDDING] = (config.hidden_size,)
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and "norm" in name
        made[name] = 1 + 0.2 * noise if is_norm else noise * shape[-1] ** -0.5
    if names.TO_TARGET in extra:
        ids = torch.randperm(config.vocab_size, generator=generator)
        ids = ids[: config.draft_vocab_size].sort().values
        made[names.TO_TARGET] = ids - torch.arange(len(ids))
    return made


def context_of(folder, target, count=3, method="eagle3", **more) -> BuildContext:
    """Inputs for building a drafter."""
    return BuildContext(
        config=SpeculativeConfig(method=method, model=str(folder), num_speculative_tokens=count),
        target=target,
        target_folder="",
        tokenizer_folder="",
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_model_len=MAX_LEN,
        block_size=PAGE,
        **more,
    )


def nothing(aux_layers=()):
    """A drafter without layers; its `propose` is missing."""
    return type("Nothing", (), {"attentions": (), "extra_positions": 0, "aux_layers": aux_layers})


class Recorded:
    """Draws that are given, or the likeliest; keeps the logits."""

    def __init__(self, given=()):
        self.given, self.logits = given, []

    def draw(self, logits_DV, index):
        self.logits.append(logits_DV)
        if index < len(self.given):
            return torch.full((len(logits_DV),), self.given[index])
        return logits_DV.argmax(-1)

    def draw_all(self, logits_KDV):
        return torch.stack([self.draw(each, index) for index, each in enumerate(logits_KDV)])


class Text:
    """One request's pages, step by step."""

    def __init__(self, target, drafter):
        self.target, self.drafter = target, drafter
        kv = KvFormat(dtype=torch.float32)
        model = target.config
        self.caches = [
            a.cache_spec(kv, PAGE).make(10, 1, torch.device("cpu"))
            for a in (layer.attention for layer in target.layers)
        ]
        self.own = [
            a.cache_spec(kv, PAGE).make(10, 0, torch.device("cpu")) for a in drafter.attentions
        ]
        assert model.num_layers == len(self.caches)

    def step(self, ids, start, count, *, num_drafts, last=None, given=()):
        """Rows start .. start + count of a text, then drafts. Returns (drafts, their logits).

        `last`: the row of the step that the newest token follows; ids[start + last + 1] is it.
        """
        rows = torch.arange(start, start + count)
        batch = Batch(
            token_ids_T=ids[rows],
            positions_T=rows,
            slots_T=torch.tensor([PAGES[p // PAGE] * PAGE + p % PAGE for p in rows.tolist()]),
            block_tables_RX=torch.tensor([PAGES], dtype=torch.int32),
            query_starts_R1=torch.tensor([0, count], dtype=torch.int32),
            context_lengths_R=torch.tensor([start + count], dtype=torch.int32),
            logits_rows_S=torch.tensor([count - 1]),
            state_slots_R=torch.zeros(1, dtype=torch.int32),
            max_query_len=count,
            max_context_len=start + count,
        )
        hidden, aux_states = self.target.forward_with_aux(
            batch.token_ids_T, batch, self.caches, self.drafter.aux_layers
        )
        draws = Recorded(given)
        drafting = [] if last is None else [last]
        tables_DX = batch.block_tables_RX[: len(drafting)]
        drafts = self.drafter.propose(
            DraftStep(
                batch=batch,
                hidden_TC=hidden,
                aux_states=aux_states,
                next_tokens_T=ids[rows + 1],
                last_rows_D=torch.tensor(drafting, dtype=torch.int64),
                tables_DX=tables_DX,
                starts_D1=torch.arange(len(drafting) + 1, dtype=torch.int32),
                draft_positions=draft_positions(
                    rows[drafting],
                    tables_DX,
                    torch.full((len(drafting),), len(PAGES) * PAGE),
                    num_drafts=num_drafts + self.drafter.extra_positions if num_drafts else 0,
                    page_size=PAGE,
                    max_model_len=MAX_LEN,
                ),
                num_drafts=num_drafts,
                max_context_len=min(start + count + num_drafts + 1, len(PAGES) * PAGE),
                caches=self.own,
                draws=draws,
            )
        )
        return drafts, draws.logits
