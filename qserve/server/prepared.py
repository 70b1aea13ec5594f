"""The job of a request: its body is read, then prepared."""

import time

from starlette.requests import Request

from qserve.server.body import Body
from qserve.server.errors import engine_dead
from qserve.server.job import Job
from qserve.server.service import Service


async def prepared_job(request: Request, service: Service, client: str, route: str) -> Job:
    """Read the body and prepare the job of one of the routes in JOBS. Raises ApiError."""
    with Body(request, client, service) as body:
        content = await body.read()
        arrived = time.perf_counter()
        # It may have died while the body came.
        if not service.client.is_alive:
            raise engine_dead(service.client.is_restarting)
        return await service.preparation.job(client, service.model, route, content, arrived)
