"""Tiny vision-language models, and what transformers answers about pictures."""

import json

import numpy as np
import pytest
import torch

from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.engine.media_limits import largest_image
from qserve.multimodal.calibration import NO_ARGUMENTS
from qserve.multimodal.layouts.table import layout_of
from qserve.multimodal.processor import MediaProcessor, image_digest, load_image_processor
from qserve.multimodal.video import video_of_frames
from qserve.multimodal.video_processor import VideoProcessor
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams
from qserve.text.tokenizer import Tokenizer
from tests.tiny_vision import ALL_FAMILIES, loaded, write_tiny_vision

NUM_TOKENS = 8
LISTS = {"num_local_patches", "patches_grid"}  # arguments that are no tensors


class Vision:
    """One tiny model: prompts with images, and transformers' greedy tokens for them."""

    def __init__(self, folder, model=None):
        """`model`: transformers', default: that of the folder."""
        self.folder = folder
        self.processor = MediaProcessor(self.folder, Tokenizer(self.folder).encode)
        self._pixels = load_image_processor(self.folder)
        if model is None:
            model = loaded(self.folder, self.folder.name)
        self.model = model.eval()
        self.model.generation_config.eos_token_id = None  # all tokens, whatever they are
        self._known = {}

    @property
    def mark(self):
        """Placeholder of an image in a prompt."""
        return ALL_FAMILIES[self.folder.name]["placeholder"]

    def prompt(self, text, images=(), videos=()):
        """Token ids and media items. `videos`: as video_of_frames takes them."""
        digests = [image_digest(image) for image in images]
        return self.processor.prepare(text, images, digests, list(map(video_of_frames, videos)))

    def expected(self, text, images=(), videos=()):
        """Greedy tokens of transformers, whose own image processor normalizes the pixels."""
        key = text, *(image_digest(image) for image in images)
        key += tuple(video_of_frames(video).digest for video in videos)
        if key not in self._known:
            ids, _ = self.prompt(text, images, videos)
            inputs = self.inputs(ids, images, videos)
            if "mm_token_type_ids" in inputs and inputs["mm_token_type_ids"][0, -1]:
                # With a cache, transformers then counts each axis on from the last row's.
                self._known[key] = self._without_cache(ids, inputs)
                return self._known[key]
            found = self.model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
            self._known[key] = found[0, len(ids) :].tolist()
        return self._known[key]

    def _without_cache(self, ids, inputs):
        tokens = list(ids)
        for _ in range(NUM_TOKENS):
            tokens.append(int(self._logits(ids, inputs, tokens)[-1].argmax()))
        return tokens[len(ids) :]

    @torch.no_grad()
    def _logits(self, ids, inputs, tokens):
        """Return transformers' logits [len(tokens), vocabulary] of a prompt `ids` and more text."""
        more = len(tokens) - len(ids)
        changed = {"input_ids": torch.tensor([tokens])}
        changed["input_ids"][0, : len(ids)] = inputs["input_ids"][0]
        changed["attention_mask"] = torch.ones(1, len(tokens))
        for name in ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids"):
            if name in inputs:
                value = int(self.processor.config.family.has_mutual_prompt)  # 1: after the prompt
                changed[name] = torch.nn.functional.pad(inputs[name], (0, more), value=value)
        inner = getattr(self.model, "model", None)
        if hasattr(inner, "rope_deltas"):
            inner.rope_deltas = None
        return self.model(**{**inputs, **changed}, use_cache=False).logits[0]

    def lags(self, text, images, tokens):
        """Return each token's distance from transformers' largest logit; 1: that of the mean."""
        ids, _ = self.prompt(text, images)
        tokens = list(tokens)
        logits_TV = self._logits(ids, self.inputs(ids, images), [*ids, *tokens])[len(ids) - 1 : -1]
        best_T = logits_TV.amax(-1)
        chosen_T = logits_TV[torch.arange(len(tokens)), torch.tensor(tokens)]
        return (best_T - chosen_T) / (best_T - logits_TV.mean(-1))

    def inputs(self, ids, images, videos=(), answer=0):
        """`answer`: number of tokens at the end that are no part of the prompt."""
        found = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
        if images:
            config = self.processor.config
            layout = layout_of(config)
            pixels = self._pixels(images=layout.given(images), **layout.options(config.values))
            found |= {
                name: value if name in LISTS else torch.from_numpy(np.array(value))
                for name, value in pixels.items()
                if name not in NO_ARGUMENTS
            }
            found["input_ids"] = self._with_image_tokens(found["input_ids"])
            if config.family.kinds_argument == "token_type_ids":
                is_image = torch.tensor([ids]) == self.model.config.image_token_id
                found["token_type_ids"] = is_image.int()
            if config.family.has_mutual_prompt:
                found["token_type_ids"] = torch.zeros(1, len(ids), dtype=torch.int)
                found["token_type_ids"][0, len(ids) - answer :] = 1
        if videos:
            found |= self.video_inputs(videos)
        if not images and self.processor.config.family.has_mutual_prompt:
            # without them transformers attends in both directions only in layers without a window
            found["token_type_ids"] = torch.ones(1, len(ids), dtype=torch.int)
        tokens = self.processor.config.expert_tokens
        if tokens:
            is_media_1N = torch.isin(found["input_ids"], torch.tensor(tokens))
            found["moe_mm_token_type_ids"] = is_media_1N.int()
        name = self.processor.config.family.kinds_argument
        if name == "mm_token_type_ids" and (images or videos):
            config, ids_1N = self.model.config, found["input_ids"]
            kinds_1N = (ids_1N == config.image_token_id) + 2 * (ids_1N == config.video_token_id)
            found["mm_token_type_ids"] = kinds_1N.int()
        return found

    def _with_image_tokens(self, ids_1N):
        """Token ids with the image's token where the engine has another: that of the padding."""
        config = self.processor.config
        fill, token = config.fill_id(), config.image_token_id
        return ids_1N if fill == token else ids_1N.masked_fill(ids_1N == fill, token)

    def video_inputs(self, videos):
        """Inputs as transformers makes them, which test_video_processor.py proves."""
        options = json.loads((self.folder / "video_preprocessor_config.json").read_text())
        mean, std = (np.array(options[name]) for name in ("image_mean", "image_std"))
        processor = VideoProcessor(self.folder, self.processor.config.family.video)
        clips = [processor.prepare(video_of_frames(video)) for video in videos]
        pixels = np.concatenate([np.concatenate(clip.patches_GPV) for clip in clips]) / 255
        pixels = (pixels.reshape(len(pixels), 3, -1) - mean[:, None]) / std[:, None]
        found = {
            "pixel_values_videos": torch.tensor(pixels.reshape(len(pixels), -1)).float(),
            "video_grid_thw": torch.tensor([clip.grid for clip in clips]),
        }
        if "tokens_per_second" in self.processor.config.values["vision_config"]:
            found["second_per_grid_ts"] = torch.tensor([clip.seconds_per_group for clip in clips])
        return found

    def engine(self, steps_in_flight=0, **settings):
        vision = self.processor.config
        if vision.is_mutual and "max_num_batched_tokens" in settings:
            least = 2 * largest_image(self.folder, vision) + 4
            if vision.family.has_mutual_prompt:
                least = 400  # twice the longest prompt
            settings["max_num_batched_tokens"] = max(settings["max_num_batched_tokens"], least)
        common = {"device": "cpu", "dtype": "float32", "block_size": 4, "max_num_seqs": 4}
        common["model"] = str(self.folder)
        if self.folder.name.startswith(("qwen3_5", "lfm2", "minicpm", "nemotron")):
            common["num_state_snapshots"] = 16  # or its pages are not reused
        config = EngineConfig(**{**common, **settings})
        return Engine(config, steps_in_flight=steps_in_flight)

    def run(self, engine, *requests):
        """Greedy tokens of requests (text, images, videos) that run together, their last events."""
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        tokens, last = {}, {}
        for number, request in enumerate(requests):
            ids, media = self.prompt(*request)
            engine.add_request(str(number), ids, params, options=RequestOptions(media=media))
            tokens[str(number)] = []
        while engine.has_work():
            for event in engine.step():
                tokens[event.request_id] += event.token_ids
                last[event.request_id] = event
            engine.scheduler.check_integrity()
        return list(tokens.values()), [last[name] for name in tokens]


@pytest.fixture(scope="session")
def vision(tmp_path_factory):
    """family -> a Vision, made once."""
    made = {}

    def make(family):
        if family not in made:
            folder = tmp_path_factory.mktemp("vision") / family
            made[family] = Vision(write_tiny_vision(folder, family))
        return made[family]

    return make
