"""Fields of a request that change nothing are named, in a header of the reply and in the log."""

import logging
import re

from qserve.server.job import Job

HEADER = "x-ignored-fields"
MAX_NAMES = 32
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")  # a client's text; others would not fit into a header
OTHERS = "..."

logger = logging.getLogger(__name__)


def headers(job: Job, *, priority_counts: bool) -> dict[str, str]:
    """The header that names the fields of a job that change nothing, which the log gets too."""
    ignored = list(job.ignored)
    if job.handling.priority and not priority_counts:
        ignored.append("priority")
    if not ignored:
        return {}
    shown = [name for name in ignored if NAME.fullmatch(name)][:MAX_NAMES]
    if len(shown) < len(ignored):
        shown.append(OTHERS)
    text = ", ".join(shown)
    logger.info("Request %s has fields that change nothing here: %s", job.request_id, text)
    return {HEADER: text}
