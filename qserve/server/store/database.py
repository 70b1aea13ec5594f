"""Database: the SQLite file of the response store, its schema, its limits and its transactions.

A record is a response or a conversation. It has an owner (a digest of the client's API key), a JSON
body and items. Every statement names the owner, so no client can access another client's records.
"""

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from formats.errors import InputError, one_line
from qserve.server.store.errors import StoreError

APPLICATION_ID = 0x71737276  # "qsrv"
VERSION = 1
BUSY_SECONDS = 5.0  # how long to wait for a lock of another process
RECORD_BYTES = 256  # overhead of a record, in addition to its texts
EVICTED_AT_ONCE = 64  # maximum number of expired records that one write deletes
SCHEMA = """
CREATE TABLE records (
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    created INTEGER NOT NULL,
    used REAL NOT NULL,
    num_bytes INTEGER NOT NULL,
    previous TEXT,  -- the response that this one continues
    body BLOB NOT NULL,
    PRIMARY KEY (owner, id)
);
CREATE INDEX records_by_use ON records (owner, used);
CREATE INDEX records_by_age ON records (used);
CREATE TABLE items (
    owner TEXT NOT NULL,
    record TEXT NOT NULL,
    position INTEGER NOT NULL,
    id TEXT NOT NULL,
    is_output INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (owner, record, position),
    FOREIGN KEY (owner, record) REFERENCES records (owner, id) ON DELETE CASCADE
);
CREATE INDEX items_by_id ON items (owner, id);
CREATE TABLE owners (owner TEXT PRIMARY KEY, num_bytes INTEGER NOT NULL);
CREATE TRIGGER record_added AFTER INSERT ON records BEGIN
    INSERT INTO owners VALUES (new.owner, new.num_bytes)
        ON CONFLICT (owner) DO UPDATE SET num_bytes = num_bytes + new.num_bytes;
END;
CREATE TRIGGER record_grown AFTER UPDATE OF num_bytes ON records BEGIN
    UPDATE owners SET num_bytes = num_bytes + new.num_bytes - old.num_bytes
        WHERE owner = new.owner;
END;
CREATE TRIGGER record_deleted AFTER DELETE ON records BEGIN
    UPDATE owners SET num_bytes = num_bytes - old.num_bytes WHERE owner = old.owner;
    DELETE FROM owners WHERE owner = old.owner AND num_bytes <= 0;
END;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of the store."""

    num_bytes: int  # maximum size of all records
    seconds: float  # a record expires this long after its last use


class Database:
    """One connection to the SQLite file. Use it from one thread at a time."""

    def __init__(self, path: str, bounds: Bounds) -> None:
        """Open the file, or create it, readable only by its owner. Raises InputError."""
        self.path, self._bounds = path, bounds
        try:
            # SQLite would create the file with permissions by the umask.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            os.chmod(path, 0o600)
            self._connection = sqlite3.connect(
                path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._open()
        except OSError as error:
            raise self._unusable(f"cannot be opened: {one_line(error)}") from error
        except sqlite3.Error as error:
            raise self._unusable(f"cannot be used as a database: {one_line(error)}") from error

    def _open(self) -> None:
        run = self._connection.execute
        run("PRAGMA foreign_keys = ON")
        run("PRAGMA recursive_triggers = ON")  # REPLACE must fire the delete trigger
        run("PRAGMA secure_delete = ON")
        run("PRAGMA synchronous = NORMAL")
        (application,) = run("PRAGMA application_id").fetchone()
        (version,) = run("PRAGMA user_version").fetchone()
        (num_tables,) = run("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if num_tables == 0:
            with self.transaction():
                for statement in _statements(SCHEMA):
                    run(statement)
                run(f"PRAGMA application_id = {APPLICATION_ID}")
                run(f"PRAGMA user_version = {VERSION}")
        elif application != APPLICATION_ID:
            raise self._unusable("is a database of another program")
        elif version != VERSION:
            raise self._unusable(f"has version {version}, expected {VERSION}")

    def _unusable(self, problem: str) -> InputError:
        return InputError(
            "--response-store",
            f"{Path(self.path)} {problem}",
            "move the file away, or choose another path",
        )

    def close(self) -> None:
        self._connection.close()

    def rows(self, statement: str, *values: object) -> list[tuple]:
        return self._connection.execute(statement, values).fetchall()

    def row(self, statement: str, *values: object) -> tuple | None:
        return self._connection.execute(statement, values).fetchone()

    def run(self, statement: str, *values: object) -> int:
        """Execute a statement. Returns the number of changed rows."""
        return self._connection.execute(statement, values).rowcount

    def run_each(self, statement: str, rows: list[tuple]) -> None:
        self._connection.executemany(statement, rows)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the `with` block as a transaction: an exception rolls all its statements back."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            # After some errors, such as a full disk, SQLite has already rolled back.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    @property
    def cutoff(self) -> float:
        """Records last used before this time have expired."""
        return time.time() - self._bounds.seconds

    def make_room(self, owner: str, record: str, num_bytes: int) -> None:
        """Delete expired records, then more records until a record of this size fits.

        The victim is the least recently used record of the owner with the most bytes. Call this
        method inside the transaction that writes the record. Raises StoreError.
        """
        if num_bytes > self._bounds.num_bytes:
            raise StoreError(
                413,
                f"expected at most {self._bounds.num_bytes} bytes to store, found {num_bytes}.",
                "Shorten the conversation, or send store: false.",
            )
        self.run(
            "DELETE FROM records WHERE rowid IN (SELECT rowid FROM records WHERE used < ? LIMIT ?)",
            *(self.cutoff, EVICTED_AT_ONCE),
        )
        while True:
            (total,) = self.row("SELECT COALESCE(SUM(num_bytes), 0) FROM owners")
            (own,) = self.row(
                "SELECT COALESCE(SUM(num_bytes), 0) FROM records WHERE owner = ? AND id = ?",
                *(owner, record),
            )
            if total - own + num_bytes <= self._bounds.num_bytes:
                return
            victim = self.row(
                "SELECT owner, id FROM records WHERE owner ="
                " (SELECT owner FROM owners ORDER BY num_bytes DESC LIMIT 1)"
                " AND NOT (owner = ? AND id = ?) ORDER BY used LIMIT 1",
                *(owner, record),
            ) or self.row(
                "SELECT owner, id FROM records WHERE NOT (owner = ? AND id = ?)"
                " ORDER BY used LIMIT 1",
                *(owner, record),
            )
            if victim is None:
                return
            self.run("DELETE FROM records WHERE owner = ? AND id = ?", *victim)


def _statements(script: str) -> Iterator[str]:
    """Yield the statements of a script. Trigger definitions contain semicolons."""
    statement = ""
    for line in script.strip().splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
