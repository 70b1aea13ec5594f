"""`qserve merge`: an adapter added to a float model's weights. Loads torch only to work."""

from dataclasses import dataclass

from qserve.command import Command
from qserve.setting import REQUIRED, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeConfig:
    """What `qserve merge` is told beside the float model."""

    adapter: str = setting(REQUIRED, "folder of a LoRA adapter that PEFT saved", positional=True)
    output: str = setting(REQUIRED, "folder to write; must not exist, or be empty")
    max_shard_size: str = setting("2GB", "most bytes of one weight file, such as 500MB")


def merge(model: str, config: MergeConfig) -> int:
    from formats.table import parse_size
    from qserve.lora.merge import merge_adapter

    size = parse_size(config.max_shard_size)
    done = merge_adapter(model, config.adapter, config.output, max_shard_bytes=size)
    print(done.to_text())
    return 0


MERGE = Command(
    help="add a LoRA adapter to a float model's weights", settings=(MergeConfig,), run=merge
)
