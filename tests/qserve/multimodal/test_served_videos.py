"""Videos that clients send to a served model and give to LLM, judged by transformers' tokens."""

import asyncio
import base64

import pytest
from PIL import Image
from transformers import AutoTokenizer

from formats.errors import InputError
from qserve import LLM, AsyncLLM, SamplingParams
from tests.qserve.multimodal.conftest import NUM_TOKENS
from tests.qserve.multimodal.test_served_images import image_url, text, url_of, user
from tests.qserve.multimodal.video_files import animation, video_file
from tests.tiny_vision import film, picture

pytestmark = pytest.mark.exhaustive

GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
FRAMES, PICTURE = film(9, 64, 48, 1), picture(50, 40, 1)
SPEED = {"fps": 4.0, "do_sample_frames": True}
VIDEO, IMAGE = {"type": "video"}, {"type": "image"}


def video_url(data: bytes, kind="image/webp") -> dict:
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "video_url", "video_url": {"url": url}}


FILE = video_url(animation(FRAMES, "WEBP", 250))


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def model(request, vision):
    return vision(request.param)


@pytest.fixture(scope="module")
def client(model, start_server):
    flags = ["--served-model-name", "tiny", "--dtype", "float32", "--limit-mm-per-prompt"]
    flags += ["video=1", "--max-video-frames", "6"]
    return start_server(model.folder, *flags).client()


@pytest.fixture(scope="module")
def judge(model):
    """(messages, images, videos) -> transformers' answer, and the number of the prompt's tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model.folder)

    def expected(messages, images=(), videos=()):
        words = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = model.expected(words, images, videos)
        length = len(model.prompt(words, images, videos)[0])
        return tokenizer.decode(tokens, skip_special_tokens=True), length

    return expected


def ask(client, messages, **fields):
    return client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=NUM_TOKENS,
        extra_body={"temperature": 0, "ignore_eos": True},
        **fields,
    )


def test_a_chat_with_a_video_beside_an_image(client, judge):
    asked = user(text("Compare "), FILE, text(" with "), image_url(url_of(PICTURE)))
    judged = user(text("Compare "), VIDEO, text(" with "), IMAGE)
    words, num_tokens = judge(judged, (PICTURE,), ((FRAMES, SPEED),))
    other, _ = judge(judged, (PICTURE,), ((FRAMES[::-1], SPEED),))
    assert words != other  # else the test would see no video
    reply = ask(client, asked)
    assert reply.choices[0].message.content == words
    assert reply.usage.prompt_tokens == num_tokens
    later = [{"role": "assistant", "content": words}, *user(text("Why?"))]
    words, num_tokens = judge(judged + later, (PICTURE,), ((FRAMES, SPEED),))
    reply = ask(client, asked + later)
    assert reply.choices[0].message.content == words
    assert reply.usage.prompt_tokens_details.cached_tokens > num_tokens / 2


def test_a_video_file(client, judge, model):
    from qserve.multimodal.decode_video import DecodeLimits, decode_video

    data = video_file(FRAMES, "mp4", "mpeg4", 5)
    frames = list(decode_video(data, DecodeLimits(max_pixels=10**5, seconds=60)).read(range(9)))
    given = [Image.fromarray(frame) for frame in frames], {**SPEED, "fps": 5.0}
    words, num_tokens = judge(user(VIDEO, text("What?")), (), (given,))
    reply = ask(client, user(video_url(data, "video/mp4"), text("What?")))
    assert reply.choices[0].message.content == words and reply.usage.prompt_tokens == num_tokens


def test_limits_of_the_server(client, judge):
    with pytest.raises(Exception, match="expected at most 1 videos, found 2"):
        ask(client, user(FILE, FILE))
    long = video_url(animation(film(24, 64, 48), "GIF", 250), "image/gif")
    _, num_tokens = judge(user(VIDEO), (), ((film(6, 64, 48), {"fps": 2, "do_sample_frames": 1}),))
    # 12 of the frames would be chosen without --max-video-frames
    assert abs(ask(client, user(long)).usage.prompt_tokens - num_tokens) < 12


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_video", "video_url": FILE["video_url"]["url"]},
        {"type": "input_video", "video_url": FILE["video_url"]},
        FILE,
    ],
    ids=["text", "object", "chat's"],
)
def test_a_response_about_a_video(client, judge, part):
    asked = [{"type": "input_text", "text": "Tell of "}, part]
    words, num_tokens = judge(user(text("Tell of "), VIDEO), (), ((FRAMES, SPEED),))
    reply = client.responses.create(
        model="tiny",
        input=[{"role": "user", "content": asked}],
        max_output_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert reply.output_text == words
    assert reply.usage.input_tokens == num_tokens


def test_responses_of_hostile_videos(client):
    for part, words in (
        ({"type": "input_video", "video_url": 5}, "with a URL in video_url"),
        ({"type": "input_video", "video_url": "file:///etc/passwd"}, "reads no local files"),
    ):
        with pytest.raises(Exception, match=words):
            client.responses.create(model="tiny", input=[{"role": "user", "content": [part]}])


def test_generate_and_chat_of_the_python_api(model):
    llm = LLM(str(model.folder), device="cpu", dtype="float32")
    mark = "<|vision_start|><|video_pad|><|vision_end|>"
    images = [Image.fromarray(frame) for frame in FRAMES]
    second = film(4, 32, 32, 5)
    one, pair = (FRAMES, SPEED), [(images, SPEED), (second, SPEED)]
    prompts = [
        {"prompt": f"see {mark}", "multi_modal_data": {"video": one}},
        {"prompt": f"{mark} or {mark}", "multi_modal_data": {"video": pair}},
        {"prompt": f"all of {mark}", "multi_modal_data": {"video": images}},
        "plain text",
    ]
    found = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    assert list(map(list, found)) == [
        model.expected(f"see {mark}", (), (one,)),
        model.expected(f"{mark} or {mark}", (), (one, (second, SPEED))),
        model.expected(f"all of {mark}", (), (FRAMES,)),
        model.expected("plain text"),
    ]
    own = {"type": "video", "video": FRAMES, **SPEED}
    for part in (own, FILE):
        (output,) = llm.chat(user(part, text("What?"), IMAGE | {"image": PICTURE}), GREEDY)
        assert list(output.outputs[0].token_ids) == model.expected(
            output.prompt, (PICTURE,), (one,)
        )
    with pytest.raises(InputError, match="expected a data: URL, found 'https://a.example/x.mp4'"):
        llm.chat(user({"type": "video_url", "video_url": {"url": "https://a.example/x.mp4"}}))


@pytest.mark.exhaustive
def test_async_generate(vision):
    model, mark = vision("qwen3_vl"), "<|vision_start|><|video_pad|><|vision_end|>"

    async def scenario():
        async with AsyncLLM(str(model.folder), device="cpu", dtype="float32") as llm:
            prompt = {"prompt": f"see {mark}", "multi_modal_data": {"video": (FRAMES, SPEED)}}
            return [output async for output in llm.generate(prompt, GREEDY)][-1]

    found = list(asyncio.run(scenario()).outputs[0].token_ids)
    assert found == model.expected(f"see {mark}", (), ((FRAMES, SPEED),))


def test_models_that_take_images_alone_say_so(vision):
    llm = LLM(str(vision("smolvlm").folder), device="cpu", dtype="float32")
    with pytest.raises(InputError, match="videos: are not taken by SmolVLM.*give frames as images"):
        llm.generate({"prompt": "<image>", "multi_modal_data": {"video": FRAMES}}, GREEDY)
