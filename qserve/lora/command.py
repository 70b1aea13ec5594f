"""`qserve merge`: adds a LoRA adapter to a float model's weights. Imports torch only to compute."""

from dataclasses import dataclass

from qserve.command_line.command import Command
from qserve.command_line.setting import REQUIRED, setting
from qserve.hub.settings import HubSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeConfig(HubSettings):
    """Settings of `qserve merge`, except the float model."""

    adapter: str = setting(
        REQUIRED, "LoRA adapter saved by PEFT: folder or hub name", positional=True
    )
    output: str = setting(REQUIRED, "output folder; must be new or empty")
    max_shard_size: str = setting("2GB", "maximum size of one weight file, such as 500MB")


def merge(model: str, config: MergeConfig) -> int:
    from formats.files.target import check_is_free
    from formats.hub.fetch import local_path
    from formats.hub.selection import ADAPTER
    from formats.table import parse_size
    from qserve.hub.local import local_model
    from qserve.lora.merge import merge_adapter

    size = parse_size(config.max_shard_size)
    check_is_free(config.output)
    adapter = local_path(config.adapter, ADAPTER, download_dir=config.download_dir)
    model = local_model(model, config)
    done = merge_adapter(model, adapter, config.output, max_shard_bytes=size)
    print(done.to_text())
    return 0


MERGE = Command(
    help="add a LoRA adapter to a float model's weights", settings=(MergeConfig,), run=merge
)
