"""Database: the SQLite file of the response store, opened, bounded and written in transactions.

A record is a response or a conversation. It has an owner (a digest of the client's API key), a JSON
body and items. Every statement names the owner, so that no client reaches another one's records.
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
BUSY_SECONDS = 5.0  # for a lock of another process
RECORD_BYTES = 256  # of a record in addition to its texts
EVICTED_AT_ONCE = 64  # expired records that one write deletes at most
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
    """Limits of what is kept."""

    num_bytes: int  # of all records
    seconds: float  # since the last use of a record


class Database:
    """One connection. Use it from one thread at a time."""

    def __init__(self, path: str, bounds: Bounds) -> None:
        """Open the file, or create it for its owner alone. Raises InputError."""
        self.path, self._bounds = path, bounds
        try:
            # SQLite would create the file with the permissions of the umask.
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
        run("PRAGMA recursive_triggers = ON")  # for the records that REPLACE deletes
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
        """Execute a statement; returns the number of changed rows."""
        return self._connection.execute(statement, values).rowcount

    def run_each(self, statement: str, rows: list[tuple]) -> None:
        self._connection.executemany(statement, rows)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All statements inside the block take effect, or none of them."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            # SQLite has rolled back already after some errors, such as a full disk.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    @property
    def cutoff(self) -> float:
        """Records that were last used before this time have expired."""
        return time.time() - self._bounds.seconds

    def make_room(self, owner: str, record: str, num_bytes: int) -> None:
        """Delete expired records, then others until a record of this size fits.

        The next record to go is the least recently used one of the owner that has the most bytes.
        Call it inside of the transaction that writes the record. Raises StoreError.
        """
        if num_bytes > self._bounds.num_bytes:
            raise StoreError(
                413,
                f"expected at most {self._bounds.num_bytes} bytes to store, found {num_bytes}.",
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
    """The statements of a script; those of a trigger contain semicolons."""
    statement = ""
    for line in script.strip().splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
