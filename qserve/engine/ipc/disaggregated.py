"""DisaggregatedEngines: prefill engines compute prompts, decode engines answer (--prefill-engines).

A request goes to a prefill engine and a decode engine at the same time. The decode engine waits for
the KV pages, which the prefill engine sends from GPU to GPU layer by layer
(qserve/kv_transfer/peer). If the prefill engine refuses the request, is paused, fails or dies, the
decode engine computes the prompt itself, and the client sees no error.
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
from qserve.params.request_options import DEFAULT, RequestOptions
from qserve.params.sampling_params import SamplingParams

# Parameters of a request on a prefill engine. The sampled token is dropped.
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)

# Longest wait for the prefill engine. Its end or failure is usually reported earlier.
PATIENCE_SECONDS = 600.0

logger = logging.getLogger(__name__)


class DisaggregatedEngines(DataParallelEngines):
    """D decode engines, numbered 0 to D - 1, and P prefill engines, numbered D to D + P - 1."""

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
        """Ranks of the prefill engines that are alive."""
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
        options: RequestOptions = DEFAULT,
    ) -> AsyncIterator[TokenEvent]:
        """Run one request on a decode engine and, if worthwhile, a prefill engine.

        Arguments and events are those of EngineClient.generate.
        """
        engine, num_tokens = self._choose(prompt_token_ids, options, self._ranks)
        computing = None
        decoding = options
        if self._is_worth_it(num_tokens, params, options):
            decoding = replace(options, awaits_pages=True)
            num_tokens = 0  # the decode engine does not compute the prompt
        values = request_id, prompt_token_ids, params, watch, client, group, decoding
        try:
            if decoding is not options:
                same = request_id, prompt_token_ids, client, group, options
                computing = asyncio.create_task(self._compute(engine.supervisor, *same))
            async with aclosing(self._run_on(engine, num_tokens, *values)) as events:
                async for event in events:
                    yield event
        finally:
            if computing is not None:
                computing.cancel()  # aborts the request on the prefill engine if it still runs

    def _is_worth_it(
        self, num_tokens: int, params: SamplingParams, options: RequestOptions
    ) -> bool:
        """Return True if a prefill engine should compute the prompt.

        `num_tokens`: tokens of the prompt that are not cached on the decode engine.
        """
        if options.pooling is not None or options.beam_search is not None:
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
        options: RequestOptions,
    ) -> None:
        """Compute a prompt on a prefill engine, and report the end or failure to the decoder."""
        try:
            chosen = self._choose(prompt_token_ids, options, self._prefill_ranks)
            prompt = replace(options, is_for_another=True)
            values = request_id, prompt_token_ids, ONE_TOKEN, ignore, client, group, prompt
            async with aclosing(self._run_on(*chosen, *values)) as events:
                async for event in events:
                    if event.error:
                        logger.warning(
                            "Request %s: remote prefill failed, so the decode engine computes the"
                            " prompt: %s",
                            *(request_id, event.error),
                        )
        except Exception as error:  # refused, or this engine is closing
            logger.warning(
                "Request %s: remote prefill failed, so the decode engine computes the prompt: %s",
                request_id,
                error,
            )
        finally:
            await decoder.stop_waiting(request_id)


def _transfer(role: str, folder: Path) -> str:
    extra = {"path": str(folder), "patience_s": PATIENCE_SECONDS}
    return json.dumps({"kv_connector": PEER, "kv_role": role, "kv_connector_extra_config": extra})


def _engines(config: EngineConfig) -> list[EngineConfig]:
    """Return the settings of each data-parallel engine."""
    if config.data_parallel_size == 1:
        return [config]
    ranks = range(config.data_parallel_size)
    return [replace(config, data_parallel_rank=rank) for rank in ranks]
