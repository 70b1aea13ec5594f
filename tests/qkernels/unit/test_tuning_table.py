"""The table of measured configs: what is found, what is refused, and that all damage is named."""

import dataclasses
import json

import pytest
import torch

from formats.scheme import QuantSpec
from qkernels.attention.config import AttentionConfig
from qkernels.attention.tuned import TUNED as ATTENTION
from qkernels.errors import KernelError
from qkernels.tuning import table as tuning_table
from qkernels.tuning.op import bucket
from qkernels.tuning.table import TuningRow, TuningTable, default_path, read, write
from qkernels.w8a8.config import W8A8Sm90Config, W8A8TritonConfig, default_sm90_config
from qkernels.w8a8.tuned import TUNED as W8A8
from qkernels.wna16.sm90_gemv_imma_config import GemvImmaConfig
from qkernels.wna16.sm90_large_m_config import LARGE_M_SIZES, LargeMConfig
from qkernels.wna16.sm90_small_m_config import SmallMConfig
from qkernels.wna16.triton_config import TritonGemmConfig
from qkernels.wna16.tuned import TUNED as WNA16
from qkernels.wna16.variants import Shape, usable_config

GPU = "NVIDIA H200"
OPS = (WNA16, W8A8, ATTENTION)

LINEAR = {"N": 6144, "K": 4096, "group": 128, "bits": 4}
INT8 = {"N": 4096, "K": 14336, "integers": True}
HEADS = {
    "num_kv_heads": 8,
    "heads_per_kv_head": 4,
    "head_dim": 128,
    "element_size": 2,
    "window": None,
}


def linear_row(M=16, **changes):
    fields = {
        "op": WNA16,
        "problem": LINEAR | {"M": M},
        "config": TritonGemmConfig(block_m=16, block_n=64, split=6),
        "microseconds": 7.0,
        "default_microseconds": 8.25,
        "versions": "torch 1",
    }
    return TuningRow(**fields | changes)


@pytest.fixture
def table():
    table = TuningTable(gpu=GPU)
    table.add_(linear_row())
    table.add_(linear_row(M=512, config=None, default_microseconds=None))
    table.add_(
        linear_row(
            op=W8A8, problem=INT8 | {"M": 1}, config=W8A8TritonConfig(block_m=16, block_n=64)
        )
    )
    lengths = {"num_requests": 1, "max_query_len": 1, "max_context_len": 5000}
    config = AttentionConfig(block_m=16, block_q=4, keys=64, split=8, warps=4, stages=2)
    table.add_(linear_row(op=ATTENTION, problem=HEADS | lengths, config=config))
    return table


def read_all(path):
    """The table with the rows of every operation, which each reads when it first asks."""
    table = read(path, GPU)
    for op in OPS:
        table.read_rows_(op)
    return table


def test_rows_of_unused_operations_are_kept(table, tmp_path):
    """A run of --tune for one operation writes the file again."""
    path, again = tmp_path / "table.json", tmp_path / "again.json"
    write(table, path)
    partly = read(path, GPU)
    assert partly.find(W8A8, **INT8, M=1) and len(partly.rows) == 1
    write(partly, again)
    assert read_all(again).rows == table.rows


def test_invalid_rows_of_other_operations_are_ignored(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(damaged(lambda stored, row: row["config"].pop("block_m")))
    table = read(path, GPU)
    assert table.find(W8A8, **INT8, M=1) is None
    for _ in range(2):
        with pytest.raises(KernelError, match="block_m"):
            table.find(WNA16, **LINEAR, M=16)


def test_table_file_round_trips(table, tmp_path):
    path = tmp_path / "deep" / "table.json"
    write(table, path)
    assert read_all(path).rows == table.rows
    assert len(path.read_text().splitlines()) == len(table.rows) + 2, "a line for each row"
    assert not list(path.parent.glob("*.tmp"))


def test_missing_file_is_an_empty_table(tmp_path):
    empty = read(tmp_path / "none.json", GPU)
    assert empty.rows == {} and empty.find(WNA16, **LINEAR, M=1) is None
    (tmp_path / "file").write_text("")
    assert read(tmp_path / "file" / "below", GPU).rows == {}


@pytest.mark.parametrize(
    "M, found", [(1, False), (8, False), (9, True), (16, True), (17, False), (400, True)]
)
def test_rows_in_one_bucket_share_a_config(table, M, found):
    assert (table.find(WNA16, **LINEAR, M=M) is not None) == found


@pytest.mark.parametrize("field", LINEAR)
def test_config_of_other_product_is_not_found(table, field):
    other = LINEAR | {field: LINEAR[field] * 2}
    assert table.find(WNA16, **other, M=16) is None
    assert table.find(W8A8, **INT8, M=16) is None


def test_attention_config_is_found_by_lengths(table):
    lengths = {"num_requests": 1, "max_query_len": 1}
    assert table.find(ATTENTION, **HEADS, **lengths, max_context_len=8192)
    assert not table.find(ATTENTION, **HEADS, **lengths, max_context_len=8193)


def test_buckets_grow_with_rows():
    assert [bucket(n) for n in (1, 2, 3, 5, 16, 17, 64, 65)] == [1, 2, 4, 8, 16, 32, 64, 128]


def test_trial_row_is_removed_afterwards(table):
    before = dict(table.rows)
    other = linear_row(config=TritonGemmConfig(block_m=16, block_n=128, split=1))
    with pytest.raises(ZeroDivisionError), table.trying(other):
        assert table.find(WNA16, **LINEAR, M=9).config == other.config
        raise ZeroDivisionError
    assert table.rows == before


def test_file_is_named_by_the_gpu():
    assert default_path("NVIDIA A100-SXM4/80GB ").name == "NVIDIA-A100-SXM4-80GB.json"


def damaged(change):
    """The text of a table of one row that `change` has had."""
    row = {
        "op": "w4a16",
        "problem": LINEAR | {"M": 16},
        "config": tuning_table.config_to_dict(TritonGemmConfig(block_m=16, block_n=64, split=6)),
        "microseconds": 7.0,
        "default_microseconds": 8.0,
        "versions": "",
    }
    stored = {"format": tuning_table.FORMAT, "gpu": GPU, "rows": [row]}
    change(stored, row)
    return json.dumps(stored)


DAMAGE = {
    "another format": lambda s, row: s.update(format=1),
    "another GPU": lambda s, row: s.update(gpu="NVIDIA L4"),
    "no rows": lambda s, row: s.pop("rows"),
    "rows are no list": lambda s, row: s.update(rows=3),
    "a row is no object": lambda s, row: s.update(rows=["x"]),
    "no operation": lambda s, row: row.pop("op"),
    "no config": lambda s, row: row.pop("config"),
    "config is text": lambda s, row: row.update(config="small"),
    "another kernel's config": lambda s, row: row["config"].update(kind="W8A8TritonConfig"),
    "no kind": lambda s, row: row["config"].pop("kind"),
    "unknown field": lambda s, row: row["config"].update(colour=1),
    "missing field": lambda s, row: row["config"].pop("block_m"),
    "field of another type": lambda s, row: row["config"].update(split="2"),
    "a bool for a number": lambda s, row: row["config"].update(split=True),
    "problem lacks M": lambda s, row: row["problem"].pop("M"),
    "split overruns the workspace": lambda s, row: row["problem"].update(M=512),
    "split without steps": lambda s, row: row["config"].update(split=33),
    "block of 48": lambda s, row: row["config"].update(block_m=48),
    "block_n of 256": lambda s, row: row["config"].update(block_n=256),
    "time is text": lambda s, row: row.update(microseconds="fast"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_table_raises_one_error(tmp_path, name):
    path = tmp_path / "table.json"
    path.write_text(damaged(lambda stored, row: None))
    assert len(read_all(path).rows) == 1
    path.write_text(damaged(DAMAGE[name]))
    with pytest.raises(KernelError, match="table.json.*--tune"):
        read_all(path)


def test_rows_of_unknown_operation_are_kept(tmp_path):
    """Another version of the package may know it."""
    path = tmp_path / "table.json"
    path.write_text(damaged(lambda stored, row: row.update(op="w3a16")))
    table = read_all(path)
    assert not table.rows
    write(table, path)
    assert json.loads(path.read_text())["rows"][0]["op"] == "w3a16"


@pytest.mark.parametrize("text", ["", "{", "[]", '"a"', "\x00"])
def test_invalid_json_raises_one_error(tmp_path, text):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(KernelError, match="table.json.*--tune"):
        read(path, GPU)


def test_reduce_scatter_requires_resident_blocks():
    """Two blocks for each of 32 tiles; in the sum of the last arriver no block waits."""
    tile = W8A8Sm90Config(num_consumers=2, block_b=128, split=2, reduce_scatter=True)
    assert tile.fits(128, 4096, 64) and not tile.fits(128, 4096, 63)
    assert not tile.fits(129, 4096, 64)
    two = dataclasses.replace(tile, block_b=32, blocks_per_sm=2)
    assert two.fits(32, 4096, 32) and not two.fits(32, 4096, 31)
    assert dataclasses.replace(tile, reduce_scatter=False).fits(128, 4096, 1)


def test_sm90_kernel_uses_valid_table_config(monkeypatch):
    """It passes over splits that would wait for each other forever, and the other kernel's."""
    kernel = pytest.importorskip("qkernels.w8a8.sm90", exc_type=ImportError)
    portable = pytest.importorskip("qkernels.w8a8.triton_gemm", exc_type=ImportError)
    device = torch.device("cpu")
    N, K, M = 4096, 4096, 100
    reduce_scatter = W8A8Sm90Config(num_consumers=1, block_b=128, split=4, reduce_scatter=True)
    last_adds = dataclasses.replace(reduce_scatter, reduce_scatter=False)
    other = W8A8TritonConfig(block_m=128, block_n=128)

    def chosen(tile, sms=132, kind="int", integers=True):
        monkeypatch.setattr(kernel, "sm_count", lambda device: sms)
        problem = {"N": N, "K": K, "integers": integers, "M": 128}
        with tuning_table.tuning_table_of(device).trying(
            linear_row(op=W8A8, problem=problem, config=tile)
        ):
            return kernel._chosen_config(device, M, N, K, kind)

    default = default_sm90_config(M, N, K, 132)
    assert default not in (reduce_scatter, last_adds)
    assert chosen(last_adds) == last_adds and chosen(reduce_scatter, sms=256) == reduce_scatter
    assert chosen(reduce_scatter, sms=255) == default_sm90_config(M, N, K, 255)
    assert chosen(other) == default
    for integers in (True, False):
        found = chosen(last_adds, kind="blocks", integers=integers)
        assert found == default_sm90_config(M, N, K, 132, "blocks")
    with tuning_table.tuning_table_of(device).trying(
        linear_row(
            op=W8A8, problem={"N": N, "K": K, "integers": True, "M": 128}, config=reduce_scatter
        )
    ):
        assert isinstance(portable._chosen_config(device, M, N, K, True), W8A8TritonConfig)


INT8_DAMAGE = {
    "parts that are text": {"parts": "2"},
    "a field of the other kernel": {"warps": 4},
    "parts that no split is for": {"split": 5},
    "a reduce-scatter of one split": {"split": 1, "reduce_scatter": True},
    "a float sum's steps": {"promotion_steps": 2},
    "huge columns": {"block_b": 2**40},
    "no stages": {"max_stages": 0},
}


@pytest.mark.parametrize("name", INT8_DAMAGE)
def test_invalid_8_bit_configs_raise_one_error(tmp_path, name):
    path = tmp_path / "table.json"
    tile = W8A8Sm90Config(num_consumers=2, block_b=64, split=2)
    problem = {"N": 6144, "K": 4096, "integers": True, "M": 64}

    def write_tile(values):
        path.write_text(
            damaged(lambda s, row: row.update(op="w8a8", config=values, problem=problem))
        )

    write_tile(tuning_table.config_to_dict(tile))
    (row,) = read_all(path).rows.values()
    assert row.config == tile
    write_tile(tuning_table.config_to_dict(tile) | INT8_DAMAGE[name])
    with pytest.raises(KernelError, match="table.json.*--tune"):
        read_all(path)


def shape_of(sm_count, has_sm90):
    spec = QuantSpec(bits=4, symmetric=True, group_size=128)
    lacks = () if has_sm90 else (("sm_90", "written for sm_90"),)
    return Shape(N=6144, K=4096, spec=spec, sm_count=sm_count, lacks=lacks)


@pytest.mark.parametrize("sm_count", [4, 114, 132])
def test_large_m_table_config_uses_blocks_of_this_gpu(sm_count):
    """`blocks` of the file is ignored: splits that are not all resident would wait forever."""
    for parts, block_m in LARGE_M_SIZES:
        for split in (1, 2, 4):
            stored = LargeMConfig(blocks=10**6, num_consumers=parts, block_m=block_m, split=split)
            for M in (17, 64, 200, 512):
                tile, can_run = usable_config(stored, shape_of(sm_count, True), M)
                units = tile.tiles(M, 6144) * split
                assert tile.blocks == min(units, sm_count)
                assert can_run == (split == 1 or units <= sm_count)
                assert not usable_config(stored, shape_of(sm_count, False), M)[1]
    halves = LargeMConfig(blocks=1, block_m=256, tail_split=True)
    tile, can_run = usable_config(halves, shape_of(sm_count, True), 512)
    assert can_run and tile.blocks == min(2 * 48 * 2, sm_count)


def test_other_configs_of_a_table_are_unchanged():
    for tile in (None, TritonGemmConfig(block_m=16, block_n=64, split=6)):
        for gluon in (False, True):
            assert usable_config(tile, shape_of(132, gluon), 16) == (tile, True)
    limbs = GemvImmaConfig()
    assert usable_config(limbs, shape_of(132, True), 4) == (limbs, True)
    assert not usable_config(limbs, shape_of(132, False), 4)[1]
    assert not usable_config(SmallMConfig(block_m=8), shape_of(132, False), 8)[1]


HOPPER_DAMAGE = {
    "more parts than blocks": {"split": 4, "blocks": 100},
    "no blocks": {"blocks": 0},
    "a size there is none of": {"block_m": 192},
    "huge rows": {"block_m": 2**40},
    "halves of parts": {"block_m": 256, "split": 2, "tail_split": True},
    "parts that are text": {"num_consumers": "2"},
    "blocks that are no number": {"blocks": None},
    "an unknown field": {"stages": 99},
}


@pytest.mark.parametrize("name", HOPPER_DAMAGE)
def test_invalid_large_m_configs_raise_one_error(tmp_path, name):
    path = tmp_path / "table.json"
    tile = LargeMConfig(blocks=132, num_consumers=2, block_m=128, split=2)

    def write_tile(values):
        path.write_text(
            damaged(lambda s, row: row.update(config=values, problem=LINEAR | {"M": 128}))
        )

    write_tile(tuning_table.config_to_dict(tile))
    (row,) = read_all(path).rows.values()
    assert row.config == tile
    write_tile(tuning_table.config_to_dict(tile) | HOPPER_DAMAGE[name])
    with pytest.raises(KernelError, match="table.json.*--tune"):
        read_all(path)


def test_measured_times_of_product(table):
    assert [row.problem["M"] for row in table.measured(WNA16, **LINEAR)] == [16, 512]
    assert table.measured(WNA16, **LINEAR | {"K": 8192}) == []
    assert [row.op for row in table.measured(W8A8, **INT8)] == [W8A8]


def test_row_counts_as_used_after_lookup(table):
    row = linear_row()
    assert table.find(WNA16, **LINEAR, M=9) == row and row.key in table.taken
    with table.trying(row):
        assert row.key not in table.taken
        table.find(WNA16, **LINEAR, M=17)
        assert row.key not in table.taken
        table.find(WNA16, **LINEAR, M=16)
        assert row.key in table.taken


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_operation_has_its_fields(op):
    assert op.configs and set(op.exact).isdisjoint(op.bucketed)
    assert op.can_be_none == (op is WNA16)
    # classes are distinguished by name in the file
    assert len({cls.__name__ for cls in op.configs}) == len(op.configs)
