"""`qserve eval` on chats with images: perplexity and distance from transformers' logits."""

import base64
import io
import json
import math
from types import SimpleNamespace

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from formats.scheme import Scheme
from qserve.cli import main
from qserve.llm import LLM
from qserve.multimodal.calibration import CalibrationChats
from tests.qserve.command_line import fails_with
from tests.qserve.multimodal.conftest import Vision
from tests.tiny_vision import VISION_FAMILIES, loaded, picture, write_tiny_vision

# positions of three axes and deepstack
DEFAULT = "qwen3_vl"
FAMILIES = [
    pytest.param(name, marks=() if name == DEFAULT else pytest.mark.exhaustive)
    for name in VISION_FAMILIES
    # transformers draws experts whose weights are quantized
    if "moe" not in name and name not in ("kimi_k25", "ernie_vl", "minimax_m3", "step3p7")
]
LENGTH = 160  # of a window: cuts the last chat


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """family -> its float folder, and one in W4A16."""
    made = {}

    def make(family):
        if family not in made:
            base = tmp_path_factory.mktemp("evaluated")
            source, folder = base / family, base / "quantized" / family
            write_tiny_vision(source, family)
            quantize_checkpoint(
                source, folder, scheme=Scheme.parse("w4a16-sym-g32"), recipe="rtn", progress=False
            )
            made[family] = source, folder
        return made[family]

    return make


def data_url(image):
    stored = io.BytesIO()
    image.save(stored, "PNG")
    return "data:image/png;base64," + base64.b64encode(stored.getvalue()).decode()


@pytest.fixture
def chats(tmp_path):
    """A file of chats: a path, two data: URLs, no image, an answer that is longer than a window."""
    picture(40, 30, 1).save(tmp_path / "one.png")
    two = [
        {"type": "image_url", "image_url": {"url": data_url(picture(64, 64, 2))}},
        {"type": "text", "text": "beside"},  # transformers joins images without text between them
        {"type": "image_url", "image_url": {"url": data_url(picture(70, 9, 3))}},
        {"type": "text", "text": "what differs?"},
    ]
    one = [{"type": "image", "image": "one.png"}, {"type": "text", "text": "what is it?"}]
    rows = [
        [{"role": "user", "content": one}, {"role": "assistant", "content": "A page table."}],
        [{"role": "user", "content": two}, {"role": "assistant", "content": "Their sizes."}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, you."}],
        [{"role": "user", "content": one}, {"role": "assistant", "content": "blocks " * 200}],
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"messages": each}) for each in rows))
    return SimpleNamespace(path=path, rows=rows)


def log_probabilities(folder, chats):
    """transformers' log probabilities of each chat's tokens of text [N, V], and those tokens."""
    judge = Vision(folder, loaded(folder, folder.name))
    reader, found = CalibrationChats(folder), []
    bos = {0}  # <|begin_of_text|> of the tokenizer, which does not count
    for messages in chats.rows:
        chat = reader.read(messages, chats.path.parent)
        ids = chat.ids[:LENGTH]
        answer = len(ids) - max((item.end for item in chat.media), default=0)
        logits_SV = judge._logits(ids, judge.inputs(ids, chat.images, answer=answer), ids)
        images = {place for item in chat.media for place in range(item.offset, item.end)}
        rows = [i for i in range(1, len(ids)) if i not in images and ids[i] not in bos]
        logs_NV = logits_SV.double().log_softmax(-1)[[i - 1 for i in rows]]
        found.append((logs_NV, torch.tensor([ids[i] for i in rows])))
    logs, targets = zip(*found, strict=True)
    return torch.cat(logs), torch.cat(targets)


def evaluated(capsys, folder, chats, *flags):
    command = ["eval", str(folder), "--text", str(chats.path), "--sequence-length", str(LENGTH)]
    assert main([*command, "--device", "cpu", "--dtype", "float32", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("family", FAMILIES)
def test_perplexity_and_divergence_equal_transformers(folders, chats, family, capsys):
    source, folder = folders(family)
    (p_NV, targets_N), (q_NV, _) = (log_probabilities(each, chats) for each in (source, folder))
    wanted = [math.exp(-logs.gather(-1, targets_N[:, None]).mean()) for logs in (p_NV, q_NV)]
    assert wanted[0] != pytest.approx(wanted[1], rel=5e-4)
    alone = evaluated(capsys, folder, chats)
    assert alone["value"] == pytest.approx(wanted[1], rel=1e-4)
    assert (alone["windows"], alone["images"], alone["tokens"]) == (4, 4, len(targets_N))
    found = evaluated(capsys, folder, chats, "--against", str(source))
    assert found["reference_perplexity"] == pytest.approx(wanted[0], rel=1e-4)
    assert found["perplexity"] == pytest.approx(wanted[1], rel=1e-4)
    divergence = float((p_NV.exp() * (p_NV - q_NV)).sum(-1).mean())
    assert found["divergence"] == pytest.approx(divergence, rel=5e-3)
    same = float((p_NV.argmax(-1) == q_NV.argmax(-1)).double().mean())
    assert found["same_top_token"] == pytest.approx(same, abs=2 / len(targets_N))


def test_texts_are_evaluated_after_chats(folders, chats, capsys):
    source, _ = folders(DEFAULT)
    with chats.path.open("a") as file:
        file.write("\n" + json.dumps({"text": "Ownership is a set of rules. " * 60}))
    assert evaluated(capsys, source, chats, "--windows", "2")["windows"] == 2
    whole = evaluated(capsys, source, chats)
    assert whole["windows"] > 4
    assert whole["images"] == 4


def test_image_beyond_the_window_is_refused(folders, chats, capsys):
    source, _ = folders(DEFAULT)
    command = ["eval", str(source), "--text", str(chats.path), "--sequence-length", "6"]
    words = "chat 1", "its last image ends at token 7", "raise --sequence-length"
    fails_with(capsys, command, *words)


def test_model_without_a_tower_is_refused(docs_5m, chats, capsys):
    command = ["eval", str(docs_5m), "--text", str(chats.path)]
    fails_with(capsys, command, "takes text only")


def test_file_without_documents_is_refused(docs_5m, tmp_path, capsys):
    path = tmp_path / "empty.jsonl"
    path.touch()
    fails_with(capsys, ["eval", str(docs_5m), "--text", str(path)], "too few for one window")


def test_embeddings_of_evaluated_images_are_not_kept(folders, chats):
    source, _ = folders(DEFAULT)
    llm = LLM(str(source), device="cpu", dtype="float32", max_num_seqs=2)
    chat = CalibrationChats(source).read(chats.rows[1], chats.path.parent)
    first = llm.logits(chat.ids, chat.media)
    assert not llm.engine.runner.encoder._rows
    assert torch.equal(llm.logits(chat.ids, chat.media), first)
    assert not torch.equal(llm.logits(chat.ids), first)
    llm.close()
