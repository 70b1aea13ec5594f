"""The real engine, which writes to a file what it still holds whenever it is idle.

The file is named by PAGE_ENGINE_REPORT.
"""

import json
import os
from pathlib import Path

from qserve.engine.engine import Engine


class PageEngine(Engine):
    def __init__(self, config):
        super().__init__(config)
        self.seen = []

    def add_request(self, request_id, *arguments, **whose):
        super().add_request(request_id, *arguments, **whose)
        self.seen.append(self._requests[request_id])

    def use_idle_time(self) -> bool:
        return False

    def has_work(self) -> bool:
        if super().has_work():
            return True
        self.scheduler.check_integrity()
        pool = self.scheduler.pool
        held = {
            "pages": pool.num_pages - pool.num_free,
            "requests": len(self._requests),
            "preempted": sum(request.facts.num_preemptions for request in self.seen),
        }
        path = Path(os.environ["PAGE_ENGINE_REPORT"])
        path.with_suffix(".partial").write_text(json.dumps(held))
        path.with_suffix(".partial").rename(path)
        return False
