"""StoreSettings: flags of the store of responses. Loads no torch."""

from dataclasses import dataclass

from qserve.command_line.setting import setting


@dataclass(frozen=True, kw_only=True)  # no slots: a class may have one such base only
class StoreSettings:
    """File and bounds of stored responses and conversations."""

    response_store: str | None = setting(
        None,
        "SQLite file that keeps responses and conversations, for previous_response_id and"
        " conversation; default: nothing is stored",
    )
    response_store_bytes: int = setting(
        2**30,
        "maximum bytes that --response-store keeps; beyond it the API key with the most bytes loses"
        " its least recently used responses",
        low=2**12,
    )
    response_store_days: float = setting(
        30.0, "days after the last use until --response-store drops a response", low=0.001
    )
