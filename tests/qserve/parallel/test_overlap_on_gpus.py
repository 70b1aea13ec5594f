"""Long prompts on two GPUs, whose sums are copied to the other GPU during the products."""

import subprocess
import sys

import pytest
import torch

from qkernels.collective.pair_sum import PairSum
from qserve.llm import LLM
from qserve.parallel.row_chunks import MIN_ROWS, row_chunks
from qserve.params.sampling_params import SamplingParams
from tests.conftest import make_tiny
from tests.qserve.parallel.test_on_gpus import EXIT_SECONDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
ROWS = 7003  # four chunks; the message is 28 MB, so the copies take about 75 us
WIDE = {
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 3,
    "max_position_embeddings": 8192,
    "vocab_size": 512,
}
LAYERS = WIDE["num_hidden_layers"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "wide"
    make_tiny(folder, "LlamaConfig", WIDE)
    return folder


@pytest.fixture
def started(wide):
    engines = []

    def make(**settings):
        engines.append(
            LLM(
                wide,
                device="cuda",
                dtype="bfloat16",
                tensor_parallel_size=2,
                max_num_seqs=4,
                num_gpu_blocks_override=1024,
                enforce_eager=True,
                **settings,
            )
        )
        return engines[-1]

    yield make
    for llm in engines:
        llm.close()


@pytest.fixture
def sent(monkeypatch):
    """The chunks that the leader has sent."""
    found, send = [], PairSum.send

    def noted(self, start, stop):
        found.append((start, stop))
        send(self, start, stop)

    monkeypatch.setattr(PairSum, "send", noted)
    return found


def logits(llm, overlaps, ids):
    llm.engine.workers.overlap_sums(overlaps)
    return llm.logits(ids).float()


IDS = [(7 * j + j // 50) % 500 + 3 for j in range(ROWS)]


@pytest.mark.parametrize("quantization", [None, "w4a16", "w8a8"])
def test_bits_equal_those_without_the_overlap(started, sent, quantization):
    """--batch-invariant: the bits of a product do not depend on the chunk either."""
    llm = started(batch_invariant=True, quantization=quantization)
    sent.clear()
    want = logits(llm, False, IDS)
    assert not sent
    for turn in range(6):  # ranks drift apart differently each time
        found = logits(llm, True, IDS)
        assert torch.equal(found, want), f"turn {turn}"
    assert sent == 6 * 2 * LAYERS * row_chunks(ROWS)


@pytest.mark.parametrize("quantization", [None, "w4a16", "w8a8"])
def test_logits_are_close_to_those_without_the_overlap(started, sent, quantization):
    llm = started(quantization=quantization)
    want = logits(llm, False, IDS)
    sent.clear()
    found = [logits(llm, True, IDS) for _ in range(6)]
    assert sent
    assert all(torch.equal(each, found[0]) for each in found)
    assert (found[0] - want).norm() / want.norm() < 0.02
    assert torch.isfinite(want).all()


def test_unsent_rows_change_the_logits(started, monkeypatch):
    """Otherwise the tests above would prove nothing. The leader sends no rows."""
    llm = started()
    want = logits(llm, True, IDS)
    monkeypatch.setattr(PairSum, "send", lambda self, start, stop: None)
    llm.logits(IDS[::-1])  # other rows in both phases of the other rank's buffer
    broken = logits(llm, True, IDS)
    # The other rank adds rows of earlier sums, and sends what it computes from them.
    assert (broken - want).norm() / want.norm() > 0.02


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_alternating_long_and_short_steps(started, sent, batch_invariant):
    """Decode steps and short prompts use the other all-reduces between the sums by copies."""
    llm = started(batch_invariant=batch_invariant)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    prompts = [IDS[:6000], IDS[:40], IDS[1000:5000], IDS[5:700]]
    answers = []
    for overlaps in (True, True, False):
        llm.engine.workers.overlap_sums(overlaps)
        llm.reset_prefix_cache()
        sent.clear()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([each.outputs[0].token_ids for each in outputs])
        assert bool(sent) == overlaps
    assert answers[0] == answers[1]
    if batch_invariant:  # otherwise products of chunks may run other kernels
        assert answers[0] == answers[2]


PROGRAM = """
import sys
from qserve import LLM, SamplingParams

def main():
    llm = LLM(sys.argv[1], device="cuda", dtype="bfloat16", max_num_seqs=4,
              num_gpu_blocks_override=1024, tensor_parallel_size=2)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    llm.generate([[3 + j % 500 for j in range(int(sys.argv[3]))]], params, use_tqdm=False)
    print("LEAVING", flush=True)
    if sys.argv[2] == "closed":
        llm.close()
    if sys.argv[2] == "error":
        raise ValueError("planted")

main()
print("LEFT", flush=True)
"""


@pytest.mark.parametrize("ending", ["closed", "collected", "error"])
def test_program_exits_after_sums_by_copies(ending, wide, tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(wide), ending, str(MIN_ROWS + 1000)]
    with open(tmp_path / "err", "w+") as errors:
        program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert program.stdout.readline() == "LEAVING\n", (tmp_path / "err").read_text()
            program.wait(timeout=EXIT_SECONDS)
            rest = program.stdout.read()
        finally:
            program.kill()
    assert (rest == "LEFT\n") == (ending != "error")
    assert (program.returncode == 0) == (ending != "error")
