"""NixlLink: engines find each other by addresses and read each other's buffers through NIXL.

An engine of a model with states has a second link for states. Its ports follow those for pages.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from formats.errors import InputError, one_line
from qserve.kv_transfer.config import FLAG
from qserve.kv_transfer.nixl.agent import Agent, Buffer, NixlAgent
from qserve.kv_transfer.nixl.finder import AddressFinder, write_address
from qserve.kv_transfer.nixl.page_server import Announcement, PageServer
from qserve.kv_transfer.nixl.remote import Staging
from qserve.kv_transfer.nixl.settings import NixlSettings
from qserve.kv_transfer.peer.layout import BufferFacts
from qserve.kv_transfer.peer.link import Describe
from qserve.kv_transfer.peer.memory import BufferMemory
from qserve.kv_transfer.peer.slot_table import SlotTable, table_bytes


class NixlLink:
    """One rank's link: its NIXL agent, announced buffer, and search for other engines."""

    def __init__(
        self, extra: Mapping[str, Any], device: torch.device, *, of_states: bool = False
    ) -> None:
        """`extra`: kv_connector_extra_config. `of_states`: buffers have states, not KV pages.

        Raises InputError.
        """
        self._settings, self._device = NixlSettings.parse(extra), device
        self._of_states = of_states
        self.settings = self._settings.common
        self.settings.make_folder()
        self._agent: Agent | None = None
        self._staging: Staging | None = None

    def publish(self, ours: BufferFacts, describe: Describe) -> tuple[SlotTable, BufferMemory]:
        """Register this rank's buffer and table, and announce them. Raises InputError."""
        agent = self._agent_of(ours)
        pages = agent.allocate(ours.offsets[-1], self._device)
        try:
            facts = describe(str(self._device), "", pages.region.address)
            table = AnnouncedTable(agent, facts, pages, self._settings)
        except BaseException:
            agent.release(pages)
            raise
        memory = BufferMemory(
            bytes_X=pages.bytes_X,
            device=facts.device,
            handle="",
            address=facts.address,
            close=lambda: agent.release(pages),
        )
        return table, memory

    def finder(self, ours: BufferFacts) -> AddressFinder:
        """Start searching for other engines. Raises InputError."""
        agent = self._agent_of(ours)

        def staging() -> Staging:
            if self._staging is None:
                self._staging = Staging(agent, ours, self._device)
            return self._staging

        return AddressFinder(self._settings, ours.engine, agent, staging, of_states=self._of_states)

    def close(self) -> None:
        """Shut the agent down. Nothing may use it afterwards."""
        if self._agent is None:
            return
        if self._staging is not None:
            self._staging.close()
        self._agent.close()
        self._agent = self._staging = None

    def _agent_of(self, ours: BufferFacts) -> Agent:
        if self._agent is None:
            kind = ".states" if self._of_states else ""
            self._agent = NixlAgent(f"{ours.engine}.{ours.rank}{kind}", self._settings.backend)
        return self._agent


class AnnouncedTable(SlotTable):
    """This rank's slot table, in registered memory that a PageServer announces."""

    def __init__(
        self, agent: Agent, facts: BufferFacts, pages: Buffer, settings: NixlSettings
    ) -> None:
        """`pages`: the buffer that the table describes. Raises InputError."""
        self._agent = agent
        self._buffer = agent.allocate(table_bytes(facts.num_slots), torch.device("cpu"))
        self._buffer.bytes_X.zero_()
        super().__init__(facts, memoryview(self._buffer.bytes_X.numpy()))
        self._server: PageServer | None = None
        self._path: Path | None = None
        first = facts.num_ranks if facts.of_states else 0
        port = settings.port + first + facts.rank if settings.port else 0
        try:
            self._server = PageServer(
                (settings.host, port),
                Announcement(
                    facts=facts,
                    metadata=agent.metadata,
                    pages=pages.region,
                    table=self._buffer.region,
                ),
                settings.secret,
            )
            self._path = write_address(settings.common.path, facts, self._server.address)
        except OSError as error:
            self.close()
            raise InputError(
                f"{FLAG} path",
                f"{settings.common.path} cannot be used: {one_line(error)}",
                "give a folder that this user can write to",
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all connections, by which readers notice that the buffer is gone."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
        if self._server is not None:
            self._server.close()
        super().close()
        self._agent.release(self._buffer)
