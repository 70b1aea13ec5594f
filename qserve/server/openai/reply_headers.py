"""Reply headers about the request; their content is also logged.

`x-ignored-fields` names fields without effect. `x-warnings` names values that were read differently
from how they were written, and constraints that are not enforced.
"""

import logging
import re

from qserve.server.requests.job import Job

HEADER = "x-ignored-fields"
WARNINGS = "x-warnings"
MAX_NAMES = 32
MAX_WARNINGS = 8
MAX_WARNING_CHARS = 200  # per warning
NAME = re.compile(
    r"[A-Za-z0-9_.\-]{1,64}"
)  # names come from clients; others are not valid in a header
NOT_IN_HEADERS = re.compile(r"[^ -~]|;")  # ; separates warnings
OTHERS = "..."

logger = logging.getLogger(__name__)


def headers(job: Job, *, priority_counts: bool) -> dict[str, str]:
    """Headers that report ignored fields and warnings of a job."""
    ignored = list(job.ignored)
    if job.handling.priority and not priority_counts:
        ignored.append("priority")
    return _ignored_fields(job, ignored) | _warnings(job)


def one_warning(warning: str | None) -> dict[str, str]:
    """The header of a warning that arises with the reply; none for None."""
    if warning is None:
        return {}
    return {WARNINGS: NOT_IN_HEADERS.sub("?", warning)[:MAX_WARNING_CHARS]}


def _ignored_fields(job: Job, ignored: list[str]) -> dict[str, str]:
    if not ignored:
        return {}
    shown = [name for name in ignored if NAME.fullmatch(name)][:MAX_NAMES]
    if len(shown) < len(ignored):
        shown.append(OTHERS)
    text = ", ".join(shown)
    logger.info("Request %s has fields without effect: %s", job.request_id, text)
    return {HEADER: text}


def _warnings(job: Job) -> dict[str, str]:
    if not job.warnings:
        return {}
    shown = [NOT_IN_HEADERS.sub("?", each)[:MAX_WARNING_CHARS] for each in job.warnings]
    if len(shown) > MAX_WARNINGS:
        shown[MAX_WARNINGS:] = [f"and {len(shown) - MAX_WARNINGS} more"]
    text = "; ".join(shown)
    logger.info("Request %s: %s", job.request_id, text)
    return {WARNINGS: text}
