"""`qserve distill`: train a quantized model's scales to match the float model's predictions."""

from dataclasses import dataclass

import qserve
from qserve.command_line.command import Command
from qserve.command_line.interrupts import INTERRUPTED
from qserve.command_line.recipe_file import recipe_settings
from qserve.command_line.setting import REQUIRED, check_settings, setting
from qserve.command_line.tool_config import bos_setting, eval_text_setting
from qserve.commands.quantize import device_of
from qserve.hub.settings import HubSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig(HubSettings):
    """Settings of `qserve distill`, besides the quantized model."""

    against: str = setting(
        REQUIRED, "float model from which MODEL was quantized: a folder or a hub name"
    )
    output: str = setting(REQUIRED, "output folder; must be new or empty")
    calibration: str | None = setting(
        None,
        "texts to train on: plain text; JSON, JSON Lines or parquet with text or messages; "
        "or the name or folder of a data set (default: a small set in the package)",
    )
    samples: int = setting(128, "windows to train on; one in eight is held out", low=2)
    sequence_length: int = setting(2048, "length of a window in tokens", low=2)
    steps: int = setting(200, "training steps", low=1)
    tokens: int = setting(4096, "tokens per step", low=1)
    rate: float = setting(
        0.002, "learning rate of scales, relative to each scale; decays to 0", low=0
    )
    norm_rate: float = setting(0.0005, "learning rate of norm weights, like --rate", low=0)
    code_rate: float = setting(
        0.0, "learning rate of codes, in units of codes; 0: codes do not change", low=0
    )
    seed: int = setting(0, "seed for the order of the texts and of the windows")
    bos: bool = bos_setting()
    eval_text: str | None = eval_text_setting()
    quality_windows: int = setting(
        4, "held-out windows of 512 tokens on which the models are compared; 0: skip", low=0
    )
    device: str = setting("auto", "where to compute; auto: the GPU if there is one")
    max_shard_size: str = setting("2GB", "maximum size of one weight file, such as 500MB")

    def __post_init__(self) -> None:
        check_settings(self)


def distill(model: str, config: DistillConfig) -> int:
    from calibrate.distillation.distill import distill_checkpoint
    from calibrate.distillation.training import TrainingSettings
    from formats.hub.fetch import local_path
    from formats.table import parse_size
    from qserve.hub.local import local_model
    from qserve.multimodal.calibration import CalibrationChats

    reference = local_path(config.against, download_dir=config.download_dir)
    done = distill_checkpoint(
        local_model(model, config),
        reference,
        config.output,
        chats=CalibrationChats(reference),
        calibration=config.calibration,
        samples=config.samples,
        sequence_length=config.sequence_length,
        settings=TrainingSettings(
            steps=config.steps,
            tokens=config.tokens,
            rate=config.rate,
            norm_rate=config.norm_rate,
            code_rate=config.code_rate,
        ),
        seed=config.seed,
        bos=config.bos,
        eval_text=config.eval_text,
        quality_windows=config.quality_windows,
        device=device_of(config.device),
        max_shard_bytes=parse_size(config.max_shard_size),
        quantizer=f"qserve-kit:{qserve.__version__}",
        flags=recipe_settings(config),
    )
    print(done.to_text())
    print(f"Wrote {config.output}")
    return 0 if done.trained.steps == config.steps else INTERRUPTED


DISTILL = Command(
    help="train a quantized model's scales, and with --code-rate its codes, to match the float"
    " model's predictions",
    settings=(DistillConfig,),
    run=distill,
)
