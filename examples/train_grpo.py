"""GRPO with TRL: rollouts by this engine, in the rounded weights that are trained.

    pip install trl==1.16.0           # for this example only
    python examples/train_grpo.py     # the bundled model, on a CPU: 2 minutes

`use_engine_operations` makes the trainer's model round its linears as the engine does, and compute
with the engine's operations. Each step sends the trainer's float weights to the engine and compares
digests. Printed for each step: the largest and the mean difference between the log probabilities
of the rollout and those

- of the trainer's own forward pass, which has gradients;
- of the engine, which reads the same tokens as prompts (`prompt_logprobs`).

On a CPU both are exactly 0. On a GPU the second is; the first is small, since norms, activations
and rotations are those of transformers. So the loss takes the engine's value and the gradient of
the trainer's forward pass, and the ratio of policy and rollout is exactly 1 in the first update.
`--forward rounded` rounds the linears alone, `--forward float` trains without rounding: both show
the mismatch that remains: with W4A16 on a CPU 1e-6 and 0.4 in the mean.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from formats.weight_digest import differing, digests
from qkernels import TrainableQuantLinear, replace_linears
from qserve import LLM, SamplingParams
from qserve.training import use_engine_operations

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func may change
try:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    sys.exit(f"{error}; this example requires: pip install trl==1.16.0")

MODEL = Path(__file__).parent / "models" / "docs-5m"
PROMPTS = ("The engine", "To quantize a model,", "A page of keys", "Each layer")
VOWELS = frozenset("aeiou")


def share_of_vowels(completions: list[str], **_: Any) -> list[float]:
    """Reward: vowels among all characters of a completion."""
    return [sum(c in VOWELS for c in text) / max(1, len(text)) for text in completions]


class Policy:
    """The weights that are trained, and the engine that runs them rounded."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        self.model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
        if arguments.forward == "engine":
            use_engine_operations(self.model, arguments.scheme)
        elif arguments.forward == "rounded":
            replace_linears(self.model, arguments.scheme, trainable=True)
        self.engine = LLM(
            arguments.model,
            quantization=arguments.scheme,
            batch_invariant=True,
            dtype=str(dtype).removeprefix("torch."),
            gpu_memory_utilization=0.3,
            max_model_len=512,
        )
        self._synced = -1

    def sync(self, step: int) -> None:
        """Give the weights of this step to the engine, and compare digests."""
        if step == self._synced:
            return
        # the names of save_pretrained; a tied head is the embedding
        tensors = {name: each.detach() for name, each in self.model.named_parameters()}
        self.engine.update_weights(tensors, version=step)
        if linears := self.linears():
            schemes = {name: each.scheme for name, each in linears.items()}
            wrong = differing(digests(tensors, schemes), self.engine.weight_digests())
            if wrong:
                sys.exit(f"the engine runs other weights than the trainer: {wrong[:3]}")
        self._synced = step

    def linears(self) -> dict[str, TrainableQuantLinear]:
        """The rounded linears by name."""
        modules: dict[str, nn.Module] = dict(self.model.named_modules())
        return {n: each for n, each in modules.items() if isinstance(each, TrainableQuantLinear)}

    def logprobs(self, prompts: list[list[int]], completions: list[list[int]]) -> list[list[float]]:
        """Log probability of each token of the completions, by the engine."""
        whole = [first + rest for first, rest in zip(prompts, completions, strict=True)]
        outputs = self.engine.generate(
            [{"prompt_token_ids": ids} for ids in whole],
            SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False),
            use_tqdm=False,
        )
        return [
            [
                output.prompt_logprobs[place][ids[place]].logprob
                for place in range(len(prompt), len(ids))
            ]
            for output, prompt, ids in zip(outputs, prompts, whole, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """TRL's rollout_func: prompts to completions with log probabilities."""

    policy: Policy
    tokenizer: Any
    max_tokens: int

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        step = trainer.state.global_step
        self.policy.sync(step)
        prompt_ids = [self.tokenizer(text)["input_ids"] for text in prompts]
        params = [  # equal prompts differ in their seeds
            SamplingParams(
                temperature=1.0, max_tokens=self.max_tokens, seed=1000 * step + i, logprobs=0
            )
            for i in range(len(prompts))
        ]
        outputs = self.policy.engine.generate(
            [{"prompt_token_ids": ids} for ids in prompt_ids], params, use_tqdm=False
        )
        drawn = [each.outputs[0] for each in outputs]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [each.token_ids for each in drawn],
            "logprobs": [
                [entry[token].logprob for entry, token in zip(e.logprobs, e.token_ids, strict=True)]
                for e in drawn
            ],
        }


class Trainer(GRPOTrainer):
    """GRPOTrainer whose loss compares with the rollout's log probabilities."""

    def __init__(self, *, policy: Policy, **given: Any) -> None:
        self.policy, self.largest = policy, [0.0, 0.0]
        super().__init__(model=policy.model, **given)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        found = super()._generate_and_score_completions(inputs)
        found["old_per_token_logps"] = found["sampling_per_token_logps"]
        return found

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kw: Any) -> Any:
        self.drawn_BT = inputs["sampling_per_token_logps"]
        self.masks = inputs["prompt_mask"].bool(), inputs["completion_mask"].bool()
        return super().compute_loss(model, inputs, *args, **kw)

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        logits_BTV = model(
            input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=logits_to_keep + 1
        ).logits[:, :-1]
        all_BTV = logits_BTV.float().log_softmax(-1)
        own_BT = all_BTV.gather(2, input_ids[:, -logits_to_keep:, None])[..., 0]
        entropy_BT = -(all_BTV.detach().exp() * all_BTV.detach()).sum(-1)
        prompt_mask, mask_BT = self.masks
        prompt_ids, completion_ids = input_ids.split([prompt_mask.shape[1], mask_BT.shape[1]], 1)
        engine = self.policy.logprobs(
            [ids[mask].tolist() for ids, mask in zip(prompt_ids, prompt_mask, strict=True)],
            [ids[mask].tolist() for ids, mask in zip(completion_ids, mask_BT, strict=True)],
        )
        engine_BT = torch.zeros_like(self.drawn_BT)
        engine_BT[mask_BT] = torch.tensor([x for row in engine for x in row]).to(engine_BT)
        apart = [(each - self.drawn_BT)[mask_BT].abs() for each in (own_BT.detach(), engine_BT)]
        self.largest = [max(a, float(b.max())) for a, b in zip(self.largest, apart, strict=True)]
        print(
            f"step {self.state.global_step}: mismatch of log probabilities"
            f" of {int(mask_BT.sum())} tokens:"
            + ";".join(
                f" {name} max {float(each.max()):.1e}, mean {float(each.mean()):.1e}"
                for name, each in zip(("trainer", "engine"), apart, strict=True)
            )
        )
        # the engine's value, the trainer's gradient
        return own_BT + (engine_BT - own_BT).detach(), entropy_BT, None


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--model", default=str(MODEL))
    made.add_argument("--scheme", default="w4a16-sym", help="to which linears are rounded")
    made.add_argument("--steps", type=int, default=8)
    made.add_argument("--max-tokens", type=int, default=32, help="of a completion")
    made.add_argument("--num-generations", type=int, default=4, help="completions of a prompt")
    made.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    made.add_argument("--output", default="/tmp/grpo", help="folder for the trained model")
    made.add_argument("--forward", choices=("engine", "rounded", "float"), default="engine")
    arguments = made.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    policy = Policy(arguments)
    trainer = Trainer(
        policy=policy,
        reward_funcs=share_of_vowels,
        train_dataset=Dataset.from_dict({"prompt": list(PROMPTS) * arguments.steps}),
        processing_class=tokenizer,
        rollout_func=Rollouts(policy=policy, tokenizer=tokenizer, max_tokens=arguments.max_tokens),
        args=GRPOConfig(
            output_dir=arguments.output,
            max_steps=arguments.steps,
            per_device_train_batch_size=len(PROMPTS) * arguments.num_generations,
            num_generations=arguments.num_generations,
            max_completion_length=arguments.max_tokens,
            learning_rate=arguments.rate,
            beta=0.0,
            bf16=False,  # the model has the engine's dtype already
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    rewards = [each["reward"] for each in trainer.state.log_history if "reward" in each]
    policy.sync(arguments.steps)
    trainer.save_model(arguments.output)
    print(f"reward of each step: {', '.join(f'{each:.3f}' for each in rewards)}")
    print("largest mismatch with the rollout: trainer {}, engine {}".format(*trainer.largest))
    print(f"float weights in {arguments.output}; the engine runs version {arguments.steps}")


if __name__ == "__main__":
    main()
