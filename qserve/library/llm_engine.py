"""LLMEngine: add requests, run steps, read outputs. Names follow vLLM's.

Use LLMEngine in programs that run their own loop of steps. `LLM` runs this loop for you.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from formats.errors import InputError
from formats.numerics.torch_state import torch_defaults
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.engine.start_phases import phase
from qserve.hub.local import local_adapter, local_config
from qserve.library.media_prompts import MediaPrompts
from qserve.library.outputs import EngineDeadError, OutputBuilder, RequestOutput
from qserve.library.prompts import PromptType, read_prompt, request_options_of
from qserve.lora.request import LoRARequest
from qserve.params.sampling_params import SamplingParams
from qserve.text.tokenizer import Tokenizer, with_bad_words

if TYPE_CHECKING:
    from qserve.multimodal.media import MediaItem


class LLMEngine:
    """A model and its running requests."""

    @torch_defaults()
    def __init__(self, config: EngineConfig) -> None:
        """Load the model from its folder, or from the hub. Raises InputError."""
        if config.num_engines > 1:
            raise InputError(
                f"data_parallel_size={config.data_parallel_size}",
                "LLM runs one engine, in this process",
                "use AsyncLLM, `qserve serve` or `qserve run-batch`; or start as many processes,"
                " each with its data_parallel_rank",
            )
        if config.prefill_engines:
            raise InputError(
                f"prefill_engines={config.prefill_engines}",
                "LLM runs one engine, in this process",
                "use AsyncLLM, `qserve serve` or `qserve run-batch`",
            )
        config = local_config(config)
        self.engine = Engine(config)
        self._tokenizer: Tokenizer | None = None
        model = self.engine.model_config
        self._media = MediaPrompts(
            self.engine.config.model,
            takes_media=model.vision is not None,
            no_vision=model.no_vision,
        )
        self._builders: dict[str, OutputBuilder] = {}
        # the engine's request id -> output under construction, index of the choice
        self._choices: dict[str, tuple[OutputBuilder, int]] = {}
        self._failure = ""

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "LLMEngine":
        """Load the model. The name is vLLM's; the constructor does the same."""
        return cls(engine_args)

    @torch_defaults(dtype=False)
    def capture_graphs(self) -> None:
        """Capture all CUDA graphs now. Otherwise a step captures a graph when it first needs one.

        A capture takes about as long as an eager launch of a step: 20 ms for 32 layers.
        """
        if self.engine.use_idle_time():
            with phase("Capturing the other CUDA graphs"):
                while self.engine.use_idle_time():
                    pass

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer, loaded at the first call. Token-id prompts need none."""
        if self._tokenizer is None:
            config = self.engine.config
            self._tokenizer = Tokenizer(config.model, config.tokenizer)
        return self._tokenizer

    @torch_defaults(dtype=False)
    def with_media(
        self, prompt: PromptType, ids: list[int]
    ) -> "tuple[list[int], tuple[MediaItem, ...]]":
        """Return a prompt's token ids with those of its media, and the media items.

        Raises InputError.
        """
        return self._media.prepare(prompt, ids, self.get_tokenizer)

    @torch_defaults(dtype=False)
    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
    ) -> None:
        """Queue a prompt. Raises InputError if the request can never run.

        arrival_time: seconds of time.perf_counter()
        lora_request: adapter to use
        priority: lower runs first, with the scheduling policy "priority"
        """
        self.check_health()
        if request_id in self._builders:
            raise InputError(
                f"request {request_id}", "is running already", "give each request its own id"
            )
        text, ids = read_prompt(prompt, self.get_tokenizer, takes_media=True)
        lora = local_adapter(lora_request, self.engine.config)
        ids, media = self.with_media(prompt, ids)
        options = request_options_of(prompt, priority, lora, media)
        params = with_bad_words(params, self.get_tokenizer)
        tokenizer = self.get_tokenizer() if params.detokenize else None
        builder = OutputBuilder(request_id, text, ids, params, tokenizer)
        self._builders[request_id] = builder
        try:
            for index, choice in enumerate(builder.params):
                engine_id = builder.engine_id(index)
                self.engine.add_request(engine_id, ids, choice, arrival_time, options=options)
                self._choices[engine_id] = builder, index
        except BaseException:
            self.abort_request(request_id)
            raise

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the whole output so far of each request that the step changed."""
        return [builder.snapshot() for builder in self._step()]

    def run_step(self) -> list[RequestOutput]:
        """Run one step like `step`, without copies: later steps change the returned outputs."""
        return [builder.output for builder in self._step()]

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Abort requests; `step` returns no more outputs for them. Unknown ids are ignored."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            builder = self._builders.pop(name, None)
            if builder is None:
                continue
            for index in range(len(builder.params)):
                engine_id = builder.engine_id(index)
                if self._choices.pop(engine_id, None) is not None:
                    self.engine.abort(engine_id)

    def has_unfinished_requests(self) -> bool:
        """Return True while a request is running or waiting."""
        return bool(self._builders)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of running and waiting requests."""
        return len(self._builders)

    def check_health(self) -> None:
        """Raise EngineDeadError if a step has failed, which leaves the engine's state unknown."""
        if self._failure:
            raise EngineDeadError(self._failure)

    @torch_defaults(dtype=False)
    def _step(self) -> list[OutputBuilder]:
        self.check_health()
        try:
            events = self.engine.step()
        except Exception as error:
            self._failure = f"a step failed: {type(error).__name__}: {error}"
            raise
        changed: dict[str, OutputBuilder] = {}
        for event in events:
            found = self._choices.get(event.request_id)
            if found is None:
                continue
            builder, index = found
            stopped = builder.take(index, event)
            changed[builder.output.request_id] = builder
            if stopped:
                self.engine.abort(event.request_id)
            if stopped or event.finish_reason is not None:
                del self._choices[event.request_id]
        for name, builder in changed.items():
            if builder.output.finished:
                del self._builders[name]
        return list(changed.values())
