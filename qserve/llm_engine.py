"""LLMEngine: requests of text in, outputs out, one step after another. Names follow vLLM's.

For programs that drive the engine themselves; `LLM` is the loop around it. Knows no HTTP.
"""

from collections.abc import Iterable

from formats.errors import InputError
from qserve.bad_words import with_bad_words
from qserve.config import EngineConfig
from qserve.engine.engine import Engine
from qserve.engine.start_phases import phase
from qserve.lora.request import LoRARequest
from qserve.outputs import (
    EngineDeadError,
    OutputBuilder,
    Prompt,
    RequestOutput,
    handling_of,
    read_prompt,
)
from qserve.sampling_params import SamplingParams
from qserve.text import Tokenizer


class LLMEngine:
    """A model and the requests that run on it."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model. Raises InputError."""
        self.engine = Engine(config)
        self._tokenizer: Tokenizer | None = None
        self._builders: dict[str, OutputBuilder] = {}
        self._choices: dict[str, tuple[OutputBuilder, int]] = {}  # by the engine's id
        self._failure = ""
        if self.engine.use_idle_time():  # requests come at once: there will be no idle time
            with phase("Capturing the other CUDA graphs"):
                while self.engine.use_idle_time():
                    pass

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "LLMEngine":
        """vLLM's name of the constructor."""
        return cls(engine_args)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded when first needed: prompts of token ids need none."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.engine.config.model)
        return self._tokenizer

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
        detokenize: bool = True,
    ) -> None:
        """Queue a prompt. Raises InputError where it can never run.

        `arrival_time` is by time.perf_counter(). With the policy "priority" a lower `priority` goes
        first. `detokenize` False leaves texts empty. `lora_request`: the adapter to run with.
        """
        self.check_health()
        if request_id in self._builders:
            raise InputError(
                f"request {request_id}", "is running already", "give each request its own id"
            )
        text, ids = read_prompt(prompt, self.get_tokenizer)
        handling = handling_of(prompt, priority, lora_request)
        params = with_bad_words(params, self.get_tokenizer)
        tokenizer = self.get_tokenizer() if detokenize else None
        builder = OutputBuilder(request_id, text, ids, params, tokenizer)
        self._builders[request_id] = builder
        try:
            for index, choice in enumerate(builder.params):
                engine_id = builder.engine_id(index)
                self.engine.add_request(engine_id, ids, choice, arrival_time, handling=handling)
                self._choices[engine_id] = builder, index
        except BaseException:
            self.abort_request(request_id)
            raise

    def step(self) -> list[RequestOutput]:
        """Compute a step. Returns the requests that it changed, each with all of its output."""
        return [builder.snapshot() for builder in self._step()]

    def run_step(self) -> list[RequestOutput]:
        """The same without copies: outputs that go on grow with later steps."""
        return [builder.output for builder in self._step()]

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Drop requests; they give no more outputs. Unknown ids are ignored."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            builder = self._builders.pop(name, None)
            if builder is None:
                continue
            for index in range(len(builder.params)):
                engine_id = builder.engine_id(index)
                if self._choices.pop(engine_id, None) is not None:
                    self.engine.abort(engine_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self._builders)

    def get_num_unfinished_requests(self) -> int:
        return len(self._builders)

    def check_health(self) -> None:
        """Raises EngineDeadError where a step has failed: the engine's state is not known then."""
        if self._failure:
            raise EngineDeadError(self._failure)

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
