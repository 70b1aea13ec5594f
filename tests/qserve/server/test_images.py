"""Images in the bodies of each route: order, counts, refusals, and the process that reads them."""

import asyncio
import json
import shutil

import pytest
from PIL import Image

from qserve.config import ServerConfig
from qserve.multimodal import reader
from qserve.multimodal.reader import MediaReader
from qserve.multimodal.settings import MediaLimits
from qserve.server.app import open_store
from qserve.server.http.errors import ApiError
from qserve.server.prepare.media import IN_OTHER_PROCESSES, MediaAccess
from qserve.server.prepare.preparation import Preparation
from qserve.server.requests.job import Arrival
from qserve.text.tokenizer import Tokenizer
from tests.qserve.server.pictures import FakeProcessor, data_url, image_file
from tests.tiny_vision import write_tiny_tokenizer

WIDTHS = (11, 22, 33)
URLS = [data_url(image_file(size=(width, 8))) for width in WIDTHS]
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
# Renders content only as a list of parts, as SmolVLM's template does.
PARTS_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% elif p.type == 'text' %}{{ p.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory, docs_5m):
    folder = tmp_path_factory.mktemp("with_images")
    shutil.copy(docs_5m / "config.json", folder)
    ids = write_tiny_tokenizer(folder, ["<image>"], "<image>")
    made = Tokenizer(folder)
    made.image = ids["<image>"]
    return made


@pytest.fixture
def served(make_server, tokenizer, monkeypatch):
    """(server, processor)"""
    processor = FakeProcessor(tokenizer.image)
    monkeypatch.setattr(MediaReader, "load", lambda reader: processor)
    config = ServerConfig(served_model_name=["tiny"])
    server = make_server(config, media=MediaAccess(MediaLimits(max_images=4)))
    server.client.vocab_size = tokenizer.image + 1
    return server, processor


def text(words) -> dict:
    return {"type": "text", "text": words}


def chat_image(url) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


def input_image(url) -> dict:
    return {"type": "input_image", "image_url": url, "detail": "auto"}


def block(url) -> dict:
    kind, data = url.removeprefix("data:").split(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def user(*parts) -> dict:
    return {"role": "user", "content": list(parts)}


def input_text(words) -> dict:
    return {"type": "input_text", "text": words}


A, B, C = URLS
USE = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [text("seen"), block(A), block(B)]}
OUTPUT = {"type": "function_call_output", "call_id": "c"}
CALLED = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
# body, widths of its images in order, and the text of the prompt between the control tokens
BODIES = {
    "text around images": (
        "/v1/chat/completions",
        {"messages": [user(chat_image(A), text("x"), chat_image(B), chat_image(C), text("y"))]},
        WIDTHS,
        "user\n<image>x<image><image>y",
    ),
    "a URL without its object": (
        "/v1/chat/completions",
        {"messages": [user({"type": "image_url", "image_url": A}, {"type": "image", "url": B})]},
        WIDTHS[:2],
        "user\n<image><image>",
    ),
    "one image in two turns": (
        "/v1/chat/completions",
        {
            "messages": [
                user(chat_image(B)),
                {"role": "assistant", "content": "ok"},
                user(chat_image(B)),
            ]
        },
        (22, 22),
        "user\n<image>assistant\nokuser\n<image>",
    ),
    "image of a tool": (
        "/v1/chat/completions",
        {
            "messages": [
                user(text("look")),
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": [text("seen"), chat_image(C)]},
            ]
        },
        (33,),
        "user\nlookassistant\ntool\nseen<image>",
    ),
    "response": (
        "/v1/responses",
        {"input": [user(input_text("x"), input_image(B), input_text("y"), input_image(A))]},
        (22, 11),
        "user\nx<image>y<image>",
    ),
    "response about the output of a tool": (
        "/v1/responses",
        {"input": [user(input_text("x")), CALLED, OUTPUT | {"output": [input_image(C)]}]},
        (33,),
        "user\nxassistant\ntool\n<image>",
    ),
    "message": (
        "/v1/messages",
        {"max_tokens": 9, "messages": [user(text("x"), block(C), text("y"), block(A))]},
        (33, 11),
        "user\nx<image>y<image>",
    ),
    "message with the results of a tool": (
        "/v1/messages",
        {
            "max_tokens": 9,
            "messages": [
                user(text("x")),
                {"role": "assistant", "content": [USE]},
                user(RESULT, text("And this?"), block(C)),
            ],
        },
        WIDTHS,
        "user\nxassistant\ntool\nseenuser\n<image><image>And this?<image>",
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_images_of_each_route(served, tokenizer, name):
    server, processor = served
    path, body, widths, expected = BODIES[name]
    reply = server.post(path, {"model": "tiny", **body})
    assert reply.status_code == 200, reply.text
    assert [image.width for image in processor.images] == list(widths)
    ((_, prompt, _),) = server.client.requests
    (options,) = server.client.request_options
    assert [item.offset for item in options.media] == [
        at for at, token in enumerate(prompt) if token == tokenizer.image
    ][::3]
    shown = tokenizer.decode(prompt, skip_special_tokens=False)
    for control in ("<|im_start|>", "<|im_end|>\n"):
        shown = shown.replace(control, "")
    assert shown.replace("<image>" * 3, "<image>").removesuffix("assistant\n") == expected
    usage = reply.json()["usage"]
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == len(prompt)


def test_counts_include_the_tokens_of_images(served):
    server, _ = served
    messages = [user(chat_image(A), text("x"))]
    found = server.chat(messages=messages).json()["usage"]["prompt_tokens"]
    assert server.post("/tokenize", {"messages": messages}).json()["count"] == found
    counted = {"model": "tiny", "messages": [user(block(A), text("x"))]}
    assert server.post("/v1/messages/count_tokens", counted).json()["input_tokens"] == found
    assert server.chat(messages=[user(text("x"))]).json()["usage"]["prompt_tokens"] == found - 3


def test_image_digests_are_of_files(served):
    """Equal files share pages, and files with equal pixels alone do not."""
    server, _ = served
    other = data_url(image_file(size=(11, 8), compress_level=0))
    server.chat(messages=[user(chat_image(A), chat_image(A), chat_image(other))])
    first, second, third = (item.digest for item in server.client.request_options[0].media)
    assert first == second != third


def test_choices_share_their_images(served):
    server, processor = served
    reply = server.chat(messages=[user(chat_image(A))], n=3, temperature=1)
    assert len(reply.json()["choices"]) == 3
    assert len(server.client.request_options) == 3 and len(processor.images) == 1
    assert all(options.media for options in server.client.request_options)


def test_detail_is_reported_as_ignored(served):
    server, _ = served
    part = chat_image(A)
    part["image_url"]["detail"] = "high"
    ignored = server.chat(messages=[user(part)]).headers["x-ignored-fields"]
    assert ignored == "messages.content.image_url.detail"
    body = {"input": [user(input_image(A) | {"detail": "low"})]}
    assert server.post("/v1/responses", body).headers["x-ignored-fields"] == "input.content.detail"


def test_truncated_conversation_reads_each_image_once(served, monkeypatch):
    server, processor = served
    read = []

    def counted(url, *rest):
        read.append(url)
        return image_file(size=(int(url[-1]) + 1, 8))

    monkeypatch.setattr(reader, "read_source", counted)
    turns = [
        turn
        for number in range(4)
        for turn in (
            user(input_text("word " * 60), input_image(f"data:{number}")),
            {"role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
        )
    ]
    reply = server.post("/v1/responses", {"input": turns[:-1], "truncation": "auto"})
    assert reply.status_code == 200, reply.text
    assert sorted(read) == [f"data:{number}" for number in range(4)]
    (options,) = server.client.request_options
    assert 0 < len(options.media) < 4 and processor.images[-1].width == 4


def test_template_that_reads_parts_only(served, tokenizer, monkeypatch):
    """All texts become parts, those of messages without images, too."""
    server, _ = served
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", PARTS_ONLY)
    tokenizer.__dict__.pop("needs_parts", None)
    server.chat(
        messages=[{"role": "system", "content": "Be kind."}, user(text("x"), chat_image(A))]
    )
    ((_, prompt, _),) = server.client.requests
    shown = tokenizer.decode(prompt)
    assert "Be kind." in shown and "x" in shown
    assert prompt.count(tokenizer.image) == 3


REFUSED = {
    "/v1/chat/completions": (
        {"messages": [user(text("x"), chat_image(A))]},
        "messages.0.content.1",
    ),
    "/v1/responses": (
        {"input": [CALLED, OUTPUT | {"output": [input_image(A)]}]},
        "input.1.output.0",
    ),
    "/v1/messages": ({"max_tokens": 5, "messages": [user(block(A))]}, "messages.0.content.0"),
    "/tokenize": ({"messages": [user(chat_image(A))]}, "messages.0.content.0"),
}


@pytest.mark.parametrize("path", REFUSED)
def test_text_model_refuses_images(make_server, path):
    class Engine:
        media_kinds = ()
        no_vision = ""

    body, place = REFUSED[path]
    body = {"model": "tiny", **body}
    config = ServerConfig(served_model_name=["tiny"])
    server = make_server(config, media=MediaAccess.of(Engine, config))
    message = server.post(path, body).json()["error"]["message"]
    assert message == (
        f"{place}: the model 'tiny' reads text only. Remove the image, or use a vision-language"
        " model."
    )
    Engine.no_vision = "remove --language-model-only"
    server = make_server(config, media=MediaAccess.of(Engine, config))
    reply = server.post(path, body)
    assert reply.status_code == 400
    assert "on this server: remove --language-model-only" in reply.json()["error"]["message"]
    assert not server.client.requests


def test_library_error_text_is_not_exposed(served, error):
    server, processor = served

    def prepare(*arguments):
        from formats.errors import InputError

        try:
            raise ValueError("<PIL.Image.Image at 0x7f00>")
        except ValueError as error:
            raise InputError("image", f"cannot: {error}") from error

    processor.prepare = prepare
    message = error(server.chat(messages=[user(chat_image(A))]), 400)["message"]
    assert message.startswith("image: cannot be processed for this model")


def test_pixels_beyond_engine_message_size_are_refused(served, error, monkeypatch):
    server, processor = served
    monkeypatch.setattr(reader, "MAX_FEATURE_BYTES", -1)
    message = error(server.chat(messages=[user(chat_image(A))]), 400)["message"]
    assert "in one request" in message and "send fewer" in message


class Watched:
    """A worker process that notes routes and waits for its gate."""

    def __init__(self) -> None:
        self.routes: list[str] = []
        self.gate = asyncio.Event()

    async def prepare(self, route, body, arrival, adapters):
        self.routes.append(route)
        await self.gate.wait()
        raise ApiError(400, "The image is refused.", "Leave it out.")

    async def ready(self): ...

    async def close(self): ...


def test_bodies_with_images_go_to_processes_of_their_own(server):
    """While one of them waits, texts and the images of other clients are prepared."""

    async def scenario() -> None:
        worker, renderer, *media = (Watched() for _ in range(4))
        for each in (worker, renderer, media[0]):
            each.gate.set()
        preparation = Preparation(worker, renderer, media)
        model = server.app.state.service.model

        async def prepare(client, route, body):
            body = json.dumps(body).encode()
            with pytest.raises(ApiError, match="refused"):
                await preparation.prepare(client, model, route, body, Arrival(time=0.0))

        # The last process is taken first, and one client never holds all.
        slow = [asyncio.create_task(prepare("a", "chat", {"type": "image_url"})) for _ in range(2)]
        while not media[1].routes:
            await asyncio.sleep(0)
        await asyncio.gather(
            prepare("a", "chat", {"content": "text"}),
            prepare("b", "responses", {"type": "input_image"}),
            prepare("c", "messages", {"type": "image"}),
            prepare("a", "chat", {"content": "x" * 2**16}),
        )
        assert not any(task.done() for task in slow)
        media[1].gate.set()
        await asyncio.gather(*slow)
        assert renderer.routes == ["chat"] and worker.routes == ["chat"]
        assert sorted(media[0].routes + media[1].routes) == [
            "chat",
            "chat",
            "messages",
            "responses",
        ]
        await preparation.close()

    asyncio.run(scenario())


def test_escaped_part_type_is_refused(make_server, tokenizer, error):
    """Another process would read the image, so it is refused instead."""
    server = make_server(ServerConfig(), media=MediaAccess(None, IN_OTHER_PROCESSES))
    body = json.dumps({"messages": [user(chat_image(A))]}).replace(
        '"image_url"', r'"image\u005furl"'
    )
    body = body.replace('"image', r'"\u0069mage')
    reply = server.request("POST", "/v1/chat/completions", content=body.encode())
    assert "written without escapes" in error(reply, 400)["message"]


def test_image_keeps_its_size(served):
    server, processor = served
    server.chat(messages=[user(chat_image(C))])
    (image,) = processor.images
    assert isinstance(image, Image.Image) and image.size == (33, 8) and image.mode == "RGB"


def test_images_are_not_embedded(served, error):
    server, processor = served
    message = error(server.post("/pooling", {"messages": [user(chat_image(A))]}), 400)["message"]
    assert message == "messages.0.content: images and videos are not embedded. Send text only."
    assert not processor.images


def test_stored_response_keeps_its_images(make_server, tokenizer, monkeypatch, tmp_path):
    processor = FakeProcessor(tokenizer.image)
    monkeypatch.setattr(MediaReader, "load", lambda reader: processor)
    config = ServerConfig(served_model_name=["tiny"], response_store=str(tmp_path / "store.db"))
    store = open_store(config)
    try:
        server = make_server(config, store=store, media=MediaAccess(MediaLimits()))
        server.client.vocab_size = tokenizer.image + 1
        first = server.post("/v1/responses", {"input": [user(input_image(A))]}).json()
        again = {"input": "And now?", "previous_response_id": first["id"]}
        second = server.post("/v1/responses", again).json()
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        assert [image.width for image in processor.images] == [11, 11]
        listed = server.get(f"/v1/responses/{first['id']}/input_items").json()
        (part,) = listed["data"][0]["content"]
        assert part["type"] == "input_image" and part["image_url"] == A
    finally:
        store.close()
