"""Images that clients send to a served model, judged by transformers' greedy tokens for them."""

import base64
import io
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoTokenizer

from tests.qserve.multimodal.conftest import NUM_TOKENS
from tests.qserve.server.pictures import web_pages
from tests.tiny_vision import picture

GREEDY = {"temperature": 0, "ignore_eos": True}
FIRST, SECOND = picture(50, 40, 1), picture(30, 70, 2)


@pytest.fixture(scope="module")
def web():
    with web_pages() as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    FIRST.save(folder / "first.png")
    return folder


@pytest.fixture(scope="module")
def served(vision, start_server, web, folder):
    flags = ["--served-model-name", "tiny", "--dtype", "float32", "--limit-mm-per-prompt"]
    flags += ["image=2", "--allowed-media-domains", f"127.0.0.1:{web.server_port}"]
    flags += ["--allowed-local-media-path", str(folder), "--media-fetch-timeout", "60"]
    return start_server(vision("smolvlm").folder, *flags)


@pytest.fixture(scope="module")
def client(served):
    return served.client()


@pytest.fixture(scope="module")
def judge(vision):
    """(messages, images) -> transformers' answer, and the number of tokens of the prompt."""
    model = vision("smolvlm")
    tokenizer = AutoTokenizer.from_pretrained(model.folder)

    def expected(messages, *images):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = model.expected(text, images)
        return tokenizer.decode(tokens, skip_special_tokens=True), len(
            model.prompt(text, images)[0]
        )

    return expected


def encoded(image, kind="PNG") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def url_of(image) -> str:
    return f"data:image/png;base64,{encoded(image)}"


def text(words) -> dict:
    return {"type": "text", "text": words}


def image_url(url) -> dict:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def user(*parts) -> list[dict]:
    return [{"role": "user", "content": list(parts)}]


def ask(client, messages, **fields):
    return client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=NUM_TOKENS, extra_body=GREEDY, **fields
    )


IMAGE = {"type": "image"}
TWO = user(text("Compare "), image_url(url_of(FIRST)), text(" with "), image_url(url_of(SECOND)))
JUDGED_TWO = user(text("Compare "), IMAGE, text(" with "), IMAGE)


def test_a_chat_with_two_images(client, judge):
    words, num_tokens = judge(JUDGED_TWO, FIRST, SECOND)
    swapped, _ = judge(JUDGED_TWO, SECOND, FIRST)
    assert words != swapped  # else the test would see no image
    reply = ask(client, TWO)
    assert reply.choices[0].message.content == words
    assert reply.usage.prompt_tokens == num_tokens
    stream = ask(client, TWO, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == words
    # The pages of the prompt are found by the images' digests.
    assert ask(client, TWO).usage.prompt_tokens_details.cached_tokens > num_tokens / 2


@pytest.mark.parametrize("source", ["web", "file"])
def test_an_image_of_a_url(client, judge, web, folder, source):
    if source == "file":
        url, image = (folder / "first.png").as_uri(), FIRST
    else:
        from PIL import Image

        url = f"http://127.0.0.1:{web.server_port}/to?/a.png"
        image = Image.new("RGB", (24, 16), 7)
    words, _ = judge(user(IMAGE), image)
    assert ask(client, user(image_url(url))).choices[0].message.content == words


def test_a_second_turn_about_an_image(client, judge):
    """And no image in the last message."""
    later = [{"role": "assistant", "content": "A house."}, *user(text("Which colour?"))]
    words, _ = judge(user(IMAGE, text("What?")) + later, FIRST)
    reply = ask(client, user(image_url(url_of(FIRST)), text("What?")) + later)
    assert reply.choices[0].message.content == words


def test_text_that_looks_like_an_image(client):
    """A placeholder that a user writes is text: it neither takes an image nor misses one."""
    reply = ask(client, user(text("<image> and "), image_url(url_of(FIRST))))
    assert reply.choices[0].message.content
    assert ask(client, user(text("<image>"))).choices[0].message.content


def test_responses(client, judge):
    words, num_tokens = judge(user(text("What?"), IMAGE), FIRST)
    part = {"type": "input_image", "image_url": url_of(FIRST), "detail": "auto"}
    reply = client.responses.create(
        model="tiny",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "What?"}, part]}],
        max_output_tokens=NUM_TOKENS,
        extra_body=GREEDY,
    )
    assert reply.output_text == words
    assert reply.usage.input_tokens == num_tokens


def test_anthropic_messages(served, judge):
    source = {"type": "base64", "media_type": "image/jpeg", "data": encoded(FIRST, "JPEG")}
    import anthropic  # takes seconds: not where other files' tests run
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(source["data"])))
    words, num_tokens = judge(user(IMAGE, text("What?")), image)
    block = {"type": "image", "source": source}
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        asked = {"model": "tiny", "messages": user(block, text("What?"))}
        reply = client.messages.create(**asked, max_tokens=NUM_TOKENS, extra_body=GREEDY)
        assert reply.content[0].text == words
        assert reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0) == num_tokens
        assert client.messages.count_tokens(**asked).input_tokens == num_tokens


def test_an_image_that_never_comes_keeps_nobody_waiting(client, web):
    """Text is answered, and a stream ends, while the image of another request is awaited."""
    slow = user(image_url(f"http://127.0.0.1:{web.server_port}/hang"))
    stream = ask(client, user(text("Tell a story")), stream=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, client, slow)
        assert web.is_asked.wait(60)
        assert ask(client, user(text("Hi"))).choices[0].message.content
        assert len(list(stream)) > 2
        assert not waiting.done()
        web.is_released.set()
        with pytest.raises(Exception, match="answered with status 404"):
            waiting.result(60)


def test_a_limit_of_the_server(client):
    three = user(*[image_url(url_of(picture(20, 20, seed))) for seed in range(3)])
    with pytest.raises(Exception, match="expected at most 2 images, found 3"):
        ask(client, three)
