"""AdminSettings: flags of the operator routes. Loads no torch."""

from dataclasses import dataclass

from qserve.command_line.setting import setting

WAIT, REFUSE = "wait", "refuse"


@dataclass(frozen=True, kw_only=True)  # no slots: of several base classes only one may have slots
class AdminSettings:
    """Access to the operator routes, and what happens to requests during a pause."""

    enable_admin_routes: bool = setting(
        False,
        "enable POST /pause, /resume, /sleep, /wake_up, /abort_requests, /update_weights_from_disk,"
        " /update_weights_from_ipc and GET /weights/digest; requires an API key",
    )
    admin_api_key_file: str | None = setting(
        None,
        "file with API keys, one per line, that may use the routes of --enable-admin-routes (and"
        " all other routes); other keys get 403 there; default: every API key may use all routes",
    )
    paused_requests: str = setting(
        WAIT,
        "what happens to requests while the model is paused or asleep; wait: they wait until"
        " generation resumes; refuse: they get 503 with Retry-After",
        (WAIT, REFUSE),
    )
