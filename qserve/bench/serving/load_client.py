"""LoadClient: sends samples to an OpenAI server and records the times of their tokens.

Loads no torch.
"""

import asyncio
import json
import time
from typing import Any

from formats.errors import InputError
from qserve.bench.requests.dataset import Sample
from qserve.bench.requests.token_text import TokenText
from qserve.bench.serving.http_client import HttpClient, HttpFailure
from qserve.bench.serving.serve_metrics import RequestRecord
from qserve.bench.serving.serve_settings import ServeBenchSettings
from qserve.bench.serving.stream_times import StreamTimes

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
    """Sends the samples of a benchmark to one model of one server."""

    def __init__(
        self, settings: ServeBenchSettings, model: str, http: HttpClient, text: TokenText
    ) -> None:
        """Parse --extra-body. Raises InputError if it is not a JSON object."""
        self._settings, self._model, self._http, self._text = settings, model, http, text
        self._extra = {}
        if settings.extra_body is not None:
            try:
                self._extra = json.loads(settings.extra_body)
            except ValueError:
                self._extra = None
            if not isinstance(self._extra, dict):
                raise InputError(
                    "--extra-body",
                    f"expected a JSON object, found {settings.extra_body!r}",
                    "for example '{\"top_k\": 20}'",
                )

    def body(self, sample: Sample, ignore_eos: bool) -> bytes:
        """Return the request body of a sample. Raises InputError for token ids in a chat."""
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
                "requires a folder with tokenizer.json: a chat accepts no token ids",
                "add this file, or use --backend openai",
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
        """Send one request and read its stream to the end. A failure becomes part of the record."""
        stream = StreamTimes()
        record = RequestRecord(prompt_len=sample.prompt_len, start=time.perf_counter())
        try:
            async with asyncio.timeout(self._settings.request_timeout):
                code = await self._http.stream("POST", self._settings.path, body, stream.feed)
        except HttpFailure as error:
            record.error = str(error)
        except TimeoutError:
            record.error = f"timed out after {self._settings.request_timeout:g} s"
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
            # If no token has text, the only chunk is the one with the finish reason.
            record.token_times = [stream.first_choice]
        if stream.first_choice is None:
            record.error = record.error or "the stream contained no choice"
            record.end = time.perf_counter()
            return
        record.end = stream.last_choice
        count = stream.completion_tokens
        record.output_len = len(self._text.encode(record.text)) if count is None else count
        if record.prompt_len == 0 and stream.prompt_tokens is not None:
            record.prompt_len = stream.prompt_tokens


def _shorten(body: bytes) -> str:
    """Return the message in the body of an error, shortened and on one line."""
    text = body.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(text.split())[:300]
