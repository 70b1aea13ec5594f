"""--batch-invariant on a GPU: a request's bits are the same in any company."""

import pytest

from calibrate.pipeline import quantize_checkpoint
from formats.scheme import Scheme
from qserve.commands.check_invariance import InvarianceConfig, compare
from qserve.config import EngineConfig

pytestmark = pytest.mark.hopper

CONFIG = InvarianceConfig(num_requests=64, max_input_len=700, output_len=12)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("scheme", ["w4a16-sym", "w8a8", None])
def test_requests_have_the_same_bits_in_any_company(docs_5m, tmp_path, scheme, kv_cache_dtype):
    folder = docs_5m
    if scheme is not None:
        folder = tmp_path / "model"
        scheme = Scheme.parse(scheme)
        quantize_checkpoint(docs_5m, folder, scheme=scheme, recipe="rtn", progress=False)
    engine = EngineConfig(
        model=str(folder),
        dtype="bfloat16",
        max_model_len=1024,
        batch_invariant=True,
        kv_cache_dtype=kv_cache_dtype,
        gpu_memory_utilization=0.1,
        max_num_seqs=64,
    )
    assert [each for each in compare(engine, CONFIG) if each.bits_differ] == []
