"""Muse Glimmer: transformers has its text model, and a head only on the whole model.

The class here adds the head, with the factor and the soft cap of logits.
"""

import functools

import torch
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.muse_glimmer.modeling_muse_glimmer import (
    MuseGlimmerPreTrainedModel,
    MuseGlimmerTextConfig,
    MuseGlimmerTextModel,
)


class MuseGlimmerForCausalLM(MuseGlimmerPreTrainedModel, GenerationMixin):
    """transformers' text model, and a head."""

    config_class = MuseGlimmerTextConfig
    _tied_weights_keys = {}

    def __init__(self, config):
        super().__init__(config)
        self.model = MuseGlimmerTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, logits_to_keep=0, **others):
        found = self.model(input_ids=input_ids, **others)
        cap = self.config.final_logit_softcapping
        logits = self.lm_head(found.last_hidden_state[:, -logits_to_keep:])
        logits = cap * torch.tanh(logits * self.config.output_multiplier / cap)
        return CausalLMOutputWithPast(logits=logits, past_key_values=found.past_key_values)


@functools.cache
def register() -> None:
    """Let AutoModelForCausalLM find the class."""
    AutoModelForCausalLM.register(MuseGlimmerTextConfig, MuseGlimmerForCausalLM, exist_ok=True)
    known = AutoModelForCausalLM._model_mapping
    if MuseGlimmerTextConfig not in known:  # transformers ignores a class for its own config
        known._extra_content[MuseGlimmerTextConfig] = MuseGlimmerForCausalLM
