"""The routes of vectors and scores, over a real engine of the bundled model in this process."""

import asyncio
import base64
import json
import shutil

import numpy as np
import openai
import pytest

from formats.errors import InputError
from qserve import LLM
from qserve.config import ServerConfig
from qserve.engine.ipc.client import RefusedError
from qserve.engine.token_event import TokenEvent
from qserve.server.app import build_app
from qserve.server.hosted_model import load_tokenizer
from qserve.text.tokenizer import Tokenizer
from tests.qserve.server.conftest import ScriptedClient, Server

TEXTS = ["A process is", "The standard library has it. " * 3, "x"]


class PoolingClient(ScriptedClient):
    """An engine without a process: it runs a step whenever a caller waits."""

    def __init__(self, tokenizer, llm):
        super().__init__(tokenizer)
        self.engine = llm.engine
        self.events = {}

    async def generate(
        self, request_id, prompt_token_ids, params, watch, client, *, group, options
    ):
        self.request_options.append(options)
        try:
            self.engine.add_request(request_id, prompt_token_ids, params, options=options)
        except InputError as error:
            raise RefusedError(error.subject, error.problem, error.remedy) from error
        while request_id not in self.events:
            self.events |= {event.request_id: event for event in self.engine.step()}
            await asyncio.sleep(0)
        watch(self.events[request_id])
        yield self.events.pop(request_id)


@pytest.fixture(scope="module")
def make(docs_5m, tmp_path_factory):
    """make(files, **config) -> a server of the bundled model with such files, and its LLM."""

    def start(files, **stated):
        folder = tmp_path_factory.mktemp("embedder") / "model"
        shutil.copytree(docs_5m, folder)
        config = json.loads((folder / "config.json").read_text()) | stated
        for name, value in {**files, "config.json": config}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(value))
        llm = LLM(folder, device="cpu", dtype="float32", max_num_batched_tokens=32, max_num_seqs=4)
        tokenizer = Tokenizer(folder)
        server = Server(tokenizer, ServerConfig(served_model_name=["tiny"]))
        server.client = PoolingClient(tokenizer, llm)
        config = ServerConfig(served_model_name=["tiny"])
        server.app = build_app(server.client, tokenizer, config, max_num_seqs=64)
        return server, llm

    return start


@pytest.fixture(scope="module")
def embedder(make):
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [{"type": f"sentence_transformers.models.{k}", "path": path} for k, path in kinds]
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
        "config_sentence_transformers.json": {"prompts": {"query": "Query: "}},
    }
    return make(files, matryoshka_dimensions=[64])


@pytest.fixture(scope="module")
def expected(embedder):
    return [each.outputs.embedding for each in embedder[1].embed(TEXTS, use_tqdm=False)]


def test_openai_client_gets_vectors_in_order(embedder, expected, run_live):
    server, llm = embedder
    port = run_live(server)
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k") as client:
        packed = client.embeddings.create(model="tiny", input=TEXTS)  # the client asks for base64
        plain = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
        short = client.embeddings.create(model="tiny", input="x", dimensions=64)
    for reply in (packed, plain):
        assert [each.index for each in reply.data] == [0, 1, 2]
        np.testing.assert_allclose([each.embedding for each in reply.data], expected, atol=1e-6)
        count = sum(len(llm.get_tokenizer().encode(text)) for text in TEXTS)
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == count
    assert len(short.data[0].embedding) == 64
    assert np.linalg.norm(short.data[0].embedding) == pytest.approx(1, abs=1e-6)


def test_token_ids_base64_and_prompt_names(embedder, expected):
    server, llm = embedder
    ids = [llm.get_tokenizer().encode(text) for text in TEXTS]
    reply = server.post("/v1/embeddings", {"input": ids, "encoding_format": "base64"}).json()
    for each, vector in zip(reply["data"], expected, strict=True):
        found = np.frombuffer(base64.b64decode(each["embedding"]), "<f4")
        np.testing.assert_allclose(found, vector, atol=1e-6)
    assert reply["object"] == "list" and reply["model"] == "tiny"
    named = server.post("/v1/embeddings", {"input": "a", "prompt_name": "query", "user": "u"})
    whole = server.post("/v1/embeddings", {"input": "Query: a"})
    assert named.json()["data"] == whole.json()["data"]
    assert named.headers["x-ignored-fields"] == "user"


def test_long_inputs_are_refused_or_cut(embedder, error):
    server, _ = embedder
    ids = [5] * 300
    body = error(server.post("/v1/embeddings", {"input": ids}), 400)
    assert "256 tokens" in body["message"] and "300" in body["message"]
    cut = server.post("/v1/embeddings", {"input": ids, "truncate_prompt_tokens": 9}).json()
    assert cut["usage"]["prompt_tokens"] == 9
    most = server.post("/v1/embeddings", {"input": ids, "truncate_prompt_tokens": -1}).json()
    # All of max_position_embeddings: the vector has no output after it.
    assert most["usage"]["prompt_tokens"] == 256
    (whole,) = server.post("/v1/embeddings", {"input": ids[:256]}).json()["data"]
    assert most["data"][0]["embedding"] == whole["embedding"]
    text = "x " * 300
    body = error(server.post("/v2/embed", {"texts": [text], "truncate": "NONE"}), 400)
    assert body["message"].endswith("Shorten it, or set truncate.")
    cut = server.post("/v2/embed", {"texts": [text]}).json()
    assert cut["meta"]["billed_units"] == {"input_tokens": 256}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [["a"]]}, "input"),
        ({"input": [8192]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "prompt_name": "passage"}, "prompt_name"),
        ({"input": "a", "messages": [{}]}, "messages.0.role"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({}, "input"),
    ],
)
def test_invalid_embedding_inputs_are_refused(embedder, error, fields, param):
    assert error(embedder[0].post("/v1/embeddings", fields), 400)["param"] == param


@pytest.mark.parametrize(
    ("field", "refused", "neutral"),
    [
        ("embed_dtype", "float16", "float32"),
        ("endianness", "big", "little"),
        ("truncation_side", "left", "right"),
        ("chat_template_kwargs", {"a": 1}, {}),
        ("softmax", False, True),
        # of Jina's and Voyage's APIs
        ("embedding_type", "binary", "float"),
        ("late_chunking", True, False),
        ("normalized", False, None),
        ("task", "retrieval.query", None),
        ("input_type", "query", None),
        ("output_dimension", 64, None),
        ("output_dtype", "int8", "float"),
    ],
)
def test_fields_of_other_apis_that_change_embeddings_are_refused(
    embedder, error, field, refused, neutral
):
    server, _ = embedder
    found = error(server.post("/v1/embeddings", {"input": "a", field: refused}), 400)
    assert found["message"].startswith(f"{field} is not supported by this server; ")
    assert server.post("/v1/embeddings", {"input": "a", field: neutral}).status_code == 200


def test_token_embeddings(embedder):
    server, llm = embedder
    reply = server.post("/pooling", {"input": TEXTS[0], "task": "token_embed"}).json()
    (want,) = llm.encode(TEXTS[0], use_tqdm=False)
    np.testing.assert_allclose(reply["data"][0]["data"], want.outputs.data, atol=1e-6)
    metrics = server.get("/metrics").text
    (count,) = (line for line in metrics.splitlines() if "prompt_tokens_total{" in line)
    assert float(count.split()[-1]) >= len(llm.get_tokenizer().encode(TEXTS[0]))
    for path, more in (("/pooling", {"task": "classify"}), ("/classify", {})):
        refused = server.post(path, {"input": "a"} | more)
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert message.startswith("request: asks for class scores, but this model's checkpoint")


def test_messages_equal_chat_tokens(embedder):
    server, llm = embedder
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    ids = llm.get_tokenizer().encode_chat(messages, add_generation_prompt=False)
    for path in ("/v1/embeddings", "/pooling"):
        found = server.post(path, {"messages": messages}).json()
        want = server.post(path, {"input": ids}).json()
        assert found["data"] == want["data"] and found["usage"] == want["usage"]
    longer = server.post("/pooling", {"messages": messages, "add_generation_prompt": True}).json()
    assert longer["usage"]["prompt_tokens"] > len(ids)


def test_cohere_route(embedder, expected):
    server, llm = embedder
    kinds = ["float", "base64", "binary", "ubinary"]
    body = {"model": "tiny", "texts": TEXTS, "input_type": "classification"}
    reply = server.post("/v2/embed", body | {"embedding_types": kinds})
    found = reply.json()["embeddings"]
    np.testing.assert_allclose(found["float"], expected, atol=1e-6)
    packed = [np.frombuffer(base64.b64decode(each), "<f4") for each in found["base64"]]
    np.testing.assert_allclose(packed, expected, atol=1e-6)
    bits = [[int(number > 0) for number in vector] for vector in expected]
    for packed, bits_of_one in zip(found["ubinary"], bits, strict=True):
        assert packed == [
            int("".join(map(str, bits_of_one[i : i + 8])), 2) for i in range(0, len(bits_of_one), 8)
        ]
    assert found["binary"] == [[byte - 128 for byte in each] for each in found["ubinary"]]
    assert reply.headers["x-ignored-fields"] == "input_type"
    assert reply.json()["texts"] == TEXTS and reply.json()["response_type"] == "embeddings_by_type"
    count = sum(len(llm.get_tokenizer().encode(text)) for text in TEXTS)
    assert reply.json()["meta"]["billed_units"] == {"input_tokens": count}


def test_cohere_inputs_prompts_and_lengths(embedder):
    server, llm = embedder

    def vectors(**body):
        return server.post("/v2/embed", body).json()["embeddings"]["float"]

    def embedded(text, **fields):
        return server.post("/v1/embeddings", {"input": text, **fields}).json()["data"][0][
            "embedding"
        ]

    part = {"type": "text", "text": "a"}
    assert vectors(inputs=[{"content": [part]}], input_type="search_query") == [
        embedded("a", prompt_name="query")
    ]
    assert vectors(texts=["a"], input_type="search_document") == [embedded("a")]
    assert vectors(texts=["a"], output_dimension=64) == [embedded("a", dimensions=64)]
    tokens = llm.get_tokenizer().encode(TEXTS[1])
    assert vectors(texts=[TEXTS[1]], max_tokens=5) == [embedded(tokens[:5])]
    assert vectors(texts=[TEXTS[1]], max_tokens=5, truncate="START") == [embedded(tokens[-5:])]


def test_classify_returns_labels(make):
    """The engine of a classifier is test_pooling.py's; here its logits are a script."""
    server, _ = make({}, id2label={"0": "bad", "1": "good", "10": "odd"})
    logits = np.array([0.5, 2.0, -1.0], "<f4")

    async def generate(request_id, prompt, params, watch, client, *, group, options):
        assert options.pooling.kind == "labels"
        yield TokenEvent(
            request_id=request_id, token_ids=(), finish_reason="stop", pooled=logits.tobytes()
        )

    server.client.generate = generate
    raised = np.exp(logits.astype(float))
    for path in ("/classify", "/v1/classify"):
        for body in ({"input": ["a", "b"]}, {"messages": [{"role": "user", "content": "a"}]}):
            reply = server.post(path, body).json()
            assert len(reply["data"]) == len(body.get("input", "a"))
            for index, each in enumerate(reply["data"]):
                assert (each["index"], each["label"], each["num_classes"]) == (index, "good", 3)
                assert each["probs"] == pytest.approx(raised / raised.sum())


@pytest.mark.parametrize(
    "names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_score_field_aliases(embedder, names):
    server, _ = embedder
    want = server.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS}).json()["data"]
    assert server.post("/score", {names[0]: TEXTS[0], names[1]: TEXTS}).json()["data"] == want


def test_documents_are_truncated_to_limit(embedder):
    server, llm = embedder
    tokenizer = llm.get_tokenizer()
    short = tokenizer.decode(tokenizer.encode(TEXTS[1], False)[:4])
    assert short != TEXTS[1]
    body = {"query": TEXTS[1], "documents": [TEXTS[1]], "return_documents": False}
    cut = server.post("/rerank", body | {"max_tokens_per_doc": 4}).json()
    want = server.post("/rerank", body | {"documents": [short]}).json()
    assert cut["results"] == want["results"] and cut["usage"] == want["usage"]
    assert (
        server.post("/rerank", body | {"max_tokens_per_doc": 0}).json()["results"] != cut["results"]
    )
    sides = {"queries": TEXTS[1], "documents": TEXTS[1], "max_tokens_per_doc": 4}
    score = server.post("/score", sides).json()["data"][0]["score"]
    assert score == pytest.approx(cut["results"][0]["relevance_score"])


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_are_cosines(embedder, expected, path):
    reply = embedder[0].post(path, {"text_1": TEXTS[0], "text_2": TEXTS}).json()
    found = [each["score"] for each in reply["data"]]
    assert found == pytest.approx([float(np.dot(expected[0], each)) for each in expected])
    assert found[0] == pytest.approx(1)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_ranking_puts_the_best_first(embedder, path):
    server, _ = embedder
    body = {"query": TEXTS[2], "documents": [TEXTS[0], {"text": TEXTS[2]}, TEXTS[1]]}
    results = server.post(path, body).json()["results"]
    scores = [each["relevance_score"] for each in results]
    assert scores == sorted(scores, reverse=True)
    assert results[0]["index"] == 1 and results[0]["document"] == {"text": TEXTS[2]}
    best = server.post(path, {**body, "top_n": 1, "return_documents": False}).json()["results"]
    assert [each["index"] for each in best] == [1] and "document" not in best[0]


def test_reranker_whose_words_are_no_tokens_is_refused_at_the_start(docs_5m, tmp_path):
    for word in ("is", "yes"):
        folder = shutil.copytree(docs_5m, tmp_path / word)
        stated = json.loads((folder / "config.json").read_text())
        stated["classifier_from_token"] = ["no", word]
        (folder / "config.json").write_text(json.dumps(stated))
    load_tokenizer(str(tmp_path / "is"), None)
    with pytest.raises(
        InputError, match=r"yes/config\.json classifier_from_token: .* 'yes', which"
    ):
        load_tokenizer(str(tmp_path / "yes"), None)


def test_reranker_answers_with_probabilities(make, error):
    server, llm = make({}, classifier_from_token=["no", "is"])
    body = {"query": "q", "documents": ["first", "second"], "instruction": "Judge"}
    results = server.post("/rerank", body).json()["results"]
    want = llm.score("q", ["first", "second"], use_tqdm=False, instruction="Judge")
    scores = [each.outputs.score for each in want]
    assert {each["index"]: each["relevance_score"] for each in results} == pytest.approx(
        dict(enumerate(scores))
    )
    assert "modules.json" in error(server.post("/v1/embeddings", {"input": "a"}), 404)["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "x"}, "instruction"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"queries": "a", "data_2": "b"}, "documents"),
        ("/score", {"queries": "a", "documents": []}, "documents"),
        ("/score", {"data_1": [], "data_2": "b"}, "data_1"),
        ("/score", {}, "text_1"),
        ("/score", {"queries": "a", "documents": "b", "text_1": "a", "text_2": "b"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": "b", "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ("/v2/embed", {"texts": []}, "texts"),
        ("/v2/embed", {"texts": ["a"], "inputs": [{"content": []}]}, "texts"),
        ("/v2/embed", {"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types.0"),
        ("/v2/embed", {"texts": ["a"], "images": ["x"]}, "images"),
        ("/v2/embed", {"texts": ["a b c d"], "max_tokens": 1, "truncate": "NONE"}, "max_tokens"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents.0"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ],
)
def test_invalid_score_pairs_are_refused(embedder, error, path, body, param):
    assert error(embedder[0].post(path, body), 400)["param"] == param
