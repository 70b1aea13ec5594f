"""jina-reranker-m0: scores of pairs of texts and images, from two linears instead of the head.

The reference is transformers' Qwen2-VL, and the head written out.
"""

import base64
import io
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.inspection.inspect import inspect_checkpoint
from formats.scheme import Scheme
from qserve import LLM
from qserve.config import ServerConfig
from qserve.multimodal.settings import MediaLimits
from qserve.pooling import scoring
from qserve.pooling.config import PoolingConfig
from qserve.server.app import build_app
from qserve.server.prepare.media import MediaAccess
from qserve.text.tokenizer import Tokenizer
from tests.qserve.multimodal.conftest import Vision
from tests.qserve.server.conftest import Server
from tests.qserve.server.test_embeddings import PoolingClient
from tests.tiny_vision import loaded, picture, write_tiny_vision

QUERY, TEXTS = "What is a page?", ["A page is a part of memory.", "x <|im_end|> y"]
PICTURES = [picture(40, 30, 1), picture(64, 20, 2)]
OFFSET = 2.65


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny ranker as published: a flat config.json, tensors of the head under `score`."""
    folder = write_tiny_vision(tmp_path_factory.mktemp("ranker") / "qwen2_vl", "qwen2_vl")
    model = loaded(folder, "qwen2_vl").eval()
    state = load_file(folder / "model.safetensors")
    del state["lm_head.weight"]
    state = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): each
        for name, each in state.items()
    }
    assert {name.split(".")[0] for name in state} == {"model", "visual"}
    torch.manual_seed(5)
    shapes = {"0.weight": (64, 64), "0.bias": (64,), "2.weight": (1, 64), "2.bias": (1,)}
    state |= {f"score.{name}": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    text.pop("model_type")
    rope = text.pop("rope_parameters")
    config |= text | {"architectures": ["JinaVLForRanking"], "model_type": "qwen2_vl"}
    config |= {"rope_theta": rope["rope_theta"]}
    config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    (folder / "config.json").write_text(json.dumps(config))
    return Reference(folder, model, state)


class Reference:
    def __init__(self, folder, model, state):
        self.path, self.vision, self.state = folder, Vision(folder, model), state

    @torch.no_grad()
    def logit(self, query, document):
        text, images = "", []
        for before, side in (("**Document**:\n", document), ("\n**Query**:\n", query)):
            text += before + (side if isinstance(side, str) else scoring.IMAGE)
            images += [] if isinstance(side, str) else [side]
        tokenizer = Tokenizer(self.path)
        plain = [tokenizer.encode_plain(part) for part in text.split(scoring.IMAGE)]
        ids = plain[0]
        for part in plain[1:]:
            ids = [*ids, *tokenizer.encode(scoring.IMAGE, False), *part]
        ids, _ = self.vision.prompt([*ids, 100], images)
        inputs = self.vision.inputs(ids, images)
        hidden_C = self.vision.model.model(**inputs).last_hidden_state[0, -1]
        weights = {name: self.state[f"score.{name}"] for name in ("0.weight", "2.weight")}
        inner = torch.relu(weights["0.weight"] @ hidden_C + self.state["score.0.bias"])
        return float(weights["2.weight"] @ inner + self.state["score.2.bias"])

    def scores(self, query, documents):
        logits = [self.logit(query, document) for document in documents]
        return torch.sigmoid(torch.tensor(logits) - OFFSET).tolist()


def load(folder, **settings):
    given = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 16, "max_num_seqs": 4}
    return LLM(folder, **{**given, **settings})


@pytest.fixture(scope="module")
def llm(folder):
    return load(folder.path)


CASES = {
    "texts": (QUERY, TEXTS),
    "documents are images": (QUERY, PICTURES),
    "a text and an image": (QUERY, [TEXTS[0], PICTURES[1]]),
    "the query is an image": (PICTURES[0], [TEXTS[0], PICTURES[1]]),
}


@pytest.mark.parametrize("case", CASES)
def test_scores_equal_transformers(folder, llm, case):
    query, documents = CASES[case]
    found = [each.outputs.score for each in llm.score(query, documents, use_tqdm=False)]
    want = folder.scores(query, documents)
    assert found == pytest.approx(want, abs=1e-5)
    assert abs(want[0] - want[1]) > 1e-3


def test_images_share_cached_prefixes(folder, llm):
    """A document's pages are found again with another query; another image's are not."""
    llm.score(QUERY, PICTURES, use_tqdm=False)
    again = llm.score("Another query", PICTURES, use_tqdm=False)
    assert all(each.num_cached_tokens > 0 for each in again)
    want = folder.scores("Another query", PICTURES)
    assert [each.outputs.score for each in again] == pytest.approx(want, abs=1e-5)


def test_texts_cannot_create_control_tokens(folder):
    tokenizer = Tokenizer(folder.path)
    ids = scoring.ranked_tokens(tokenizer, scoring.IMAGE, "<|im_end|>")
    control = {tokenizer.encode(name, False)[0] for name in ("<|im_end|>", "<|image_pad|>")}
    assert not control & set(ids) and ids[-1] == 100
    (token,) = tokenizer.encode("<|image_pad|>", False)
    assert scoring.ranked_tokens(tokenizer, None, "a").count(token) == 1


def test_labels_and_refusals(folder, llm):
    prompt = scoring.ranked_tokens(llm.get_tokenizer(), QUERY, TEXTS[0])
    (found,) = llm.classify([prompt], use_tqdm=False)
    assert found.outputs.probs == pytest.approx(folder.scores(QUERY, TEXTS[:1]), abs=1e-5)
    with pytest.raises(InputError, match="no output head"):
        llm.generate("a", use_tqdm=False)
    assert PoolingConfig.from_folder(folder.path).is_reranker


def test_model_without_image_head_refuses_images(docs_5m):
    with pytest.raises(InputError, match="expected texts, found Image: this model ranks no images"):
        load(docs_5m).score(QUERY, PICTURES, use_tqdm=False)


def test_quantized_ranker_keeps_its_head(folder, tmp_path):
    target = tmp_path / "quantized"
    quantize_checkpoint(folder.path, target, scheme=Scheme.parse("w8a16-sym-g32"), progress=False)
    reader = CheckpointReader(target)
    for name in folder.state:
        if name.startswith(("score.", "visual.")):
            held = reader.entries.get(name) or reader.other_parts[name]
            assert torch.equal(held.read(), folder.state[name])
    report = inspect_checkpoint(target)
    assert not report.problems
    query, documents = CASES["a text and an image"]
    found = [each.outputs.score for each in load(target).score(query, documents, use_tqdm=False)]
    want = folder.scores(query, documents)
    assert found == pytest.approx(want, abs=0.05) and found != pytest.approx(want, abs=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_scores_equal_over_ranks(folder, ranks):
    llm = load(folder.path, **ranks)
    try:
        query, documents = CASES["a text and an image"]
        found = [each.outputs.score for each in llm.score(query, documents, use_tqdm=False)]
    finally:
        llm.close()
    assert found == pytest.approx(folder.scores(query, documents), abs=1e-5)


@pytest.mark.parametrize("wrong", ["offset", "first bias", "relu"])
def test_wrong_heads_give_other_scores(folder, wrong):
    llm = load(folder.path)
    head = llm.engine.runner.decoder.classifier
    if wrong == "offset":
        head.offset = 0.0
    elif wrong == "first bias":
        head.first_bias.zero_()
    else:
        head.first_weight.neg_()
    found = [each.outputs.score for each in llm.score(QUERY, TEXTS, use_tqdm=False)]
    assert found != pytest.approx(folder.scores(QUERY, TEXTS), abs=1e-3)


def data_url(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@pytest.fixture(scope="module")
def server(folder, llm):
    tokenizer, config = Tokenizer(folder.path), ServerConfig(served_model_name=["tiny"])
    found = Server(tokenizer, config)
    found.client = PoolingClient(tokenizer, llm)
    found.client.vocab_size = llm.engine.runner.decoder.config.vocab_size
    media = MediaAccess(MediaLimits(max_images=4))
    found.app = build_app(found.client, tokenizer, config, max_num_seqs=64, media=media)
    return found


URLS = list(map(data_url, PICTURES))
PART = {"type": "image_url", "image_url": {"url": URLS[1]}}


@pytest.mark.parametrize(
    "documents",
    [
        [TEXTS[0], PART],
        [{"text": TEXTS[0]}, {"image": URLS[1]}],
        {"content": [{"type": "text", "text": TEXTS[0]}, PART]},
        [TEXTS[0], {"content": [PART]}],
    ],
)
def test_rerank_with_images(folder, server, documents):
    reply = server.post("/rerank", {"query": QUERY, "documents": documents})
    assert reply.status_code == 200, reply.text
    want = folder.scores(QUERY, [TEXTS[0], PICTURES[1]])
    results = reply.json()["results"]
    found = {each["index"]: each["relevance_score"] for each in results}
    assert [found[0], found[1]] == pytest.approx(want, abs=1e-5)
    assert [each["index"] for each in results] == sorted((0, 1), key=lambda i: -want[i])
    shown = {each["index"]: each["document"] for each in results}
    assert shown == {0: {"text": TEXTS[0]}, 1: {"image": URLS[1]}}


def test_score_with_an_image_as_query(folder, server):
    body = {"text_1": {"image": URLS[0]}, "text_2": [TEXTS[0], {"image": URLS[1]}]}
    found = [each["score"] for each in server.post("/score", body).json()["data"]]
    want = folder.scores(PICTURES[0], [TEXTS[0], PICTURES[1]])
    assert found == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"query": "a", "documents": ["b"], "instruction": "c"}, "this reranker takes none"),
        ({"query": "a", "documents": [{"image": ""}]}, "expected a text that is not empty"),
        ({"query": {"content": ["a", "b"]}, "documents": ["c"]}, "expected one text or one image"),
        ({"query": "a", "documents": [{"title": "b"}]}, "expected a text, or an image as"),
        ({"query": "a", "documents": [{"image": "data:image/png;base64,AAAA"}]}, "image"),
    ],
)
def test_wrong_bodies_are_refused(server, body, words):
    reply = server.post("/rerank", body)
    assert reply.status_code == 400 and words in reply.json()["error"]["message"]
