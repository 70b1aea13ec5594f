"""Tokenizer: encodes and decodes text, and renders the chat template of a model folder."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from formats.errors import InputError, one_line
from formats.files.json_file import read_json
from formats.files.model_path import model_folder, origin
from formats.files.side_files import TOKENIZER_FILES
from qserve.params.sampling_params import ParameterError, SamplingParams
from qserve.text.chat_prompt import ChatPrompt, control_pattern
from qserve.text.image_text import image_text_of
from qserve.text.load_tokenizer import load_tokenizer
from qserve.text.token_bytes import is_byte_level, spelled_bytes

REPLACEMENT = "\ufffd"  # what decoders emit for invalid bytes and for incomplete characters
# Names that transformers passes to a template, in addition to parameters of apply_chat_template.
TEMPLATE_GLOBALS = {"messages", "raise_exception", "strftime_now"}


class TextError(InputError):
    """A tokenizer cannot be loaded, or a text or conversation cannot be tokenized."""


class Tokenizer:
    """Tokenizer and chat template of a model folder. Runs no Python code from the folder.

    folder: the model's folder
    files: the folder with the tokenizer's files

    `encode` and `render_chat` are thread-safe.
    """

    def __init__(self, folder: str | Path, files: str | Path | None = None) -> None:
        """Load the tokenizer from the folder `files`, by default from the model's `folder`.

        Raises TextError, or CheckpointError for a config.json that is not JSON.
        """
        self.folder = str(model_folder(folder))
        self.files = str(model_folder(files or folder))
        folder = self.files
        if not Path(folder).is_dir():
            raise TextError(folder, "is not a folder", "use the folder of a model")
        try:
            self._tokenizer = load_tokenizer(folder)
        # A broken file raises any exception of its parser, even a bare Exception from Rust.
        except Exception as error:
            config = Path(folder) / "config.json"
            if config.is_file():
                read_json(config)  # raises if this file is the broken one
            # For a folder without a tokenizer, transformers' message has several pages.
            has_one = any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)
            raise TextError(
                str(origin(folder)),
                f"has no tokenizer that transformers can load: {one_line(error)}"
                if has_one
                else f"has no tokenizer: it contains none of {', '.join(TOKENIZER_FILES)}",
                "copy tokenizer.json and tokenizer_config.json from the original model",
            ) from error
        self._backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self._image_text = image_text_of(self.folder)
        added = self._tokenizer.added_tokens_decoder.items()
        self.special_token_ids = frozenset(token for token, info in added if info.special)
        self.special_token_ids |= frozenset(self._tokenizer.all_special_ids)
        self._find_control_tokens(added)
        self._before = self.encode("a", add_special_tokens=False)
        self._num_before = len(self.decode(self._before))
        self._token_texts: dict[int, str] = {}  # cache of token_text
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
        """Convert text to token ids. Raises TextError for invalid Unicode (a lone surrogate)."""
        if self._image_text is not None:
            text = self._image_text.with_own(text)
        try:
            if self._backend is None:
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return self._encode_with(self._backend, text, add_special_tokens)
        except (TypeError, UnicodeError) as error:
            raise TextError("text", "is not valid Unicode", "remove lone surrogates") from error

    @staticmethod
    def _encode_with(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
        # encode_batch_fast is the backend's only method that releases the GIL.
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    @functools.cached_property
    def special_affixes(self) -> tuple[list[int], list[int]]:
        """The special tokens that `encode` adds before and after a text."""
        plain, whole = self.encode("a", False), self.encode("a", True)
        at = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return whole[:at], whole[at + len(plain) :]

    def is_hidden(self, text: str) -> bool:
        """Return True if `text` is a special token, which skip_special_tokens hides."""
        return text in self._special_texts

    def marker_token(self, text: str) -> int | None:
        """Return the id of an added token that a grammar must match by id; None: match the text.

        llguidance cannot match special tokens as text, nor other added tokens in angle brackets,
        such as Qwen's <tool_call> and </think>.
        """
        return self._marker_tokens.get(text)

    def encode_plain(self, text: str) -> list[int]:
        """Convert text to token ids. Names of control tokens in the text stay ordinary text."""
        ids = self._encode_plain(text)
        if not self.control_ids.isdisjoint(ids) and self.control_pattern is not None:
            # The ordinary vocabulary contains the control token, too: split its text in two.
            cuts = [match.start() + 1 for match in self.control_pattern.finditer(text)]
            edges = zip([0, *cuts], [*cuts, len(text)], strict=True)
            ids = [token for a, b in edges for token in self._encode_plain(text[a:b])]
        if not self.control_ids.isdisjoint(ids):
            raise TextError("text", "contains a control token of the model", "remove it")
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        if self._plain_backend is None:
            return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return self._encode_with(self._plain_backend, text, False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Convert token ids to text, without clean-up of spaces. Unknown ids have no text."""
        if skip_special_tokens:
            token_ids = [token for token in token_ids if token not in self.special_token_ids]
        if self._backend is not None:
            return self._backend.decode(token_ids, skip_special_tokens=False)
        return self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)

    def token_names(self, token_ids: Sequence[int]) -> list[str]:
        """Return the names of tokens in the vocabulary, such as Ġthe."""
        return self._tokenizer.convert_ids_to_tokens(list(token_ids))

    def token_text(self, token: int) -> str:
        """Return the text of a token that follows other text.

        At the start of a text some decoders drop a space.
        """
        text = self._token_texts.get(token)
        if text is None:
            text = self.decode([*self._before, token], skip_special_tokens=False)
            text = self._token_texts[token] = text[self._num_before :]
        return text

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, also if the token is only part of a character."""
        text = self.token_text(token)
        if REPLACEMENT not in text:
            return text.encode()
        (name,) = self.token_names([token])
        spelled = spelled_bytes(name, self._is_byte_level)
        return text.encode() if spelled is None else spelled

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        return is_byte_level(self._backend)

    @functools.cached_property
    def template_settings(self) -> frozenset[str]:
        """Variables of the chat template that a request may set, such as enable_thinking."""
        from qserve.text.template_names import DEFAULTS  # imports jinja2

        return self._template_names() - self.reserved_settings - DEFAULTS

    @functools.cached_property
    def reserved_settings(self) -> frozenset[str]:
        """Variables that a request may not set: the server or transformers sets them."""
        taken = {*inspect.signature(self._tokenizer.apply_chat_template).parameters}
        return frozenset(taken | TEMPLATE_GLOBALS | {*self._tokenizer.special_tokens_map})

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @functools.cached_property
    def reads_tools(self) -> bool:
        """True if the chat template renders tools."""
        return "tools" in self._template_names([{}])

    @property
    def template_text(self) -> str:
        """Text of the chat template; of all templates if there are several; "" without one."""
        found = self._tokenizer.chat_template or ""
        return "\n".join(found.values()) if isinstance(found, dict) else str(found)

    @functools.cached_property
    def renders_later_system(self) -> bool:
        """True if the chat template renders a system message after other messages."""
        roles = ("system", "user", "assistant", "system", "user")
        try:
            text = self.render_chat([{"role": role, "content": role * 2} for role in roles])
        except InputError:
            return False
        return text.count("systemsystem") == 2

    @functools.cached_property
    def needs_parts(self) -> bool:
        """True if the chat template renders content as a list of parts, but not as a text."""

        def is_rendered(content: str | list[dict[str, str]]) -> bool:
            try:
                return word in self.render_chat([{"role": "user", "content": content}])
            except InputError:
                return False

        word = "needs_parts"
        if not self.is_in_template("content") or is_rendered(word):
            return False
        return is_rendered([{"type": "text", "text": word}])

    def is_in_template(self, text: str) -> bool:
        """Return True if a text occurs in `template_text`."""
        return text in self.template_text

    def _template_names(self, tools: list[dict] | None = None) -> frozenset[str]:
        """Return the names that the chat template reads."""
        from qserve.text.template_names import names_read  # imports jinja2

        try:
            template = self._tokenizer.get_chat_template(tools=tools)
        except ValueError:  # there is no template, or several without a default
            return frozenset()
        return names_read(template)

    def import_renderer(self) -> None:
        """Import the modules that render chats, so that the first chat does not wait for them."""
        if self.has_chat_template:
            _ = self.template_settings  # reads the signature of transformers' renderer

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Render a conversation with the model's chat template, in transformers' sandbox.

        `template_kwargs`: values for variables in `template_settings`; other names raise
        ParameterError. Raises TextError if there is no template, or if it fails.
        """
        if not self._tokenizer.chat_template:
            raise TextError("chat template", "the model has none", "send a plain prompt instead")
        template_kwargs = template_kwargs or {}
        for name in template_kwargs:
            if name not in self.template_settings:
                known = ", ".join(sorted(self.template_settings)) or "none"
                raise ParameterError(
                    f"chat_template_kwargs.{name}",
                    "is not read by the model's chat template",
                    f"remove it; the template reads: {known}",
                )
        if self._image_text is not None and not self._renders_images:
            messages = list(map(self._image_text.as_text, messages))
        return self._rendered(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            tools=tools,
        )

    @functools.cached_property
    def _renders_images(self) -> bool:
        """True if the chat template writes the text of an image for an image part."""
        assert self._image_text is not None
        parts = [{"type": "image"}, {"type": "text", "text": "a"}]
        try:
            return self._image_text.is_in(self._rendered([{"role": "user", "content": parts}]))
        except TextError:
            return False

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Run the chat template. Raises TextError if it fails."""
        from qserve.text.template_names import RENDER_ERRORS  # imports jinja2

        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(template_kwargs or {}),
            )
        # Templates fail by calling raise_exception, or by an error in an expression.
        except RENDER_ERRORS as error:
            raise TextError(
                "messages",
                f"the model's chat template rejects them: {one_line(error)}",
                "send roles and an order of messages that the template supports",
            ) from error
        except (RecursionError, MemoryError) as error:
            needs = "too much memory" if isinstance(error, MemoryError) else "too many nested calls"
            raise TextError(
                "messages",
                f"the model's chat template needs {needs} to render them",
                "send fewer or shorter messages",
            ) from error

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str | list[int]:
        """Render a conversation as text, or as token ids. Parameters are those of transformers.

        `LLM.chat` and the server use `encode_chat`, where no message can create a control token.
        """
        text = self.render_chat(
            conversation, add_generation_prompt, continue_final_message, template_kwargs, tools
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> ChatPrompt:
        """Render a conversation so that no message can create a control token."""
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
        """Return the token ids of `chat_prompt`. No special tokens are added to the template's."""
        return self.chat_prompt(
            messages, add_generation_prompt, continue_final_message, template_kwargs, tools
        ).encode(self)

    def _find_control_tokens(self, added: Iterable[tuple[int, Any]]) -> None:
        """Collect the control tokens: all special tokens except the unknown token."""
        self._marker_tokens = {
            info.content: token
            for token, info in added
            if info.special or re.fullmatch("<.*>", info.content, re.DOTALL)
        }
        texts = {info.content for _, info in added if info.special}
        texts |= {str(text) for text in self._tokenizer.all_special_tokens}
        self._special_texts = frozenset(texts)
        if self._image_text is not None:
            texts.add(self._image_text.alias)
        self.control_ids = self.special_token_ids - {self._tokenizer.unk_token_id}
        self.control_pattern = control_pattern(texts)
        self._plain_backend = None
        if self._backend is not None:
            self._plain_backend = Backend.from_str(self._backend.to_str())
            self._plain_backend.encode_special_tokens = True


def with_bad_words(
    params: SamplingParams, get_tokenizer: Callable[[], Tokenizer]
) -> SamplingParams:
    """Return parameters with `bad_words_token_ids`. Raises TextError for invalid Unicode.

    Each word is encoded twice, without and with a space before it: most tokenizers make the space
    part of the word's first token.
    """
    if not params.bad_words or params.bad_words_token_ids:
        return params
    tokenizer = get_tokenizer()
    sequences = [
        tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False))
        for word in params.bad_words
        for space in ("", " ")
    ]
    return replace(params, bad_words_token_ids=tuple(dict.fromkeys(filter(None, sequences))))
