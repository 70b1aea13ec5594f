"""AdminSettings: flags of the routes for operators. Loads no torch."""

from dataclasses import dataclass

from qserve.command_line.setting import setting

WAIT, REFUSE = "wait", "refuse"


@dataclass(frozen=True, kw_only=True)  # no slots: a class may have one such base only
class AdminSettings:
    """Access to the routes for operators, and the treatment of requests during a pause."""

    enable_admin_routes: bool = setting(
        False,
        "enable POST /pause, /resume, /sleep, /wake_up, /abort_requests, /update_weights_from_disk,"
        " /update_weights_from_ipc and GET /weights/digest; requires an API key",
    )
    admin_api_key_file: str | None = setting(
        None,
        "file with API keys, one per line, for the routes of --enable-admin-routes; no other key"
        " may use these, and these keys may use all routes; default: every API key may",
    )
    paused_requests: str = setting(
        WAIT,
        "what requests get while the model is paused or asleep; wait: their turn when generation"
        " resumes; refuse: 503 with Retry-After",
        (WAIT, REFUSE),
    )
