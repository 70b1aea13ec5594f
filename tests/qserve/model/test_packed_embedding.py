"""Packed input embeddings: read, inspected, converted and served. transformers is the judge."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.codecs import compressed_tensors
from formats.codecs.compressed_config import write
from formats.convert import convert_checkpoint
from formats.errors import CheckpointError
from formats.in_memory.slices import take_outputs
from formats.in_memory.weights import round_to_nearest
from formats.inspection.inspect import inspect_checkpoint
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme
from qserve import LLM
from qserve.model.blocks.embedding import Embedding, PackedTable, VocabularyPart
from tests.qserve.model.variants import TOKENS, edited, logits, relative
from tests.qserve.parallel.in_threads import run_ranks

EMBEDDING = "model.embed_tokens"


@pytest.fixture(scope="module")
def quantized(tiny_model, tmp_path_factory):
    """Tied -> the tiny Llama with linears of 8 bits, as compressed-tensors."""
    made = {}

    def make(tied: bool):
        if tied not in made:
            source = tiny_model("llama")
            folder = tmp_path_factory.mktemp("quantized")
            if tied:

                def drop_head(tensors):
                    del tensors["lm_head.weight"]
                    tensors[f"{EMBEDDING}.weight"] /= 16

                def tie(config):
                    config["tie_word_embeddings"] = True

                source = edited(source, folder / "tied", drop_head, tie)
            made[tied] = folder / "quantized"
            quantize_checkpoint(
                source,
                made[tied],
                scheme=Scheme.parse("w8a16-sym-g32"),
                output_format="compressed-tensors",
                progress=False,
            )
        return made[tied]

    return make


def with_packed_embedding(source, target, scheme: str, targets: list[str]):
    """Return a copy whose embedding is packed, and the table that its codes mean."""
    spec = Scheme.parse(scheme).weight
    table = load_file(source / "model.safetensors")[f"{EMBEDDING}.weight"]
    weight = round_to_nearest(table, spec)

    def pack(tensors):
        del tensors[f"{EMBEDDING}.weight"]
        for field, tensor in compressed_tensors.encode(weight).items():
            tensors[f"{EMBEDDING}.{field}"] = tensor

    def name(config):
        block = QuantConfig.of_modules(
            "compressed-tensors", {"model.layers.0.mlp.up_proj": Scheme(weight=spec)}
        ).to_dict()
        config[BLOCK]["config_groups"]["group_1"] = {
            **block["config_groups"]["group_0"],
            "targets": targets,
        }

    return edited(source, target, pack, name), weight.dequantize()


def with_dense_embedding(source, target, table):
    return edited(source, target, lambda t: t.update({f"{EMBEDDING}.weight": table}))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("targets", [["Embedding"], ["re:.*embed_tokens$"], [EMBEDDING]])
def test_logits_equal_transformers(quantized, tmp_path, tied, targets):
    """transformers 5.23 itself reads no packed embedding: the library decompresses the table."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    library = pytest.importorskip("compressed_tensors")
    source = quantized(tied)
    folder, _ = with_packed_embedding(source, tmp_path / "packed", "w4a16-sym-g32", targets)
    block = json.loads((folder / "config.json").read_text())[BLOCK]
    theirs = library.QuantizationConfig.model_validate(block)
    reader = CheckpointReader(folder)
    codes = {field: reader.get(f"{EMBEDDING}.{field}") for field in reader.children(EMBEDDING)}
    codes["weight_scale"] = codes["weight_scale"].float()
    compressor = compressors.BaseCompressor.get_value_from_registry("pack-quantized")
    table = compressor.decompress(codes, theirs.config_groups["group_1"])["weight"]
    dense = with_dense_embedding(source, tmp_path / "dense", table)
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), expected) < 1e-4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "scheme", ["w4a16-sym-g32", "w3a16-asym-g32", "w8a16-asym-channel", "w8a16-fp8", "w4a16-mxfp4"]
)
def test_rows_equal_dequantized_table(quantized, tmp_path, scheme, tied):
    source = quantized(tied)
    folder, table = with_packed_embedding(source, tmp_path / "packed", scheme, ["Embedding"])
    assert not [p for p in inspect_checkpoint(folder).problems if p.severity == "error"]
    dense = with_dense_embedding(source, tmp_path / "dense", table)
    assert relative(logits(folder), logits(dense)) < 1e-5


@pytest.mark.parametrize("scheme", ["w4a16-sym-g32", "w8a8-fp8-block"])
def test_ranks_with_parts_of_the_table_give_the_whole_rows(scheme):
    table = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    weight = round_to_nearest(table, Scheme.parse(scheme).weight)
    shards, ids = ((0, 70), (70, 200)), torch.tensor([0, 69, 70, 199, 5, 5])

    def embed(communicator):
        part = VocabularyPart(communicator=communicator, shards=shards)
        own = take_outputs(weight, (shards[communicator.rank],))
        return Embedding(PackedTable(own, torch.float32), 2.0, part)(ids, torch.arange(6))

    expected = 2 * weight.dequantize()[ids]
    for rows in run_ranks(2, embed):
        assert torch.equal(rows, expected)
    assert torch.equal(
        Embedding(PackedTable(weight, torch.float32), 2.0)(ids, torch.arange(6)), expected
    )


def test_table_stays_packed(quantized, tmp_path):
    folder, _ = with_packed_embedding(
        quantized(False), tmp_path / "p", "w4a16-sym-g32", ["Embedding"]
    )
    decoder = LLM(folder, device="cpu", max_model_len=64).engine.runner.decoder
    assert isinstance(decoder.embedding.packed, PackedTable) and decoder.embedding.weight is None


def test_convert_keeps_it_or_names_it(quantized, tmp_path):
    folder, _ = with_packed_embedding(
        quantized(False), tmp_path / "p", "w8a16-sym-g32", ["re:.*embed_tokens$"]
    )
    convert_checkpoint(folder, tmp_path / "same", "compressed-tensors")
    assert inspect_checkpoint(tmp_path / "same").ok
    assert torch.equal(logits(tmp_path / "same"), logits(folder))
    (group,) = json.loads((tmp_path / "same" / "config.json").read_text())[BLOCK][
        "config_groups"
    ].values()
    assert group["targets"] == ["Linear", EMBEDDING]
    with pytest.raises(CheckpointError, match="model.embed_tokens: is a packed input embedding"):
        convert_checkpoint(folder, tmp_path / "gptq", "gptq")


def test_packed_embedding_of_another_format_is_named(quantized, tmp_path):
    """No format but compressed-tensors has packed embeddings that any server reads."""
    folder, _ = with_packed_embedding(
        quantized(False), tmp_path / "p", "w8a16-sym-g32", [EMBEDDING]
    )
    reader = CheckpointReader(folder)
    words = reader.get(f"{EMBEDDING}.weight_packed")
    convert_checkpoint(quantized(False), tmp_path / "gptq", "gptq")

    def pack(tensors):
        del tensors[f"{EMBEDDING}.weight"]
        tensors[f"{EMBEDDING}.qweight"] = words.T.contiguous()

    gptq = edited(tmp_path / "gptq", tmp_path / "broken", pack)
    problem = "is a packed input embedding, which is read from compressed-tensors alone, not gptq"
    assert problem in "; ".join(str(each) for each in inspect_checkpoint(gptq).problems)
    with pytest.raises(CheckpointError, match=f"{EMBEDDING}: {problem}"):
        logits(gptq)


def test_linears_of_all_names_are_not_the_embedding(quantized):
    """ "Linear" means no embedding, so a float one needs no entry."""
    config = QuantConfig.from_dict(CheckpointReader(quantized(False)).config[BLOCK])
    assert config.scheme_for(EMBEDDING) is None
    assert write(config) == CheckpointReader(quantized(False)).config[BLOCK]
