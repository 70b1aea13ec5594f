"""Step-3.5: transformers has its layers as the text model of Step-3.7, without a head.

The class here adds the head, and names as published.
"""

import functools

import torch
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.step3p7.modeling_step3p7 import (
    Step3p7PreTrainedModel,
    Step3p7TextConfig,
    Step3p7TextModel,
)


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):
    """transformers' text model, and a head."""

    config_class = Step3p7TextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, logits_to_keep=0, **others):
        found = self.model(input_ids=input_ids, **others)
        logits = self.lm_head(found.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=found.past_key_values)


@functools.cache
def register() -> None:
    """Let AutoModelForCausalLM find the class, and read and write published names."""
    AutoModelForCausalLM.register(Step3p7TextConfig, Step3p5ForCausalLM, exist_ok=True)
    known = AutoModelForCausalLM._model_mapping
    if Step3p7TextConfig not in known:  # transformers 5.17 ignores a class for its own config
        known._extra_content[Step3p7TextConfig] = Step3p5ForCausalLM
    whole = get_checkpoint_conversion_mapping("step3p7")
    own = [e for e in whole if any(word in str(e.source_patterns) for word in ("moe", "share_"))]
    register_checkpoint_conversion_mapping("step3p5", own, overwrite=True)
