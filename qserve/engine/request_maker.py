"""RequestMaker: what an engine is asked for becomes a Request, or an InputError that says why not.

Knows the model's sizes and the engine's settings, no scheduler.
"""

from collections.abc import Sequence
from itertools import chain

import torch

from formats.errors import InputError
from qserve.engine import state_limits
from qserve.engine.beams import BeamGroup
from qserve.engine.masks import token_filter
from qserve.engine.pooled import Pooled
from qserve.engine.pooling import NO_HEAD, check_pooling
from qserve.engine.request import Request
from qserve.handling import Handling
from qserve.lora.adapter_table import AdapterTable, adapters_of
from qserve.model.model_config import ModelConfig
from qserve.pooling_params import KINDS_OF_LAST_ROW
from qserve.sampling_params import SamplingParams


class RequestMaker:
    """Of one engine."""

    def __init__(
        self,
        model: ModelConfig,
        max_model_len: int,
        adapters: AdapterTable | None,
        *,
        seed: int,
        speculates: bool,
    ) -> None:
        """`seed`: of the seeds of requests that name none."""
        self._model, self._max_model_len = model, max_model_len
        self._adapters, self._speculates = adapters, speculates
        self._seeds = torch.Generator().manual_seed(seed)

    def make(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        handling: Handling,
        *,
        arrived: float,
        client: str = "",
        group: str = "",
    ) -> Request:
        """A request that can be queued. Raises InputError where it is empty, too long, or wrong."""
        if params.n != 1:
            raise ValueError("the engine runs one output for each request; callers fan out n")
        subject, length = f"request {request_id}", len(prompt_token_ids)
        self._check_prompt(subject, prompt_token_ids)
        pooling = handling.pooling
        if pooling is not None:
            check_pooling(subject, pooling, self._model)
            params = SamplingParams(max_tokens=1, temperature=0)
        elif self._model.instead_of_head:
            raise InputError(subject, NO_HEAD, "ask for vectors: /v1/embeddings, LLM.embed")
        self._check_params(subject, params)
        state_limits.check_handling(subject, handling, self._model)
        self._check_beams(subject, handling)
        room = self._max_model_len - length
        request = Request(
            request_id=request_id,
            token_ids=list(prompt_token_ids),
            num_prompt_tokens=length,
            # A prompt alone (0) also needs a step that samples: its token is dropped.
            max_tokens=room if params.max_tokens is None else min(max(params.max_tokens, 1), room),
            params=params,
            seed=self._new_seed() if params.seed is None else params.seed,
            stop_token_ids=frozenset(params.stop_token_ids),
            eos_token_ids=frozenset() if params.ignore_eos else self._model.eos_token_ids,
            client=client,
            group=group,
            priority=handling.priority,
            cache_salt=handling.cache_salt,
            arrived=arrived,
            prompt_logprobs=None if params.prompt_logprobs is None else [],
            reads_cache=params.prompt_logprobs is None
            and (pooling is None or pooling.kind in KINDS_OF_LAST_ROW),
            pooled=None if pooling is None else Pooled(params=pooling),
            adapter=handling.lora and adapters_of(self._adapters).find(handling.lora),
        )
        if params.has_filter:
            request.token_filter = token_filter(request, self._model.vocab_size)
        if handling.beam_search is not None:
            request.beams = BeamGroup(request, handling.beam_search, self._model.vocab_size)
        return request

    def _new_seed(self) -> int:
        return int(torch.randint(2**62, (), generator=self._seeds))

    def _check_prompt(self, subject: str, token_ids: Sequence[int]) -> None:
        length, vocab_size = len(token_ids), self._model.vocab_size
        if not 0 < length < self._max_model_len:
            raise InputError(
                subject,
                f"expected a prompt of 1 to {self._max_model_len - 1} tokens, found {length}",
                "shorten it" if length else "give at least one token",
            )
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
            raise InputError(subject, f"token id {wrong} is not in 0..{vocab_size - 1}")

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
                raise InputError(f"{subject} {name}", f"token id {token} is not in 0..{most}")
        if params.bad_words and not params.bad_words_token_ids:
            raise InputError(
                f"{subject} bad_words", "have no token ids", "give bad_words_token_ids, too"
            )

    def _check_beams(self, subject: str, handling: Handling) -> None:
        if handling.beam_search is not None and self._speculates:
            raise InputError(
                f"{subject} use_beam_search",
                "does not run beside speculation",
                "start the engine without --speculative-config",
            )
