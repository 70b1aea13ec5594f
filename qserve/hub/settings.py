"""HubSettings: flags of every command that takes a model by name. Loads no torch."""

from dataclasses import dataclass

from qserve.command_line.setting import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """Where on the hub the model is, and where its files are kept."""

    revision: str | None = setting(
        None, "branch, tag or commit of MODEL on the hub; also MODEL@REVISION; default: main"
    )
    subfolder: str | None = setting(None, "folder in MODEL that holds the model")
    download_dir: str | None = setting(
        None,
        "folder for files from the hub, instead of $HF_HOME/hub, which other programs use too",
    )
