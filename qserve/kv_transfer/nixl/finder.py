"""AddressFinder: connects to the ranks of other engines, by addresses from settings and files.

A thread makes the connections, so that a host which does not answer delays no request. Each sending
rank writes its address to a file in the folder `path` of the settings, which several hosts may
share.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from qserve.kv_transfer.nixl.agent import Agent
from qserve.kv_transfer.nixl.page_server import ConnectionRefused, PageConnection
from qserve.kv_transfer.nixl.remote import RemotePages, RemoteTable, Staging
from qserve.kv_transfer.nixl.settings import Address, NixlSettings
from qserve.kv_transfer.peer.layout import BufferFacts
from qserve.kv_transfer.peer.memory import TransferError
from qserve.kv_transfer.peer.slot_table import SlotTable

SUFFIX = ".nixl"
STATES_SUFFIX = ".nixl-states"  # for the address of a buffer of states
PASS_SECONDS = 0.5  # interval of searches for engines
RETRY_SECONDS = 10.0  # time before an address that did not answer is tried again
NOW_SECONDS = 1.0  # longest wait of a request for a search

logger = logging.getLogger(__name__)


class AddressFinder:
    """Finds and connects to the other engines that a rank can reach."""

    def __init__(
        self,
        settings: NixlSettings,
        engine: str,
        agent: Agent,
        staging: Callable[[], Staging],
        *,
        of_states: bool = False,
    ) -> None:
        """`engine`: name of this engine. `staging`: creates the staging memory on first use.

        `of_states`: find buffers of states, not of KV pages.
        """
        self._of_states = of_states
        self._settings, self._engine, self._agent, self._staging = settings, engine, agent, staging
        self._connections: dict[Address, PageConnection] = {}
        self._not_before: dict[Address, float] = {}  # address -> time of the next attempt
        self._reported: set[Address] = set()
        self._changed = threading.Condition()
        self._num_begun = self._num_ended = 0  # numbers of searches
        self._is_wanted = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-find", daemon=True)
        self._thread.start()

    def find(self, known: Collection[str], *, now: bool) -> dict[str, list[RemoteTable]]:
        """Return the tables of engines whose ranks all answer: engine -> table of each rank.

        `known`: engines to leave out. `now`: first wait for a new search.
        """
        if now:
            with self._changed:
                wanted = self._num_begun + 1
                self._is_wanted = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._num_ended >= wanted, NOW_SECONDS)
        engines: dict[str, list[PageConnection]] = {}
        with self._changed:
            for connection in self._connections.values():
                facts = connection.announcement.facts
                if facts.of_states != self._of_states:
                    continue  # an address of the settings is that of an engine's pages
                if facts.engine not in known and connection.is_alive:
                    engines.setdefault(facts.engine, []).append(connection)
        found = {}
        for engine, connections in engines.items():
            if len(connections) == connections[0].announcement.facts.num_ranks:
                found[engine] = self._tables(engine, connections)
        return {engine: tables for engine, tables in found.items() if tables}

    def memory(self, index: RemoteTable) -> RemotePages:
        """Return the buffer of a table. Raises InputError."""
        return RemotePages(self._agent, index, self._staging())

    def forget_dead(self, index: SlotTable) -> None:
        """Do nothing: the thread removes connections that have ended."""

    def close(self) -> None:
        """End the thread and all connections."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(10)
        for each in self._connections.values():
            each.close()
        self._connections.clear()

    def _tables(self, engine: str, connections: list[PageConnection]) -> list[RemoteTable]:
        tables: list[RemoteTable] = []
        try:
            for each in connections:
                tables.append(RemoteTable(self._agent, each))
        except TransferError as error:
            logger.warning("KV peer %s: %s", engine, error)
            for table in tables:
                table.close()
            return []
        return tables

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._is_wanted and not self._is_closed:
                    self._changed.wait(PASS_SECONDS)
                if self._is_closed:
                    return
                self._is_wanted = False
                self._num_begun += 1
            try:
                self._look()
            except Exception:
                logger.exception("Looking for KV peers failed")
            with self._changed:
                self._num_ended = self._num_begun
                self._changed.notify_all()

    def _look(self) -> None:
        """Connect to all addresses without a connection."""
        with self._changed:
            for address, connection in list(self._connections.items()):
                if not connection.is_alive:
                    del self._connections[address]
                    connection.close()
        files = self._files()
        waiting = list(dict.fromkeys((*self._settings.peers, *files)))
        for address in waiting:  # the loop appends the ranks of engines that it finds
            connection = self._connections.get(address)
            if connection is None and time.monotonic() >= self._not_before.get(address, 0.0):
                connection = self._connect(address, files.get(address))
            if connection is None or address not in self._settings.peers:
                continue
            facts = connection.announcement.facts
            if facts.rank or facts.of_states:
                continue
            first = facts.num_ranks if self._of_states else 0
            for rank in range(facts.num_ranks):
                other = address[0], address[1] + first + rank
                if other not in waiting:
                    waiting.append(other)

    def _files(self) -> dict[Address, Path]:
        """Return the addresses in the folder, except those of this engine."""
        found = {}
        suffix = STATES_SUFFIX if self._of_states else SUFFIX
        for path in self._settings.common.path.glob(f"*{suffix}"):
            if path.name.partition(".")[0] == self._engine:
                continue
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                values = json.loads(path.read_bytes())
                found[str(values["host"]), int(values["port"])] = path
        return found

    def _connect(self, address: Address, path: Path | None) -> PageConnection | None:
        """Connect to one rank. `path`: the file with its address, if there is one."""
        name = f"{address[0]}:{address[1]}"
        try:
            connection = PageConnection(address, self._settings.secret)
        except ConnectionRefusedError:  # no listener: the engine has not started or has ended
            if path is not None and _is_of_this_host(path):
                path.unlink(missing_ok=True)
            return None
        except (OSError, ConnectionRefused) as error:
            self._not_before[address] = time.monotonic() + RETRY_SECONDS
            if address not in self._reported:
                self._reported.add(address)
                logger.warning("KV peer %s %s; retrying later", name, _reason(error))
            return None
        self._reported.discard(address)
        if connection.announcement.facts.engine == self._engine:
            # this engine's own address: all engines may have the same settings
            self._not_before[address] = float("inf")
            connection.close()
            return None
        with self._changed:
            self._connections[address] = connection
        return connection


def write_address(folder: Path, facts: BufferFacts, address: Address) -> Path:
    """Write a rank's address to a file, by which other engines find the rank. Raises OSError."""
    host, port = address
    suffix = STATES_SUFFIX if facts.of_states else SUFFIX
    path = folder / f"{facts.engine}.{facts.rank}{suffix}"
    text = json.dumps({"host": host, "port": port, "node": socket.gethostname()})
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)
    return path


def _is_of_this_host(path: Path) -> bool:
    try:
        return json.loads(path.read_bytes())["node"] == socket.gethostname()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ConnectionRefused) else f"does not answer ({error})"
