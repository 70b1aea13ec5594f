"""Text to tokens and back: the tokenizer, the chat template, streamed text and stop strings.

Knows no HTTP and no engine internals; it reads the engine's `RequestEvent` and nothing else of it.
"""

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from tokenizers import Tokenizer as Backend

from formats.errors import InputError, one_line
from formats.side_files import TOKENIZER_FILES
from qserve.chat_prompt import ChatPrompt, control_pattern
from qserve.engine.request import Hypothesis, RequestEvent, TokenLogprobs
from qserve.load_tokenizer import load_tokenizer
from qserve.sampling_params import ParameterError, SamplingParams

REPLACEMENT = "\ufffd"  # what a decoder puts for bytes that are not, or not yet, a character
MAX_PENDING = 8  # tokens: one character is at most 4 bytes, so twice what can still become one
NUM_CONTEXT = 12  # tokens of the prompt that the first output tokens are decoded with


# what transformers gives a template beside the parameters of apply_chat_template
TEMPLATE_GLOBALS = {"messages", "raise_exception", "strftime_now"}


class TextError(InputError):
    """A tokenizer cannot be loaded, or a text or conversation cannot be made into tokens."""


class _Generation(jinja2.ext.Extension):
    """Reads transformers' own tag {% generation %} as what it holds."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Tokenizer:
    """The tokenizer and chat template of a model folder. Runs no code from the folder.

    `encode` and `render_chat` may run in several threads at once.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = str(folder)
        if not Path(folder).is_dir():
            raise TextError(self.folder, "is not a folder", "give the folder of a model")
        try:
            self._tokenizer = load_tokenizer(folder)
        # A broken file raises whatever its parser raises, up to a bare Exception from Rust.
        except Exception as error:
            # Of a folder without one, what transformers says is pages long.
            has_one = any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)
            raise TextError(
                self.folder,
                f"has no tokenizer that transformers can load: {one_line(error)}"
                if has_one
                else f"has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there",
                "copy tokenizer.json and tokenizer_config.json from the original model",
            ) from error
        self._backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        added = self._tokenizer.added_tokens_decoder.items()
        self.special_token_ids = frozenset(token for token, info in added if info.special)
        self.special_token_ids |= frozenset(self._tokenizer.all_special_ids)
        self._find_control_tokens(added)
        self._before = self.encode("a", add_special_tokens=False)
        self._num_before = len(self.decode(self._before))
        self._token_texts: dict[int, str] = {}  # those that were asked for
        self.max_token_chars = max(map(len, self._tokenizer.get_vocab()), default=1)

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.eos_token_id

    @property
    def bos_token_id(self) -> int | None:
        return self._tokenizer.bos_token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids. Raises TextError for text that is not Unicode (a lone surrogate)."""
        try:
            if self._backend is None:
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return self._encode_with(self._backend, text, add_special_tokens)
        except (TypeError, UnicodeError) as error:
            raise TextError("text", "is not valid Unicode", "remove lone surrogates") from error

    @staticmethod
    def _encode_with(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
        # Of the backend's methods this one alone releases the interpreter lock.
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    @functools.cached_property
    def special_affixes(self) -> tuple[list[int], list[int]]:
        """The tokens that `encode` adds before and behind a text."""
        plain, whole = self.encode("a", False), self.encode("a", True)
        at = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return whole[:at], whole[at + len(plain) :]

    def is_hidden(self, text: str) -> bool:
        """Whether a text is a special token, which `skip_special_tokens` leaves out of outputs."""
        return text in self._special_texts

    def encode_plain(self, text: str) -> list[int]:
        """Text to token ids of which none is a control token, whatever the text holds."""
        ids = self._encode_plain(text)
        if not self.control_ids.isdisjoint(ids) and self.control_pattern is not None:
            # A model whose ordinary vocabulary has them: their texts are cut in two.
            cuts = [match.start() + 1 for match in self.control_pattern.finditer(text)]
            edges = zip([0, *cuts], [*cuts, len(text)], strict=True)
            ids = [token for a, b in edges for token in self._encode_plain(text[a:b])]
        if not self.control_ids.isdisjoint(ids):
            raise TextError("text", "holds a control token of the model", "remove it")
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        if self._plain_backend is None:
            return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return self._encode_with(self._plain_backend, text, False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Token ids to text, without clean-up of spaces. Ids outside the vocabulary give none."""
        if skip_special_tokens:
            token_ids = [token for token in token_ids if token not in self.special_token_ids]
        if self._backend is not None:
            return self._backend.decode(token_ids, skip_special_tokens=False)
        return self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)

    def token_names(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary writes them, such as \u0120the."""
        return self._tokenizer.convert_ids_to_tokens(list(token_ids))

    def token_text(self, token: int) -> str:
        """One token's text as it is behind others: at the start some decoders drop a space."""
        text = self._token_texts.get(token)
        if text is None:
            text = self.decode([*self._before, token], skip_special_tokens=False)
            text = self._token_texts[token] = text[self._num_before :]
        return text

    @functools.cached_property
    def template_settings(self) -> frozenset[str]:
        """Names that the chat template reads and a request may give, such as enable_thinking."""
        taken = {*inspect.signature(self._tokenizer.apply_chat_template).parameters}
        taken |= TEMPLATE_GLOBALS | {*jinja2.Environment().globals}
        return self._template_names() - taken - {*self._tokenizer.special_tokens_map}

    @functools.cached_property
    def reads_tools(self) -> bool:
        """Whether the chat template writes the tools that it is given."""
        return "tools" in self._template_names([{}])

    def is_in_template(self, text: str) -> bool:
        """Whether the chat template, or one of several, writes or looks for a text."""
        return text in str(self._tokenizer.chat_template or "")

    def _template_names(self, tools: list[dict] | None = None) -> frozenset[str]:
        """The names that the chat template reads."""
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _Generation])
        try:
            tree = environment.parse(self._tokenizer.get_chat_template(tools=tools))
        except (jinja2.TemplateError, ValueError):
            return frozenset()
        return frozenset(jinja2.meta.find_undeclared_variables(tree))

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """The conversation as the model's chat template writes it, in transformers' sandbox.

        `template_kwargs`: of `template_settings`. Raises ParameterError for others.
        """
        if not self._tokenizer.chat_template:
            raise TextError("chat template", "the model has none", "send a plain prompt instead")
        template_kwargs = template_kwargs or {}
        for name in template_kwargs:
            if name not in self.template_settings:
                known = ", ".join(sorted(self.template_settings)) or "none"
                raise ParameterError(
                    f"chat_template_kwargs.{name}",
                    "is nothing that the model's chat template reads",
                    f"leave it out; it reads: {known}",
                )
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **template_kwargs,
            )
        # A template fails by its own raise_exception, or as any expression can.
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise TextError(
                "messages", f"the model's chat template refuses them: {one_line(error)}"
            ) from error

    def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> ChatPrompt:
        """The rendered conversation, in which no message can make a control token."""
        return ChatPrompt.render(
            self,
            lambda each: self.render_chat(
                each, add_generation_prompt, continue_final_message, template_kwargs, tools
            ),
            messages,
            template_kwargs,
            tools,
        )

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of `chat_prompt`; the template itself writes the special tokens."""
        return self.chat_prompt(
            messages, add_generation_prompt, continue_final_message, template_kwargs, tools
        ).encode(self)

    def _find_control_tokens(self, added: Iterable[tuple[int, Any]]) -> None:
        """What messages must not make: the special tokens, but the one for unknown characters."""
        texts = {info.content for _, info in added if info.special}
        texts |= {str(text) for text in self._tokenizer.all_special_tokens}
        self._special_texts = frozenset(texts)
        self.control_ids = self.special_token_ids - {self._tokenizer.unk_token_id}
        self.control_pattern = control_pattern(texts)
        self._plain_backend = None
        if self._backend is not None:
            self._plain_backend = Backend.from_str(self._backend.to_str())
            self._plain_backend.encode_special_tokens = True


class IncrementalDetokenizer:
    """Text of a growing token sequence, given out as soon as later tokens cannot change it.

    The text of a token depends on its neighbours: a character may be split over tokens, a leading
    space may be dropped. So a window of tokens is decoded, from a place where characters were whole
    to the end, and what of its text was not shown before is new. The window is a few tokens long,
    whatever the output's length.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        prompt = [token for token in prompt_token_ids[-NUM_CONTEXT:] if token not in self._skipped]
        self._window, self._num_whole = self._whole_context(prompt)
        # A half character at the prompt's end is text only together with the output's first bytes.
        self._text = self._decode(self._window[: self._num_whole])
        self._num_shown = len(self._text)

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; returns the text that became final."""
        return "".join([self._push(token) for token in token_ids if token not in self._skipped])

    def flush(self) -> str:
        """The text held back so far, for when no more tokens come."""
        text = self._text[self._num_shown :]
        self._num_shown = len(self._text)
        return text

    def _push(self, token: int) -> str:
        self._window.append(token)
        self._text = self._decode(self._window)
        num_pending = len(self._window) - self._num_whole
        num_held = len(self._text) - len(self._text.rstrip(REPLACEMENT))
        if num_pending > MAX_PENDING:
            # These bytes never became text; the last 3 may still begin a character.
            num_held = min(num_held, 3)
        end = len(self._text) - num_held
        new = self._text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        if new and not num_held:
            self._move_window(self._num_whole)
            self._num_whole = len(self._window)
        elif num_pending > MAX_PENDING:
            self._move_window(len(self._window) - MAX_PENDING // 2)
            self._num_whole = 0
        return new

    def _move_window(self, start: int) -> None:
        num_unshown = len(self._text) - self._num_shown
        self._window = self._window[start:]
        self._text = self._decode(self._window)
        self._num_shown = len(self._text) - num_unshown

    def _whole_context(self, prompt: list[int]) -> tuple[list[int], int]:
        """The longest tail of the prompt that starts with a whole character, and how many of its
        tokens come before a half character at its end."""
        for end in range(len(prompt), max(len(prompt) - 4, 0), -1):
            for start in range(end):
                text = self._decode(prompt[start:end])
                if text and REPLACEMENT not in text:
                    return prompt[start:], end - start
        return (prompt, 0) if len(prompt) < 4 else ([], 0)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """What one event added to an output's text, and how the output ended if it did."""

    text: str
    token_ids: tuple[int, ...]  # tokens generated, those of hidden or held text included
    finish_reason: str | None = None  # "stop", "length" or "error"
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    logprobs: tuple[TokenLogprobs, ...] = ()  # where asked for: of token_ids, less a hidden end
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # where asked for, the first
    num_cached: int = 0  # tokens of the prompt that were not computed
    drafts: tuple[int, int] = (0, 0)  # that became output so far, and that did not
    pooled: bytes = b""  # vectors of the prompt, where asked for
    beam: Hypothesis | None = None  # the whole output is one of a beam search


class TextStream:
    """The visible text of one request: detokenized, ended at stop strings, never shown too early.

    Text that may be the start of a stop string is held back until it is known. Where several stop
    strings occur, the one that is complete first ends the text, however the text was cut into
    tokens. After a stop string `finished` is true but the engine still runs: the caller aborts.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, params.skip_special_tokens
        )
        self._params = params
        self._held = ""  # not shown: may begin a stop string
        self._num_free = 0  # leading characters of held that are too early to end a stop string
        self._num_tokens = 0
        self.finished = False

    def push(self, event: RequestEvent) -> TextDelta:
        """Take an event of the engine; returns what to show for it."""
        if self.finished:
            return TextDelta(text="", token_ids=())
        hidden = event.ended_by_token and not self._params.include_stop_str_in_output
        num_visible = len(event.token_ids) - 1 if hidden else len(event.token_ids)
        shown = []
        for index, token in enumerate(event.token_ids[:num_visible]):
            self._num_tokens += 1
            text, stop = self._take(self._detokenizer.push((token,)))
            shown.append(text)
            if stop is not None:
                return self._end_at(stop, shown, event, index + 1)
        logprobs = event.logprobs[:num_visible]
        if event.finish_reason is None:
            return TextDelta(
                text="".join(shown),
                token_ids=event.token_ids,
                logprobs=logprobs,
                num_cached=event.num_cached,
                drafts=(event.num_accepted, event.num_rejected),
            )
        rest = self._detokenizer.flush()
        if event.finish_reason == "error":
            self._held += rest  # all that there is: nothing in it ends what has failed
        else:
            text, stop = self._take(rest)
            shown.append(text)
            if stop is not None:
                return self._end_at(stop, shown, event, len(event.token_ids))
        shown.append(self._held)
        self.finished = True
        return TextDelta(
            text="".join(shown),
            token_ids=event.token_ids,
            finish_reason=event.finish_reason,
            stop_reason=event.stop_token,
            logprobs=logprobs,
            num_cached=event.num_cached,
            drafts=(event.num_accepted, event.num_rejected),
        )

    def _end_at(self, stop: str, shown: list[str], event: RequestEvent, count: int) -> TextDelta:
        """The last delta, with the first `count` tokens of the event."""
        self.finished = True
        return TextDelta(
            text="".join(shown),
            token_ids=event.token_ids[:count],
            finish_reason="stop",
            stop_reason=stop,
            logprobs=event.logprobs[:count],
            num_cached=event.num_cached,
            drafts=(event.num_accepted, event.num_rejected),
        )

    def _take(self, new: str) -> tuple[str, str | None]:
        """Add text; returns what can be shown, and the stop string that was completed."""
        if not self._params.stop:
            return new, None
        self._held += new
        if self._num_tokens < self._params.min_tokens:
            self._num_free = len(self._held)
        elif new and (found := self._first_stop()) is not None:
            end, stop = found
            if not self._params.include_stop_str_in_output:
                end -= len(stop)
            return self._held[:end], stop
        start = self._start_of_partial_stop()
        text, self._held = self._held[:start], self._held[start:]
        self._num_free = max(0, self._num_free - start)
        return text, None

    def _first_stop(self) -> tuple[int, str] | None:
        """The stop string that ends first in the held text, the longest of equals, and its end."""
        found = []
        for stop in self._params.stop:
            start = self._held.find(stop, max(0, self._num_free - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), stop))
        return min(found, key=lambda pair: (pair[0], -len(pair[1])), default=None)

    def _start_of_partial_stop(self) -> int:
        """Where the longest tail of the held text begins that a stop string begins with."""
        longest = max(map(len, self._params.stop)) - 1
        for start in range(max(0, len(self._held) - longest), len(self._held)):
            tail = self._held[start:]
            if any(stop.startswith(tail) for stop in self._params.stop):
                return start
        return len(self._held)
