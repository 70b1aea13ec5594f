"""InputProcessor: validates the inputs of a request and creates the Request.

Inputs that the model or the engine's settings do not allow raise InputError.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from formats.errors import InputError
from qserve.engine.pooled import Pooled
from qserve.engine.request import Request
from qserve.engine.runner.pooling import NO_HEAD, check_pooling
from qserve.engine.scheduling.beams import BeamGroup
from qserve.engine.step.masks import token_filter
from qserve.lora.adapter_table import AdapterTable, adapters_of
from qserve.model.model_config import ModelConfig
from qserve.multimodal.layouts.table import check_features
from qserve.multimodal.media import MediaItem, check_media
from qserve.multimodal.positions import Axes, positions_of
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams
from qserve.pooling.params import KINDS_OF_LAST_ROW


class InputProcessor:
    """Validates and creates the requests of one engine."""

    def __init__(
        self,
        model: ModelConfig,
        max_model_len: int,
        adapters: AdapterTable | None,
        *,
        num_positions: int,
        seed: int,
        speculates: bool,
        longest_item: int,
    ) -> None:
        """`num_positions`: length of the rotary table; videos may skip positions.

        `seed`: seeds the generator that gives a seed to each request without one.

        `longest_item`: maximum number of tokens of a media item that is computed in one step.
        """
        self._model, self._max_model_len = model, max_model_len
        self._num_positions = num_positions
        self._longest_item = longest_item
        self._adapters, self._speculates = adapters, speculates
        vision = model.vision
        self._expert_tokens = () if vision is None else vision.expert_tokens
        self._seeds = torch.Generator().manual_seed(seed)

    def make(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        *,
        arrived: float,
        client: str = "",
        group: str = "",
    ) -> Request:
        """Create a request that can be queued. Raises InputError for invalid inputs."""
        if params.n != 1:
            raise ValueError("expected n=1: the engine runs one output per request")
        subject, length = f"request {request_id}", len(prompt_token_ids)
        pooling = options.pooling
        # A pooled prompt may fill the context, as no output follows it.
        self._check_prompt(subject, prompt_token_ids, self._max_model_len - (pooling is None))
        if options.media:
            self.check_media(subject, options.media, length)
        if pooling is not None:
            check_pooling(subject, pooling, self._model)
            params = SamplingParams(max_tokens=1, temperature=0)
        elif self._model.instead_of_head:
            raise InputError(subject, NO_HEAD, "request embeddings: /v1/embeddings, LLM.embed")
        self._check_params(subject, params)
        if options.beam_search is not None:
            self._check_beams(subject)
        room = max(self._max_model_len - length, 1)
        request = Request(
            request_id=request_id,
            token_ids=list(prompt_token_ids),
            num_prompt_tokens=length,
            # A request for 0 tokens also runs a step that samples; the token is dropped.
            max_tokens=room if params.max_tokens is None else min(max(params.max_tokens, 1), room),
            params=params,
            seed=self._new_seed() if params.seed is None else params.seed,
            stop_token_ids=frozenset(params.stop_token_ids),
            eos_token_ids=frozenset() if params.ignore_eos else self._model.eos_token_ids,
            client=client,
            group=group,
            priority=options.priority,
            media=options.media,
            cache_salt=options.cache_salt,
            awaits_pages=options.awaits_pages,
            arrived=arrived,
            prompt_logprobs=None if params.prompt_logprobs is None else [],
            reads_cache=params.prompt_logprobs is None
            and (pooling is None or pooling.kind in KINDS_OF_LAST_ROW),
            pooled=None if pooling is None else Pooled(params=pooling),
            adapter=options.lora and adapters_of(self._adapters).find(options.lora),
        )
        axes = self.axes
        if options.media and axes is not None:
            request.rope_positions, request.rope_shift = positions_of(options.media, axes)
            self._check_positions(subject, int(request.rope_positions.max()))
        request.is_media_N = self.media_tokens(request.token_ids)
        request.output_window = self._model.output_window
        if params.has_filter:
            request.token_filter = token_filter(request, self._model.vocab_size)
        if options.beam_search is not None:
            model = self._model
            request.beams = BeamGroup(
                request, options.beam_search, model.vocab_size, has_states=model.has_states
            )
        return request

    def _new_seed(self) -> int:
        return int(torch.randint(2**62, (), generator=self._seeds))

    def _check_prompt(self, subject: str, token_ids: Sequence[int], longest: int) -> None:
        length = len(token_ids)
        if not 0 < length <= longest:
            raise InputError(
                subject,
                f"expected a prompt of 1 to {longest} tokens, found {length}",
                "shorten it" if length else "give at least one token",
            )
        self.check_tokens(subject, token_ids)

    def check_tokens(self, subject: str, token_ids: Sequence[int]) -> None:
        """Raise InputError unless all ids of one token or more are in the vocabulary."""
        vocab_size = self._model.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
            raise InputError(
                subject,
                f"token id {wrong} is not in 0..{vocab_size - 1}",
                "encode the text with this model's tokenizer",
            )

    def _check_positions(self, subject: str, last: int) -> None:
        """Raise InputError if video frames have positions beyond the model's rotary table."""
        if last >= self._num_positions:
            raise InputError(
                subject,
                f"has a video whose time reaches position {last}; the model has"
                f" {self._num_positions}",
                "send a shorter video, or raise --max-model-len",
            )

    def media_tokens(self, token_ids: Sequence[int]) -> np.ndarray | None:
        """Return bool [N], prompt tokens for which the model has other experts; None: none."""
        if not self._expert_tokens:
            return None
        found_N = np.isin(token_ids, self._expert_tokens)
        return found_N if found_N.any() else None

    @property
    def axes(self) -> Axes | None:
        """Axes of the positions of media tokens (M-RoPE); None: one."""
        return None if self._model.vision is None else self._model.vision.axes

    def check_media(self, subject: str, items: Sequence[MediaItem], num_tokens: int) -> None:
        """Raise InputError for media that the model does not take, or at invalid positions."""
        check_media(subject, items, num_tokens)
        for item in items:
            if item.kind not in self._model.media_kinds:
                raise InputError(
                    subject,
                    f"has a media item of kind {item.kind!r}; {self._model.family.architecture}"
                    f" takes {', '.join(('text', *sorted(self._model.media_kinds)))}",
                    self._model.no_vision or "remove it, or serve a model with an encoder for it",
                )
        vision = self._model.vision
        for number, item in enumerate(items):
            if vision is not None and (problem := check_features(item, vision)):
                raise InputError(
                    f"{subject} media item {number}",
                    problem,
                    "use the MediaProcessor of the model's folder",
                )
            if item.is_mutual and item.length > self._longest_item:
                raise InputError(
                    f"{subject} media item {number}",
                    f"expected at most {self._longest_item} tokens, found {item.length}: all must"
                    " be in one step, because they attend to each other",
                    "raise --max-num-batched-tokens to twice the tokens and --max-num-seqs, or"
                    " send fewer images and a shorter prompt",
                )

    def _check_params(self, subject: str, params: SamplingParams) -> None:
        most = self._model.vocab_size - 1
        for name, tokens in (
            ("logit_bias", [token for token, _ in params.logit_bias]),
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("bad_words", tuple(chain.from_iterable(params.bad_words_token_ids))),
        ):
            token = max(tokens, default=0)
            if token > most:
                raise InputError(
                    f"{subject} {name}",
                    f"token id {token} is not in 0..{most}",
                    "encode the text with this model's tokenizer",
                )
        if params.bad_words and not params.bad_words_token_ids:
            raise InputError(
                f"{subject} bad_words", "have no token ids", "also pass bad_words_token_ids"
            )

    def _check_beams(self, subject: str) -> None:
        if self._model.output_window:
            raise InputError(
                f"{subject} use_beam_search",
                "is not supported with this model, whose output has a window",
                "send the request without it",
            )
        if self._speculates:
            raise InputError(
                f"{subject} use_beam_search",
                "is not supported with speculative decoding",
                "start the engine without --speculative-config",
            )
