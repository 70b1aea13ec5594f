"""StoreSettings: flags of the response store. Loads no torch."""

from dataclasses import dataclass

from qserve.command_line.setting import setting


@dataclass(frozen=True, kw_only=True)  # no slots: of several base classes only one may have slots
class StoreSettings:
    """File and limits of the response store."""

    response_store: str | None = setting(
        None,
        "SQLite file that keeps responses and conversations, for previous_response_id and"
        " conversation; default: nothing is stored",
    )
    response_store_bytes: int = setting(
        2**30,
        "maximum size of --response-store in bytes; if it is exceeded, the API key with the most"
        " bytes loses its least recently used responses",
        low=2**12,
    )
    response_store_days: float = setting(
        30.0, "days after which --response-store deletes an unused response", low=0.001
    )
