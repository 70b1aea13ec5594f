"""Measure tokens per verification: acceptance of drafters on texts that they have not seen.

    python examples/measure_acceptance.py MODEL --text heldout.jsonl \\
        --drafter '{"method": "eagle3", "model": "head"}' --drafter '{"method": "ngram"}'

Prompts are the beginnings of the texts. Each is continued greedily and at temperature 1 with each
drafter, and without one: the texts must be the same, which is checked in float32. The acceptance
length includes the bonus token. Acceptance rates by position are relative to all drafts.
"""

import argparse
import dataclasses
import json
import time

from calibrate.texts.documents import read_texts
from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams


def main() -> None:
    arguments = parser().parse_args()
    texts = read_texts(arguments.text)
    base: dict[float, list[tuple[int, ...]]] = {}
    for stated in [None, *arguments.drafter]:
        drafter = None if stated is None else json.loads(stated)
        if drafter is not None:
            drafter = {"num_speculative_tokens": arguments.drafts, "adaptive": False, **drafter}
        llm = LLM(
            arguments.model,
            device=arguments.device,
            dtype=arguments.dtype,
            max_num_seqs=arguments.batch,
            speculative_config=None if drafter is None else json.dumps(drafter),
        )
        tokenizer = llm.get_tokenizer()
        prompts = [
            tokenizer.encode(text, add_special_tokens=False)[: arguments.prompt_tokens]
            for text in texts[: arguments.texts]
        ]
        for temperature in arguments.temperature:
            params = SamplingParams(
                temperature=temperature,
                max_tokens=arguments.max_tokens,
                seed=arguments.seed,
                ignore_eos=True,
            )
            started = time.monotonic()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.monotonic() - started
            found = [tuple(output.outputs[0].token_ids) for output in outputs]
            if drafter is None:
                base[temperature] = found
                print(json.dumps({"drafter": None, "T": temperature, "seconds": round(seconds, 1)}))
                continue
            counts = Counts.of(llm.engine.report().drafts)
            same = sum(a == b for a, b in zip(found, base[temperature], strict=True))
            print(
                json.dumps(
                    {
                        "drafter": llm.engine.config.speculation.method,
                        "model": drafter.get("model"),
                        "T": temperature,
                        "drafts": drafter["num_speculative_tokens"],
                        "acceptance_length": round(counts.length, 3),
                        "by_position": [round(share, 3) for share in counts.shares],
                        "conditional": [round(share, 3) for share in counts.conditional],
                        "verifies": counts.verifies,
                        "same_texts": f"{same} of {len(found)}",
                        "seconds": round(seconds, 1),
                    }
                ),
                flush=True,
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts over all verifications of a run."""

    verifies: int
    accepted: tuple[int, ...]  # accepted drafts, by position

    @classmethod
    def of(cls, counts: tuple[int, ...]) -> "Counts":
        verifies, _, *accepted = counts
        return cls(verifies=verifies, accepted=tuple(accepted))

    @property
    def length(self) -> float:
        """Mean tokens per verification."""
        return 1 + sum(self.accepted) / self.verifies

    @property
    def shares(self) -> list[float]:
        return [count / self.verifies for count in self.accepted]

    @property
    def conditional(self) -> list[float]:
        """Acceptance rate by position, among drafts whose predecessors were accepted."""
        before = (self.verifies, *self.accepted[:-1])
        return [count / max(1, base) for count, base in zip(self.accepted, before, strict=True)]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("model", help="folder of the target")
    made.add_argument("--text", required=True, help="texts that no drafter was trained on")
    made.add_argument(
        "--drafter", action="append", default=[], help="a value of --speculative-config"
    )
    made.add_argument("--drafts", type=int, default=3, help="drafts per verification")
    made.add_argument("--texts", type=int, default=32)
    made.add_argument("--prompt-tokens", type=int, default=128)
    made.add_argument("--max-tokens", type=int, default=128)
    made.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    made.add_argument("--batch", type=int, default=16)
    made.add_argument("--dtype", default="float32")
    made.add_argument("--device", default="auto")
    made.add_argument("--seed", type=int, default=0)
    return made


if __name__ == "__main__":
    main()
