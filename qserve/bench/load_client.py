"""LoadClient: sends samples to an OpenAI server and records when their tokens come. No torch."""

import asyncio
import json
import time
from typing import Any

from formats.errors import InputError
from qserve.bench.dataset import Sample
from qserve.bench.http_client import HttpClient, HttpFailure
from qserve.bench.serve_metrics import RequestRecord
from qserve.bench.serve_settings import ServeBenchSettings
from qserve.bench.stream_times import StreamTimes
from qserve.bench.token_text import TokenText

SAMPLING_FIELDS = (
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
OK = 200


class LoadClient:
    """One server and one model, as the settings say."""

    def __init__(
        self, settings: ServeBenchSettings, model: str, http: HttpClient, text: TokenText
    ) -> None:
        """Raises InputError for an --extra-body that is no JSON object."""
        self._settings, self._model, self._http, self._text = settings, model, http, text
        self._extra = {}
        if settings.extra_body is not None:
            try:
                self._extra = json.loads(settings.extra_body)
            except ValueError:
                self._extra = None
            if not isinstance(self._extra, dict):
                raise InputError(
                    "--extra-body", f"expected a JSON object, found {settings.extra_body!r}"
                )

    def body(self, sample: Sample, ignore_eos: bool) -> bytes:
        """The request of a sample. Raises InputError for token ids where a chat is asked for."""
        settings = self._settings
        fields: dict[str, Any] = {"model": self._model}
        if not settings.is_chat:
            fields["prompt"] = sample.prompt
            if settings.logprobs is not None:
                fields["logprobs"] = settings.logprobs
        elif isinstance(sample.prompt, str):
            fields["messages"] = [{"role": "user", "content": sample.prompt}]
            if settings.logprobs is not None:
                fields |= {"logprobs": True, "top_logprobs": settings.logprobs}
        else:
            raise InputError(
                "--tokenizer",
                "expected a folder with tokenizer.json: a chat takes no token ids",
                "give it, or --backend openai",
            )
        fields["max_tokens"] = sample.output_len
        fields["temperature"] = settings.temperature
        for name in SAMPLING_FIELDS:
            if getattr(settings, name) is not None:
                fields[name] = getattr(settings, name)
        if ignore_eos:
            fields["ignore_eos"] = True
        fields |= {"stream": True, "stream_options": {"include_usage": True}, **self._extra}
        return json.dumps(fields).encode()

    async def send(self, sample: Sample, body: bytes) -> RequestRecord:
        """Send one request and read its stream to the end; a failure is in the record."""
        stream = StreamTimes()
        record = RequestRecord(prompt_len=sample.prompt_len, start=time.perf_counter())
        try:
            async with asyncio.timeout(self._settings.request_timeout):
                code = await self._http.stream("POST", self._settings.path, body, stream.feed)
        except HttpFailure as error:
            record.error = str(error)
        except TimeoutError:
            record.error = f"no end after {self._settings.request_timeout:g} s"
        else:
            if code != OK:
                record.error = f"status {code}: {_shorten(bytes(stream.body))}"
            else:
                record.error = stream.error
        self._fill(record, stream)
        return record

    def _fill(self, record: RequestRecord, stream: StreamTimes) -> None:
        record.text = "".join(stream.text)
        record.token_times = stream.token_times
        if not record.token_times and stream.first_choice is not None:
            # Its tokens have no text at all: their chunk is the one that says how it ended.
            record.token_times = [stream.first_choice]
        if stream.first_choice is None:
            record.error = record.error or "the stream held no choice"
            record.end = time.perf_counter()
            return
        record.end = stream.last_choice
        count = stream.completion_tokens
        record.output_len = len(self._text.encode(record.text)) if count is None else count
        if record.prompt_len == 0 and stream.prompt_tokens is not None:
            record.prompt_len = stream.prompt_tokens


def _shorten(body: bytes) -> str:
    """What an error's body says, on one line."""
    text = body.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(text.split())[:300]
