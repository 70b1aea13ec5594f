"""Measure tokens per verification and acceptance rates of drafters, on unseen texts.

    python examples/measure_acceptance.py MODEL --text heldout.jsonl \\
        --drafter '{"method": "eagle3", "model": "head"}' --drafter '{"method": "ngram"}'

Prompts are the beginnings of the texts, and chats without their last answers. Each prompt is
continued greedily and at temperature 1, with each drafter and without one. `same_texts` counts the
outputs that equal those without a drafter: in float32 (the default) all must. The acceptance length
includes the bonus token. Acceptance rates by position are relative to all drafts. `tokens_per_s`
counts the written tokens of all requests; the time includes the prompts.

Chats may have images. With --without-images each EAGLE head is measured a second time, with the
placeholder token's embedding at the positions of images.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from calibrate.texts.documents import read_documents
from qserve.llm import LLM
from qserve.multimodal.calibration import without_images
from qserve.params.sampling_params import SamplingParams


def main() -> None:
    arguments = parser().parse_args()
    documents = read_documents(arguments.text)[: arguments.texts]
    base: dict[float, list[tuple[int, ...]]] = {}
    drafters = [json.loads(stated) for stated in arguments.drafter]
    if arguments.without_images:
        drafters = [
            {**each, "image_embeddings": seen} for each in drafters for seen in (True, False)
        ]
    for drafter in [None, *drafters]:
        if drafter is not None:
            drafter = {"num_speculative_tokens": arguments.drafts, "adaptive": False, **drafter}
        llm = LLM(
            arguments.model,
            device=arguments.device,
            dtype=arguments.dtype,
            max_num_seqs=arguments.batch,
            speculative_config=None if drafter is None else json.dumps(drafter),
            **json.loads(arguments.engine),
        )
        llm.capture_graphs()
        warm = SamplingParams(temperature=0, max_tokens=arguments.max_tokens, ignore_eos=True)
        continued(llm, documents[:1], warm, arguments)
        llm.engine.report()  # discards its counts of drafts
        for temperature in arguments.temperature:
            params = SamplingParams(
                temperature=temperature,
                max_tokens=arguments.max_tokens,
                seed=arguments.seed,
                ignore_eos=True,
            )
            started = time.monotonic()
            outputs = continued(llm, documents, params, arguments)
            seconds = time.monotonic() - started
            found = [tuple(output.outputs[0].token_ids) for output in outputs]
            speed = {
                "seconds": round(seconds, 1),
                "tokens_per_s": round(sum(map(len, found)) / seconds, 1),
            }
            if drafter is None:
                base[temperature] = found
                print(json.dumps({"drafter": None, "T": temperature, **speed}), flush=True)
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
                        "image_embeddings": drafter.get("image_embeddings"),
                        "acceptance_length": round(counts.length, 3),
                        "by_position": [round(share, 3) for share in counts.shares],
                        "conditional": [round(share, 3) for share in counts.conditional],
                        "verifies": counts.verifies,
                        "same_texts": f"{same} of {len(found)}",
                        **speed,
                    }
                ),
                flush=True,
            )


def continued(
    llm: LLM, documents: list[Any], params: SamplingParams, arguments: argparse.Namespace
) -> list[Any]:
    """Return the outputs for the beginnings of texts, and then for chats."""
    tokenizer = llm.get_tokenizer()
    texts = [each for each in documents if isinstance(each, str)]
    chats = [chat_of(each, arguments.text) for each in documents if not isinstance(each, str)]
    prompts = [
        tokenizer.encode(text, add_special_tokens=False)[: arguments.prompt_tokens]
        for text in texts
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False) if prompts else []
    return [*outputs, *(llm.chat(chats, params, use_tqdm=False) if chats else ())]


def chat_of(messages: list[dict[str, Any]], source: str) -> list[dict[str, Any]]:
    """Return a chat without its last answer, with loaded images instead of paths."""
    if messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    plain, images = without_images(messages, Path(source).absolute().parent)
    left = iter(images)
    for message in plain:
        if isinstance(message["content"], list):
            message["content"] = [
                {**part, "image": next(left)} if part == {"type": "image"} else part
                for part in message["content"]
            ]
    return plain


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
    made.add_argument(
        "--text", required=True, help="texts, or chats, that no drafter was trained on"
    )
    made.add_argument(
        "--without-images",
        action="store_true",
        help="measure EAGLE heads also without the embeddings of images",
    )
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
    made.add_argument("--engine", default="{}", help="more of LLM's settings, as JSON")
    made.add_argument("--seed", type=int, default=0)
    return made


if __name__ == "__main__":
    main()
