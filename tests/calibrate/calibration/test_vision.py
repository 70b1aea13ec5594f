"""Calibration with images: every layer gets what transformers' own model gets."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate import mixed_bits
from calibrate.calibration.capture import HiddenStates, held_out_windows
from calibrate.calibration.layer_runner import LayerRunner
from calibrate.calibration.vision import MUTUAL_PROMPTS, VisionModel, open_media
from calibrate.distillation.distill import distill_checkpoint
from calibrate.distillation.student import Student
from calibrate.distillation.training import Teacher, Training, TrainingSettings
from calibrate.float_model import FloatModel
from calibrate.loss_gradient import layer_gradients
from calibrate.pipeline import quantize_checkpoint
from calibrate.recipe import RECIPES
from calibrate.texts.data import WITHOUT_IMAGES, read_for_model
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError, InputError
from formats.scheme import Scheme
from qserve.cli import main
from qserve.multimodal.calibration import CalibrationChats
from qserve.multimodal.families import VisionConfig
from tests.calibrate.statistics_of import collect_statistics
from tests.qserve.multimodal.conftest import LISTS
from tests.tiny_vision import VISION_FAMILIES, loaded, picture, write_tiny_vision

# tiles; a mask in both directions; positions of three axes and deepstack
DEFAULT = ("smolvlm", "gemma3", "qwen2_5_vl", "qwen3_vl")
FAMILIES = [
    pytest.param(name, marks=() if name in DEFAULT else pytest.mark.exhaustive)
    for name in (*VISION_FAMILIES, "deepseek_ocr")
    if not name.startswith(MUTUAL_PROMPTS)
]
SCHEME = Scheme.parse("w4a16-sym-g32")
LENGTH, WINDOWS = 96, 8


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    """A file with chats about images next to it, and plain texts."""
    folder = tmp_path_factory.mktemp("calibration")
    rows = []
    for number in range(12):
        picture(30 + 7 * number, 60 - 3 * number, number).save(folder / f"{number}.png")
        asked = {"type": "text", "text": "what is this? " * (1 + number % 3)}
        image = {"type": "image_url", "image_url": {"url": f"{number}.png"}}
        turns = [{"role": "user", "content": [image, asked]}]
        rows.append({"messages": [*turns, {"role": "assistant", "content": "blocks"}]})
        rows.append({"text": f"page {number} of the table has some plain text " * 12})
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / "chats.jsonl")


def _text_of(model):
    """Return the text model, which has the layers."""
    text = getattr(model, "language_model", None) or getattr(model, "text_model", model)
    return getattr(text, "model", text)  # Llama 4: the text model with its head


class Case:
    """One tiny model, its calibration data, and what the layers get."""

    def __init__(self, folder, source):
        self.folder, self.chats, self.model = folder, CalibrationChats(folder), FloatModel(folder)
        self.data = read_for_model(
            self.model, source, WINDOWS, LENGTH, seed=0, bos=True, chats=self.chats
        )
        self.media, self.rotary = open_media(self.model, self.data, "cpu", torch.float32)
        self.runner = LayerRunner(self.model, self.model.layer_map, "cpu", self.rotary)

    def hidden(self, media=None):
        embedding = self.model.get(self.model.layer_map.embedding)
        media = self.media if media is None else media
        return HiddenStates(self.data.ids_WS, embedding, self.runner, media=media)

    def expected(self, hook_of=lambda *_: None, with_gradients=False, folder=None):
        """transformers' logits of each window, and what `hook_of` (text model, list) noted."""
        folder = folder or self.folder
        model = loaded(folder, self.folder.name)
        text = _text_of(getattr(model, "model", model))
        seen, logits = [], []
        hook_of(text, seen)
        for window, ids_S in zip(self.data.images_W, self.data.ids_WS, strict=True):
            inputs = {"input_ids": ids_S[None]}
            if window.images:
                inputs = self.chats.inputs(window, ids_S)
                is_image_1S = window.is_image_S[None]
                inputs |= {name: inputs[name].tolist() for name in inputs.keys() & LISTS}
                token = VisionConfig.of(self.model.reader.whole_config).image_token_id
                token = model.config.image_token_id if token is None else token
                ids_1S = inputs["input_ids"].masked_fill(is_image_1S, token)
                inputs["input_ids"] = ids_1S
            with torch.set_grad_enabled(with_gradients):
                logits.append(model.eval()(**inputs).logits[0])
        return torch.stack(logits), seen


@pytest.fixture(scope="module")
def case(tmp_path_factory, calibration):
    made = {}

    def make(family):
        if family not in made:
            folder = tmp_path_factory.mktemp("vision") / family
            made[family] = Case(write_tiny_vision(folder, family), calibration)
        return made[family]

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_inputs_equal_transformers(case, family):
    case = case(family)
    assert case.data.num_images >= 4 and not all(window.images for window in case.data.images_W)

    def note(text, seen):
        text.layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )

    logits_WSV, first = case.expected(note)
    hidden = case.hidden()
    wanted = torch.cat(first)
    torch.testing.assert_close(hidden.states_WSD[..., : wanted.shape[-1]], wanted)
    for layer in range(case.model.num_layers):
        module = case.runner.build(layer, case.model.layer(layer, "cpu"))
        hidden.advance(case.runner, module, layer)
    norm_D = case.model.get(case.model.layer_map.last_norm)
    found = [
        case.runner.final_logits(states, norm_D, case.model.head()) for states in hidden.states_WSD
    ]
    assert torch.allclose(torch.stack(found), logits_WSV, atol=1e-4)
    blind = case.hidden([None] * WINDOWS)
    assert not torch.allclose(blind.states_WSD[..., : wanted.shape[-1]], wanted, atol=1e-2)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_statistics_include_image_inputs(case, family):
    """The inputs of the second layer depend on mask, positions and deepstack."""
    case = case(family)

    def note(text, seen):
        text.layers[1].self_attn.o_proj.register_forward_pre_hook(
            lambda _, args: seen.append(args[0][0])
        )

    _, inputs = case.expected(note)
    x_TK = torch.cat(inputs)
    hidden = case.hidden()
    first, second = (case.runner.build(layer, case.model.layer(layer, "cpu")) for layer in (0, 1))
    hidden.batch = 2  # batches of windows with images and of texts
    hidden.advance(case.runner, first, 0)
    stats = collect_statistics(case.runner, second, 1, hidden)["self_attn.o_proj"]
    want_KK = x_TK.T @ x_TK
    assert stats.num_tokens == len(x_TK)
    assert torch.allclose(stats.moment_KK, want_KK, atol=1e-3 * float(want_KK.abs().max()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["gptq", "gptaq", "awq", "autoround"])
def test_quantize_with_images(case, tmp_path, recipe, monkeypatch):
    case, calls = case("qwen3_vl"), []
    run = LayerRunner.run

    def noted(self, module, layer, hidden_BSD, *rest, media=(), **named):
        calls.append((len(hidden_BSD), media, named.get("grad", False)))
        return run(self, module, layer, hidden_BSD, *rest, media=media, **named)

    monkeypatch.setattr(LayerRunner, "run", noted)
    reports = [
        quantize_checkpoint(
            case.folder, tmp_path / str(number), scheme=SCHEME, recipe=recipe, calibration=data
        )
        for number, data in enumerate((case.data, replace(case.data, images_W=(), chats=None)))
    ]
    assert [report.calibration.get("images") for report in reports] == [case.data.num_images, None]
    assert all(len(media) in (0, count) for count, media, _ in calls)
    seen = [is_trained for _, media, is_trained in calls if any(media)]
    assert seen and any(seen) == (RECIPES[recipe].tuning is not None)
    before, after = (load_file(tmp_path / str(n) / "model.safetensors") for n in (1, 0))
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert any(name.endswith("weight_packed") for name in changed)
    tower = CheckpointReader(case.folder).other_parts
    kept = CheckpointReader(tmp_path / "0").other_parts
    assert tower.keys() == kept.keys()
    assert all(torch.equal(entry.read(), kept[name].read()) for name, entry in tower.items())


def test_command_accepts_images(case, calibration, tmp_path, caplog):
    folder, flags = case("qwen3_vl").folder, ["--samples", "4", "--sequence-length", "96"]
    flags += ["--scheme", "w4a16-sym-g32", "--recipe", "gptq", "--quality-windows", "0"]
    for name, source, images in (("with", calibration, True), ("without", None, False)):
        more = ["--calibration", source] if source else []
        assert main(["quantize", str(folder), "-o", str(tmp_path / name), *flags, *more]) == 0
        report = json.loads((tmp_path / name / "quantization_report.json").read_text())
        assert ("images" in report["calibration"]) == images
        assert (WITHOUT_IMAGES in report["warnings"]) != images
    assert WITHOUT_IMAGES in caplog.text


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_loss_gradients_equal_transformers(case, family):
    """Mixed bits are chosen by these gradients. The tokens of images are not predicted."""
    case = case(family)

    def note(text, seen):
        def kept(_, args, kwargs, output):
            output = output[0] if isinstance(output, tuple) else output
            output.retain_grad()
            seen.append(output)

        text.layers[-2].register_forward_hook(kept, with_kwargs=True)

    logits_WSV, outputs = case.expected(note, with_gradients=True)
    generator = torch.Generator().manual_seed(3)
    for logits_SV, window in zip(logits_WSV, case.data.images_W, strict=True):
        label_S = torch.multinomial(logits_SV.softmax(-1), 1, generator=generator)[:, 0]
        loss_S = torch.nn.functional.cross_entropy(logits_SV, label_S, reduction="none")
        is_text_S = torch.cat([~window.is_image_S[1:], torch.tensor([True])])
        loss_S[is_text_S].sum().backward(retain_graph=True)
    found = layer_gradients(case.model, case.runner, case.data.ids_WS, 3, case.media)
    for each in found:
        if each.layer == case.model.num_layers - 2:
            break
    want_WSD = torch.cat([output.grad for output in outputs])
    error = (each.gradient_WSD - want_WSD).norm() / want_WSD.norm()
    assert error < 1e-3
    assert each.inputs_WSD.shape == want_WSD.shape


def test_mixed_bits_use_image_gradients(case, calibration, tmp_path, monkeypatch):
    case, found = case("qwen3_vl"), []
    choose = mixed_bits.choose
    monkeypatch.setattr(
        mixed_bits, "choose", lambda choices, *rest: found.append(choices) or choose(choices, *rest)
    )
    settings = {"scheme": SCHEME, "recipe": "rtn", "bits": 4.5, "chats": case.chats}
    settings |= {"samples": WINDOWS, "sequence_length": LENGTH, "progress": False}
    without = replace(case.data, images_W=(), chats=None)
    for name, data in (("with", calibration), ("without", without)):
        quantize_checkpoint(case.folder, tmp_path / name, calibration=data, **settings)
    costs, without = ([each.costs[4] for each in choices] for choices in found)
    assert len(costs) == len(without) > 6
    changes = [abs(a / b - 1) for a, b in zip(costs, without, strict=True)]
    assert min(changes) > 1e-4 and max(changes) > 0.02


@pytest.mark.parametrize(
    "family", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.exhaustive)]
)
def test_distillation_uses_images(case, family, tmp_path):
    """The divergence of held-out windows is that of transformers' models, at tokens of text."""
    case, codes, target = case(family), tmp_path / "codes", tmp_path / "distilled"
    quantize_checkpoint(case.folder, codes, scheme=SCHEME, recipe="rtn", progress=False)
    settings = TrainingSettings(steps=24, tokens=2 * LENGTH, rate=0.005)
    done = distill_checkpoint(
        codes,
        case.folder,
        target,
        calibration=case.data,
        settings=settings,
        quality_windows=0,
        progress=False,
    )
    (float_WSV, _), held_out = case.expected(), held_out_windows(WINDOWS, 0, WINDOWS)
    assert any(each.images for each in [case.data.images_W[n] for n in held_out.nonzero()])
    found = []
    for folder in (codes, target):
        own_WSV, _ = case.expected(folder=folder)
        total = count = 0
        for window in held_out.nonzero()[:, 0].tolist():
            is_image_S = case.data.images_W[window].is_image_S
            is_text_S = torch.cat([~is_image_S[1:], torch.tensor([True])])
            own, wanted = (each[window][is_text_S].log_softmax(-1) for each in (own_WSV, float_WSV))
            total += float((wanted.exp() * (wanted - own)).sum())
            count += int(is_text_S.sum())
        found.append(total / count)
    assert found == [
        pytest.approx(each, rel=0.02) for each in (done.trained.before, done.trained.after)
    ]
    assert found[1] < 0.98 * found[0]
    tower, kept = (CheckpointReader(each).other_parts for each in (case.folder, target))
    assert tower.keys() == kept.keys()
    check_gradient(case, codes)


def check_gradient(case, codes):
    """Along the gradient, the divergence of two windows changes by its squared norm."""
    student = Student(CheckpointReader(codes, rounded=True), "cpu", case.rotary)
    teacher = Teacher(case.model, "cpu", case.rotary)
    taught = teacher.last_states(case.data.ids_WS, media=case.media)
    training = Training(student, teacher, case.data.ids_WS, *taught, case.media)
    windows = torch.tensor([n for n in range(WINDOWS) if case.data.images_W[n].images][:2])
    training._backward(windows)
    scales = [each for layer in student.layers for each in layer.parameters()[0]]
    gradients = [each.grad.clone() for each in scales]
    squared = sum(float(each.double().square().sum()) for each in gradients)
    step, values = 0.02 / squared**0.5, []
    for sign in (1, -1):
        with torch.no_grad():
            for each, gradient in zip(scales, gradients, strict=True):
                each.copy_(sign * step * gradient)
        values.append(training.divergence(windows))
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(squared, rel=0.002)


def test_text_only_options_refuse_images(case, calibration, tmp_path):
    folder, target = case("qwen3_vl").folder, tmp_path / "new"
    for settings, words in (
        ({"calibration": calibration}, "chats.jsonl: has images, which are not supported here"),
        ({"recipe": "rotate"}, "recipe rotate: changes the embeddings of tokens; those of images"),
    ):
        with pytest.raises(InputError, match=words):
            quantize_checkpoint(folder, target, **{"scheme": SCHEME, "recipe": "gptq", **settings})
        assert not target.exists()


def test_bidirectional_prompts_are_refused(calibration, tmp_path):
    """The attention of such prompts is not computed here."""
    folder, target = write_tiny_vision(tmp_path / "paligemma", "paligemma"), tmp_path / "new"
    settings = {"scheme": SCHEME, "recipe": "gptq", "calibration": calibration, "samples": 2}
    with pytest.raises(
        CheckpointError, match=r"images, which are not supported for paligemma.*texts"
    ):
        quantize_checkpoint(
            folder, target, sequence_length=LENGTH, chats=CalibrationChats(folder), **settings
        )
    assert not target.exists()


def test_tower_with_missing_tensor_is_refused(case, tmp_path):
    source = case("qwen3_vl")
    folder = tmp_path / "model"
    folder.mkdir()
    for path in source.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    state = load_file(folder / "model.safetensors")
    del state["model.visual.merger.linear_fc1.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"visual\.merger\.linear_fc1\.weight: .*are missing"):
        VisionModel(FloatModel(folder), "cpu", torch.float32)
