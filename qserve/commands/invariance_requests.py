"""Random requests of `qserve check-invariance`: prompts, sampling parameters, images."""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

    from qserve import SamplingParams
    from qserve.model.model_config import ModelConfig

NUM_LOGPROBS = 5
SHORT = 256  # maximum tokens of a short prompt
FORMAT = "[ -~]+"  # regex of requests with structured output; it never forces an end


def draw_prompts(
    rng: random.Random,
    number: int,
    longest: int,
    long_every: int,
    model: "ModelConfig",
    placeholder_id: int | None,
) -> list[dict[str, Any]]:
    """Draw random prompts. One of three is periodic; one of four begins like an earlier prompt.

    For vision-language models two of three prompts have an image instead; images are shared by
    several prompts. `placeholder_id`: token of an image in a prompt.
    """
    vision = model.vision
    special = set() if vision is None else {*vision.media_tokens, placeholder_id}
    plain = [token for token in range(model.vocab_size) if token not in special]
    images = [] if vision is None else _images(rng)
    prompts: list[dict[str, Any]] = []
    for each in range(number):
        length = rng.randint(1, longest if each % long_every == 0 else min(longest, SHORT))
        period = rng.randint(1, 8) if _repeats(each) else length
        tokens = [rng.choice(plain) for _ in range(period)]
        prompt: dict[str, Any] = {"prompt_token_ids": (tokens * length)[:length]}
        if vision is not None and each % 3:
            prompt["prompt_token_ids"][rng.randrange(length)] = placeholder_id
            prompt["multi_modal_data"] = {"image": rng.choice(images)}
        elif vision is None and each % 4 == 3:
            earlier = rng.choice(prompts)["prompt_token_ids"]
            count = rng.randint(0, min(len(earlier), length - 1))
            prompt["prompt_token_ids"][:count] = earlier[:count]
        prompts.append(prompt)
    return prompts


def draw_params(
    prompts: Sequence[dict[str, Any]], output_len: int, *, structured: bool, model: "ModelConfig"
) -> list["SamplingParams"]:
    """Choose the parameters of each prompt: half are greedy, some ask for prompt log probabilities.

    Periodic prompts may only be continued with their own tokens, so that drafts are accepted.
    """
    from qserve import SamplingParams

    found = []
    for number, prompt in enumerate(prompts):
        is_short = len(prompt["prompt_token_ids"]) <= SHORT
        reads_prompt = number % 9 == 4 and is_short and model.vision is None
        has_format = structured and number % 5 == 2
        repeats = _repeats(number) and not has_format
        found.append(
            SamplingParams(
                temperature=float(number % 2),
                seed=number,
                max_tokens=output_len,
                ignore_eos=True,
                logprobs=NUM_LOGPROBS,
                prompt_logprobs=NUM_LOGPROBS if reads_prompt else None,
                structured_outputs={"regex": FORMAT} if has_format else None,
                allowed_token_ids=sorted(set(prompt["prompt_token_ids"])) if repeats else None,
                detokenize=False,
            )
        )
    return found


def _repeats(number: int) -> bool:
    return number % 3 == 0


def _images(rng: random.Random) -> list["Image"]:
    """Draw random images, two of the same size and one of another."""
    from PIL import Image

    sizes = ((64, 48), (64, 48), (40, 90))
    return [Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1])) for size in sizes]
