"""HubSettings: flags of every command that accepts a hub name. Loads no torch."""

from dataclasses import dataclass

from qserve.command_line.setting import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """Revision and subfolder of a hub repository, and the download folder."""

    revision: str | None = setting(
        None, "branch, tag or commit of MODEL on the hub (same as MODEL@REVISION); default: main"
    )
    subfolder: str | None = setting(None, "folder of the hub repository that holds the model")
    download_dir: str | None = setting(
        None,
        "folder for files from the hub; default: $HF_HOME/hub, shared with other programs",
    )
