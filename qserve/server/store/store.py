"""ResponseStore: the asynchronous interface of the response store. One thread does all work."""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

from qserve.server.store.database import Bounds, Database
from qserve.server.store.errors import as_store_error
from qserve.server.store.records import Records

DAY = 86400.0
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class ResponseStore:
    """Stored responses and conversations of all clients."""

    def __init__(self, path: str, *, max_bytes: int, max_days: float) -> None:
        """Open the file. Raises InputError if it cannot be used."""
        bounds = Bounds(num_bytes=max_bytes, seconds=max_days * DAY)
        self._database = Database(path, bounds)
        self._records = Records(self._database)
        self._thread = ThreadPoolExecutor(1, "response-store")

    async def run(
        self,
        operation: Callable[Concatenate[Records, Arguments], Result],
        *arguments: Arguments.args,
        **options: Arguments.kwargs,
    ) -> Result:
        """Run a method of Records in the store's thread. Raises ApiError."""

        def work() -> Any:
            try:
                return operation(self._records, *arguments, **options)
            except sqlite3.Error as error:
                raise as_store_error(error, self._database.path) from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Finish all operations, and close the file."""
        self._thread.shutdown()
        self._database.close()
