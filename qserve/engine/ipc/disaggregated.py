"""DisaggregatedEngines: some engines compute prompts, others decode (--prefill-engines).

A request goes to both at the same time. The engine that decodes waits for the KV pages that the
other one computes, which pass from GPU to GPU layer by layer (qserve/kv_transfer/peer). It computes
the prompt itself if the other engine refuses the request, is paused, fails or dies. A client sees
no error.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from qserve.config import EngineConfig
from qserve.engine.ipc.client import Watch, ignore
from qserve.engine.ipc.data_parallel import DataParallelEngines
from qserve.engine.ipc.supervisor import EngineSupervisor
from qserve.engine.token_event import TokenEvent
from qserve.kv_transfer.config import PEER
from qserve.kv_transfer.peer.settings import default_folder
from qserve.params.handling import DEFAULT, Handling
from qserve.params.sampling_params import SamplingParams

# Of a request on an engine that computes its prompt: the token is dropped.
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)

# Longest wait for the other engine. Usually its end, or its failure, is reported earlier.
PATIENCE_SECONDS = 600.0

logger = logging.getLogger(__name__)


class DisaggregatedEngines(DataParallelEngines):
    """Engines 0 to D - 1 answer requests, engines D to D + P - 1 compute prompts for them."""

    _num_decoders = 1
    _min_tokens = 1

    @classmethod
    def _configs(cls, config: EngineConfig) -> list[EngineConfig]:
        folder = default_folder().with_name(f"{default_folder().name}-{secrets.token_hex(6)}")
        common = replace(config, prefill_engines=0, prefill_tensor_parallel_size=None)
        decoders = replace(common, kv_transfer_config=_transfer("kv_consumer", folder))
        size = config.prefill_tensor_parallel_size or config.tensor_parallel_size
        prefill = replace(
            common,
            kv_transfer_config=_transfer("kv_producer", folder),
            tensor_parallel_size=size,
            enable_expert_parallel=config.enable_expert_parallel and size > 1,
            data_parallel_size=config.prefill_engines,
            gpu_offset=config.gpu_offset + config.data_parallel_size * config.num_ranks,
        )
        return [*_engines(decoders), *_engines(prefill)]

    def _set_up(self, config: EngineConfig, configs: Sequence[EngineConfig]) -> None:
        self._num_decoders = config.data_parallel_size
        self._min_tokens = config.prefill_engine_min_tokens
        self._folder = Path(configs[0].kv_transfer.extra["path"])

    @property
    def _ranks(self) -> Sequence[int]:
        return range(min(self._num_decoders, len(self._engines)))

    @property
    def _prefill_ranks(self) -> Sequence[int]:
        """Ranks of the engines that compute prompts and live."""
        ranks = range(self._num_decoders, len(self._engines))
        return [rank for rank in ranks if self._engines[rank].supervisor.is_alive]

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        watch: Watch = ignore,
        client: str = "",
        group: str = "",
        handling: Handling = DEFAULT,
    ) -> AsyncIterator[TokenEvent]:
        """Run one request on two of the engines, as EngineClient.generate does."""
        engine, num_tokens = self._choose(prompt_token_ids, handling, self._ranks)
        computing = None
        decoding = handling
        if self._is_worth_it(num_tokens, params, handling):
            decoding = replace(handling, awaits_pages=True)
            num_tokens = 0  # the prompt is no work for the engine that decodes
        values = request_id, prompt_token_ids, params, watch, client, group, decoding
        try:
            if decoding is not handling:
                same = request_id, prompt_token_ids, client, group, handling
                computing = asyncio.create_task(self._compute(engine.supervisor, *same))
            async with aclosing(self._run_on(engine, num_tokens, *values)) as events:
                async for event in events:
                    yield event
        finally:
            if computing is not None:
                computing.cancel()  # which aborts the request there, if it still runs

    def _is_worth_it(self, num_tokens: int, params: SamplingParams, handling: Handling) -> bool:
        """True if another engine computes a prompt with so many tokens that are not cached."""
        if handling.pooling is not None or handling.beam_search is not None:
            return False
        if params.prompt_logprobs is not None or num_tokens < self._min_tokens:
            return False
        return bool(self._prefill_ranks)

    async def _compute(
        self,
        decoder: EngineSupervisor,
        request_id: str,
        prompt_token_ids: list[int],
        client: str,
        group: str,
        handling: Handling,
    ) -> None:
        """Compute a prompt, and report its end or failure to the engine that decodes."""
        try:
            chosen = self._choose(prompt_token_ids, handling, self._prefill_ranks)
            prompt = replace(handling, is_for_another=True)
            values = request_id, prompt_token_ids, ONE_TOKEN, ignore, client, group, prompt
            async with aclosing(self._run_on(*chosen, *values)) as events:
                async for event in events:
                    if event.error:
                        logger.warning(
                            "Request %s: its prompt is computed where it is decoded: %s",
                            *(request_id, event.error),
                        )
        except Exception as error:  # refused, or this engine is closing
            logger.warning(
                "Request %s: its prompt is computed where it is decoded: %s", request_id, error
            )
        finally:
            await decoder.stop_waiting(request_id)


def _transfer(role: str, folder: Path) -> str:
    extra = {"path": str(folder), "patience_s": PATIENCE_SECONDS}
    return json.dumps({"kv_connector": PEER, "kv_role": role, "kv_connector_extra_config": extra})


def _engines(config: EngineConfig) -> list[EngineConfig]:
    """Settings of each of the data-parallel engines."""
    if config.data_parallel_size == 1:
        return [config]
    ranks = range(config.data_parallel_size)
    return [replace(config, data_parallel_rank=rank) for rank in ranks]
