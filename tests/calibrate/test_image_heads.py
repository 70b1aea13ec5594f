"""Draft heads of vision-language models: training with chats, calibration, effect of images."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from calibrate.heads.eagle3 import Eagle3Module, start_from_target, step_losses
from calibrate.heads.fit import FitSettings, fit
from calibrate.heads.image_windows import answer_windows
from calibrate.heads.quantize import quantize_head
from calibrate.heads.target import Target
from calibrate.texts.data import CalibrationData
from formats.heads.config import EAGLE3, EagleConfig, read_head_config
from formats.heads.folder import HeadFolder
from formats.heads.layers_config import SPECULATORS
from formats.heads.save import save_eagle3
from formats.scheme import Scheme
from qserve import cli
from qserve.llm import LLM
from qserve.multimodal.calibration import CalibrationChats
from qserve.params.sampling_params import SamplingParams
from tests.tiny_vision import picture, write_tiny_vision

ROOT = Path(__file__).resolve().parent.parent.parent
NUM_CHATS, NUM_WORDS = 6, 10


def question(image) -> dict:
    return {"role": "user", "content": [{"type": "image", "image": image}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of few words, and chats with a picture each."""
    folder = tmp_path_factory.mktemp("images")
    write_tiny_vision(folder / "llava", "llava", num_words=100)
    write_tiny_vision(folder / "qwen3_vl", "qwen3_vl", num_words=100)
    lines = []
    for number in range(NUM_CHATS):
        picture(32, 32, number).save(folder / f"{number}.png")
        answer = {"role": "assistant", "content": "w20 w21"}
        lines.append(json.dumps({"messages": [question(f"{number}.png"), answer]}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
    return folder


def run_script(name, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize(
    "family", ["qwen3_vl", pytest.param("llava", marks=pytest.mark.exhaustive)]
)
def test_image_head_is_trained_quantized_and_measured(folder, family, tmp_path, capsys):
    model, data = folder / family, folder / "chats.jsonl"
    common = ["--data", data, "--length", 40, "--batch", 4, "--continued", 8, "--device", "cpu"]
    run_script("train_eagle3", model, *common, "--epochs", 1, "--output", tmp_path / "head")
    for layout in ("original", "speculators"):
        config = HeadFolder(tmp_path / "head" / layout).config
        assert config.image_embeddings
        assert config.axis_pairs == ((4, 2, 2) if family == "qwen3_vl" else ())
        assert config.has_interleaved_axes == (family == "qwen3_vl")
    report = json.loads((tmp_path / "head" / "training.json").read_text())
    assert report["batches"] >= 2 and len(report["accuracy_of_steps"]) == 5
    source, codes = tmp_path / "head" / "original", tmp_path / "codes"
    flags = ["--target", model, "--calibration", data, "--samples", 6, "--sequence-length", 40]
    flags = ["quantize", source, "-o", codes, *flags, "--group-size", 32]
    assert cli.main(list(map(str, flags))) == 0
    assert "eagle3 head: 9 linears to w4a16-sym" in capsys.readouterr().out
    drafter = json.dumps({"model": str(codes)})
    flags = ["--text", data, "--drafter", drafter, "--without-images", "--max-tokens", 12]
    run_script("measure_acceptance", model, *flags, "--device", "cpu")
    *_, greedy, sampled = map(json.loads, capsys.readouterr().out.splitlines())
    assert (greedy["image_embeddings"], greedy["same_texts"]) == (False, "6 of 6")
    assert sampled["same_texts"] == "6 of 6" and sampled["tokens_per_s"] > 0


@pytest.fixture(scope="module")
def toy(folder):
    """A head that was trained on a model's own answers about six images, for a few seconds."""
    data = str(folder / "chats.jsonl")
    target = Target(folder / "llava", device="cpu", aux_layers=(1, 2, 3))
    chats = CalibrationChats(folder / "llava")
    settings = {"temperature": 0, "seconds": 600, "progress": False}
    length = len(chats.read([question("0.png")], folder, add_generation_prompt=True).ids)
    windows = answer_windows(data, target, chats, length + NUM_WORDS, NUM_CHATS, **settings)
    seen = windows.seen(target)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": target.config.vocab_size}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = EagleConfig(
        kind=EAGLE3,
        layout=SPECULATORS,
        values={**sizes, **heads, "model_type": "llama", "rope_theta": 10000.0},
        target_hidden_size=64,
        draft_vocab_size=sizes["vocab_size"],
        num_aux=3,
        explicit_aux_layers=target.aux_layers,
        norm_before_residual=True,
        norm_output=False,
        norm_before_fc=False,
        fc_norm=False,
        image_embeddings=True,
    )
    torch.manual_seed(0)
    head = Eagle3Module(config, target.embedding)
    start_from_target(head, {"lm_head": target.head, "norm": target.last_norm}, None)

    def losses(_):  # of all windows
        states = seen.aux_BSF, seen.logits_BSV
        return list(step_losses(head, windows.ids_WS, *states, num_steps=3, images=seen.images))

    settings = FitSettings(epochs=80, batch=NUM_CHATS, rate=2e-2, output_rate=5e-3)
    numbers_W1 = torch.arange(NUM_CHATS)[:, None]
    fit(head, numbers_W1, losses, settings, outputs=(head.lm_head.weight,), progress=False)
    tensors = {name: each.detach() for name, each in head.state_dict().items()}
    verifier = {"num_hidden_layers": 3}
    save_eagle3(folder / "toy", config, tensors, layout=SPECULATORS, verifier=verifier)
    return windows


def test_image_embeddings_increase_acceptance(folder, toy):
    params = SamplingParams(temperature=0, max_tokens=NUM_WORDS, ignore_eos=True)
    chats = [[question(picture(32, 32, number))] for number in range(NUM_CHATS)]
    texts, lengths = [], []
    for more in (None, {}, {"image_embeddings": False}):
        config = {"model": str(folder / "toy"), "num_speculative_tokens": 3, "adaptive": False}
        drafts = {} if more is None else {"speculative_config": json.dumps({**config, **more})}
        llm = LLM(str(folder / "llava"), device="cpu", dtype="float32", max_num_seqs=6, **drafts)
        outputs = llm.chat(chats, params, use_tqdm=False)
        texts.append([each.outputs[0].token_ids for each in outputs])
        if more is not None:
            verifies, _, *accepted = llm.engine.report().drafts
            lengths.append(1 + sum(accepted) / verifies)
    assert texts[0] == texts[1] == texts[2]
    assert len(set(map(tuple, texts[0]))) == NUM_CHATS, "the answers do not depend on the image"
    with_images, without = lengths
    assert with_images > without + 0.4 > 1.4


def test_head_is_quantized_with_target_images(folder, toy, tmp_path):
    """Judged by the reported accuracy, which is lower with other images."""
    accuracies = []
    for number, images_W in enumerate((toy.images_W, (*toy.images_W[1:], toy.images_W[0]))):
        report = quantize_head(
            folder / "toy",
            tmp_path / str(number),
            scheme=Scheme.parse("w4a16-sym", 32),
            target=folder / "llava",
            calibration=CalibrationData(
                ids_WS=toy.ids_WS, source="toy", seed=0, images_W=images_W, chats=toy.chats
            ),
            progress=False,
        )
        accuracies.append((report.accuracy_before[0], report.accuracy_after[0]))
    (right, right_codes), (wrong, _) = accuracies
    assert right > 0.7 and right_codes > 0.5
    assert right > wrong + 0.3


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_head_rotary_embedding_equals_target(family, tmp_path):
    """With positions of three axes, as transformers computes them."""
    target = Target(
        write_tiny_vision(tmp_path / family, family, 100), device="cpu", aux_layers=(1,)
    )
    assert target.axes["mrope_interleaved"] == (family == "qwen3_vl")
    config = read_head_config(
        {
            **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4},
            **{"vocab_size": 128, "draft_vocab_size": 128},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **target.axes},
        },
        EAGLE3,
    )
    head = Eagle3Module(config, target.embedding)
    positions_3BS = torch.randint(0, 30, (3, 2, 7), generator=torch.Generator().manual_seed(3))
    found = head._cos_sin(0, torch.zeros(2, 7, 64), positions_3BS)
    expected = target._decoder.rotary_emb(torch.zeros(2, 7, 64), positions_3BS)
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own, theirs)
