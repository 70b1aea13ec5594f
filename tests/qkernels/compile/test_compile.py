"""Each card's kernels compile, fit on it and keep their sums in registers; no GPU is needed.

With --exhaustive a few cases of each card are compiled, and every fifth case of sm_90, which has
separate kernels; with --exhaustive-part, the cases of sm_90 in turn and those of one other card;
with --all-cards, all.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.qkernels.compile import sass
from tests.qkernels.compile.cards import CARDS
from tests.qkernels.compile.cases.table import CASES

ROOT = Path(__file__).resolve().parents[3]
# A process of its own each, which starts in seconds; what cases share is compiled and dumped once.
CASES_OF_ITEM = 40
EXHAUSTIVE_CARD, EXHAUSTIVE_CASES = "sm_90", tuple(CASES)[::5]  # the others take minutes
REGISTERS_OF_SM = 65536

# The loading warps of sm90_prefill keep 24 registers each and spill; of the loops that multiply,
# only those with masks may, and little. Over 8-bit pages they have fewer registers, and with a soft
# cap as well triton 3.9 spills 20 of them in each masked loop.
PREFILL_LOOP_SPILLS = {168: 24, 128: 128}
# (cards, how the kernel's name begins, how the case's does, spill stores at most, spills in the
# innermost loops around products at most); everything else spills nothing
SPILLS = (
    # triton 3.9; by that of 3.6 it spills none
    (("sm_90",), "wna16.sm90_gemv_imma", "w4a16-sym of adapters M=4", 16, 0),
    # before and after the loop; spills in the loop at 64 rows are those without adapters, and one
    (("sm_90",), "wna16.sm90_small_m", "w4a16-sym of adapters M=32", 40, 2),
    (("sm_90",), "wna16.sm90_small_m", "w4a16-asym of adapters M=16", 12, 3),
    (("sm_90",), "wna16.sm90_small_m", "w4a16-asym of adapters M=64", 96, 7),
    # ptxas of triton 3.9 would rather spill a little than lose the fourth block of an SM
    (("sm_90",), "wna16.sm90_gemv_imma", "", 4, 0),
    # two blocks on an SM leave 104 registers, 64 of them for sums
    (("sm_90",), "wna16.sm90_small_m", "w4a16 M=64", 32, 8),
    (("sm_90",), "wna16.sm90_small_m", "w4a16-asym M=64", 32, 8),
    # the total of the segments before, which waits while the next one is multiplied
    (("sm_90",), "wna16.sm90_large_m", "w4a16 fixed order", 80, 16),
    # outside of the loop, by ptxas of triton 3.9; that of 3.6 spills none
    (("sm_90",), "w4a8.sm90", "multiples of w4a8-g64 M=32", 12, 0),
    # addresses, after the loop, by ptxas of triton 3.9; that of 3.6 spills none
    (("sm_90",), "wna16.sm90_small_m", "w4a16 for a ", 12, 0),
    (("sm_90",), "wna16.sm90_small_m", "q4_k for a norm", 12, 0),
    # of the next inputs, which are loaded before these are multiplied
    (("sm_80",), "lora.triton_lora", "lora gate_up", 12, 0),
    (("sm_89",), "lora.triton_lora", "", 2, 0),
    # blocks were chosen for sm_90, whose products read one operand from shared memory
    (("sm_80", "sm_89", "sm_100", "sm_120"), "attention.triton_paged", "", 64, 0),
    (("sm_100", "sm_120"), "w8a8.triton_gemm", "", 16, 0),
    (("sm_100", "sm_120"), "w4a8.triton_gemm", "", 16, 0),
    # weights are scaled before the product; the plan's tiles were chosen for scaled sums
    (("sm_80", "sm_89", "sm_120"), "moe.triton_packed", "experts q", 96, 0),
    (("sm_80", "sm_89", "sm_100", "sm_120"), "moe.triton_packed", "", 16, 0),
    (("sm_100",), "rowwise.activate", "silu and quantize", 2, 0),
    (("sm_100", "sm_120"), "rowwise.activate", "gelu and quantize", 2, 0),
    # the addresses of seven slots, once for each tile
    (
        ("sm_80", "sm_89", "sm_120"),
        "collective.one_shot",
        "all-reduce of 8, one shot, float32",
        *(4, 0),
    ),
    # heads of more than 64 take 255 registers of the one warp; by ptxas of triton 3.6 it spills 6
    (("sm_90",), "attention.fixed_order.sm90_segments", "fixed order, decode", 64, 64),
    # one number, by ptxas of triton 3.6; that of 3.9 spills none
    (("sm_90",), "collective.one_shot_norm", "norm of ", 1, 0),
    # a row of 16384 channels leaves 64 registers a thread
    (("sm_120",), "collective.one_shot_norm", "norm over 2 ranks, widest", 2, 0),
    # around the loops, and by ptxas of triton 3.6 few numbers for the keys after the last
    (("sm_90",), "latent.sm90_decode", "latent sm90_decode, 16 rows of 128", 16, 3),
    (("sm_90",), "latent.sm90_decode", "latent sm90_decode, a chunk", 16, 3),
    (("sm_90",), "latent.sm90_decode", "latent sm90_decode, drafts", 16, 3),
    # after the loop, where splits store their sums
    (("sm_90", "sm_100"), "latent.triton_latent", "latent attention, decode of ", 16, 0),
    (("sm_90", "sm_100", "sm_120"), "latent.triton_latent", "wide latents, decode", 16, 0),
    # by ptxas of triton 3.9
    (("sm_90",), "latent.triton_latent", "latent attention, 20 heads", 32, 16),
    # outside of the loops around products, by ptxas of triton 3.9; that of 3.6 spills 5
    (
        ("sm_90",),
        "attention.fixed_order.triton_segments",
        "fixed order over 8 bits, chunk",
        *(40, 0),
    ),
    # sums of the segment and of those after it, over all channels
    (tuple(CARDS), "attention.fixed_order.triton_segments", "", 16, 16),
    (tuple(CARDS), "latent.fixed_order.triton_segments", "", 64, 64),
    # a product of float32 is three of tf32, with parts of both operands in registers
    (tuple(CARDS), "delta_net.triton_chunks", "delta net, prompts in float32", 128, 192),
    (tuple(CARDS), "delta_net.triton_chunks", "delta net, prompts in float16", 8, 0),
    # no model has such heads
    (tuple(CARDS), "delta_net.triton_chunks", "delta net, heads of 256", 16, 0),
    (tuple(CARDS), "mamba2.triton_scan", "mamba2, prompts in float32", 64, 28),
    (("sm_90", "sm_100"), "mamba2.triton_scan", "mamba2, states of 256", 2, 0),
    (("sm_120",), "mamba2.triton_scan", "mamba2, a prompt", 4, 0),
    # on sm_90 by ptxas of triton 3.6
    (("sm_90", "sm_120"), "mamba2.triton_scan", "lightning attention, a prompt", 4, 0),
    (("sm_80",), "latent.triton_latent", "latent attention in float32", 12, 0),
    # where few groups are read again, with bias, mask, penalties and all filters in one kernel
    (tuple(CARDS), "sampling.triton_sample", "", 24, 0),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "names" not in metafunc.fixturenames:
        return
    items = []
    option = metafunc.config.getoption
    whole = {card: tuple(CASES) for card in CARDS} if option("--all-cards") else {}
    if option("--exhaustive") or option("--exhaustive-part"):
        whole.setdefault(EXHAUSTIVE_CARD, EXHAUSTIVE_CASES)
    number, count = map(int, (option("--exhaustive-part") or "0/1").split("/"))
    others = [card for card in CARDS if card != EXHAUSTIVE_CARD]
    for card, of_card in CARDS.items():
        names = [
            name
            for name, case in CASES.items()
            if case.least <= of_card.arch and (name in whole.get(card, ()) or card in case.quick)
        ]
        if card == EXHAUSTIVE_CARD:
            names = names[number::count]
        elif card not in others[number::count]:
            continue
        for first in range(0, len(names), CASES_OF_ITEM):
            of_item = names[first : first + CASES_OF_ITEM]
            items.append(pytest.param(card, of_item, id=f"{card} {1 + first // CASES_OF_ITEM}"))
    metafunc.parametrize("card, names", items)


def compiled(card: str, names: list[str], cache: Path) -> list[dict]:
    """Return the facts that compile_cases.py prints for each kernel."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.qkernels.compile.compile_cases", card, *names]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    print(result.stdout)
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.exhaustive(every_part=True)  # a minute of one core
def test_compiled_kernels_fit_card_without_spills(card, names, pytestconfig):
    found = compiled(card, names, pytestconfig.cache.mkdir("triton"))
    for name in names:
        kernels = [kernel for kernel in found if kernel["case"] == name]
        assert kernels, f"{name} launched nothing"
        for kernel in kernels:
            check_fits(card, kernel)
            check_spills(card, kernel)
            check_exchange(kernel)
            if card == "sm_90":
                check_sm90(kernel)
        product = CASES[name].product
        if product is not None:
            uses = "wgmma" if (card, product) == ("sm_90", "wgmma") else "tensor_core"
            assert any(kernel[uses] for kernel in kernels), f"{name}: no {uses} in {kernels}"


def check_fits(card: str, kernel: dict) -> None:
    assert kernel["shared"] <= CARDS[card].shared_kb * 1024, kernel
    if kernel["max_registers"] is not None:
        assert kernel.get("registers", 0) <= kernel["max_registers"], kernel


def check_spills(card: str, kernel: dict) -> None:
    if kernel["kernel"].startswith("attention.sm90_prefill."):
        most = PREFILL_LOOP_SPILLS[kernel["max_registers"]]
        assert kernel.get("loop_spills", 0) <= most, kernel
        return
    allowed = (
        (stores, in_loops)
        for cards, module, case, stores, in_loops in SPILLS
        if card in cards and kernel["kernel"].startswith(module) and kernel["case"].startswith(case)
    )
    stores, in_loops = next(allowed, (0, 0))
    assert kernel.get("spill_stores", 0) <= stores, kernel
    assert kernel.get("loop_spills", 0) <= in_loops, kernel
    if not stores:
        unspilled = ("local", "stack", "local_in_ptx")
        assert not any(kernel.get(field) for field in unspilled), kernel


def check_exchange(kernel: dict) -> None:
    """Peers' data is looked at 16 bytes at a time; two words say whether to go on with a wait."""
    if kernel["kernel"].startswith("collective."):
        assert 2 * kernel["polled_vectors"] > kernel["polled_words"] > 0, kernel


def check_sm90(kernel: dict) -> None:
    """Check the property that a Gluon kernel was written for."""
    module = kernel["kernel"].rpartition(".")[0]
    check = SM90_CHECKS.get(module)
    if check is not None:
        assert check(kernel), f"{check.__doc__}: {kernel}"


def gemv(kernel: dict) -> bool:
    """Operands go from memory to registers; only the warps' sums are in shared memory."""
    # 4 of 32 inputs in a step, for each tile of columns and 16 outputs
    return kernel["integer_mma"] > 0 and kernel["integer_mma"] % 4 == 0 and kernel["shared"] <= 4096


def small_m(kernel: dict) -> bool:
    """As many blocks fit on an SM as its register limit allows; no register in use is written.

    128 inputs are 8 products in each of the one or two consumer warpgroups.
    """
    blocks = REGISTERS_OF_SM // (kernel["max_registers"] * kernel["threads"])
    # of 1 KB more than one block may have, the system takes 1 KB for each
    fits = blocks * (kernel["shared"] + 1024) <= (CARDS["sm_90"].shared_kb + 1) * 1024
    products = 8 * (kernel["threads"] // 128 - 1)
    return (
        fits
        and kernel.get("hgmma", products) == products
        and not kernel.get("overwritten_in_flight")
    )


def large_m(kernel: dict) -> bool:
    """The next weights are unpacked while a product runs; no register in use is written."""
    return kernel.get("overlapped", True) and not kernel.get("overwritten_in_flight")


def prefill(kernel: dict) -> bool:
    """A loop waits twice, for scores and for sums of values: products do not wait for each other.

    If weights are written while a product reads the previous ones, ptxas waits for each product.
    """
    return kernel.get("waits_in_loops", 2) == 2


def expanded_codes(kernel: dict) -> bool:
    """Registers with codes that a product reads are not written before the wait for it."""
    return not kernel.get("overwritten_in_flight")


def latent_decode(kernel: dict) -> bool:
    """Scores are 36 products; values of 64 columns are divided among two warpgroups."""
    products = 36 + (32 if kernel["threads"] == 384 else 16)
    fits = kernel["threads"] * kernel["max_registers"] <= REGISTERS_OF_SM
    return fits and kernel.get("hgmma", products) == products


SM90_CHECKS = {
    "latent.sm90_decode": latent_decode,
    "w4a8.sm90": expanded_codes,
    "wna16.sm90_gemv_imma": gemv,
    "wna16.sm90_small_m": small_m,
    "wna16.sm90_large_m": large_m,
    "moe.sm90_few_tokens": small_m,
    "attention.sm90_prefill": prefill,
}


@pytest.mark.parametrize("module", SM90_CHECKS)
def test_checked_kernels_exist(module):
    assert (ROOT / "qkernels" / f"{module.replace('.', '/')}.py").exists()


def test_every_card_has_quick_cases():
    for card, of_card in CARDS.items():
        quick = [case for case in CASES.values() if card in case.quick]
        assert len(quick) >= 4 and all(case.least <= of_card.arch for case in quick)
    assert all(set(case.quick) <= set(CARDS) for case in CASES.values())


def test_write_to_register_in_use_is_detected():
    """Products that are waited for one turn later: the next turn writes what the last one reads."""
    loop = """
        /*0000*/   {first} ;
        /*0010*/   HGMMA.64x128x16.F32.BF16 R24, R104, gdesc[UR12], R24, gsb0 ;
        /*0020*/   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0030*/   {second} ;
        /*0040*/   HGMMA.64x128x16.F32.BF16 R24, R108, gdesc[UR12], R24, gsb0 ;
        /*0050*/   WARPGROUP.DEPBAR.LE gsb0, {left} ;
        /*0060*/   @P0 BRA 0x0 ;
    """
    right = {"first": "LDS.128 R104, [R3]", "second": "HFMA2 R109, R1, R2, R3", "left": "0x1"}
    assert sass.overwritten_in_flight(loop.format(**right)) == []
    assert sass.overlapped(loop.format(**right))
    late = right | {"first": "LDS.64 R110, [R3]"}
    assert sass.overwritten_in_flight(loop.format(**late)) == ["LDS.64 R110, [R3]"]
    assert sass.overwritten_in_flight(loop.format(**late | {"left": "0x0"})) == []
    early = right | {"second": "HFMA2 R107, R1, R2, R3"}
    assert sass.overwritten_in_flight(loop.format(**early)) == [early["second"]] * 2
