"""PrefixTable: predicts which of several servers has already computed the start of a prompt.

The table divides a text into blocks; the hash of a block covers all blocks before it. For each
server the table keeps the latest blocks that were sent there. A prompt goes to the server with most
of its blocks, unless that server has much more load than the least loaded one.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from hashlib import blake2b

BLOCK = 256  # characters: about 64 tokens
MAX_BLOCKS = 1024  # per text, counted from its start
KEPT_BLOCKS = 200_000  # per server: about 13 M tokens, 20 MB
# Load takes precedence over cached blocks only if both limits are exceeded (the values of SGLang's
# router). Below them, waiting for other requests costs less than recomputing a prompt.
MUCH_MORE, TIMES_MORE = 32, 1.5


class PrefixTable:
    """Blocks of text that were sent to each server."""

    def __init__(self, *, block: int = BLOCK, kept_blocks: int = KEPT_BLOCKS) -> None:
        self._block, self._kept_blocks = block, kept_blocks
        self._blocks: dict[str, OrderedDict[bytes, None]] = {}

    def keep(self, servers: Collection[str]) -> None:
        """Forget the servers that are not in `servers`."""
        self._blocks = {name: self._blocks.get(name, OrderedDict()) for name in servers}

    def choose(self, text: bytes, loads: Mapping[str, float]) -> list[str]:
        """Sort the servers of `loads`, best first, and record the text for the first one.

        `loads`: server -> requests in progress. Ties in cached text go to the lower load, then to
        the server that was sent fewer blocks so far.
        """
        keys = self._keys(text)
        have = {name: self._num_matched(name, keys) for name in loads}
        least = min(loads.values(), default=0)

        def is_busy(name: str) -> bool:
            return loads[name] - least > MUCH_MORE and loads[name] > TIMES_MORE * least

        order = sorted(
            loads,
            key=lambda name: (
                is_busy(name),
                0 if is_busy(name) else -have[name],
                loads[name],
                len(self._blocks.get(name, ())),
            ),
        )
        if order:
            self._note(order[0], keys)
        return order

    def matches(self, text: bytes, servers: Collection[str]) -> dict[str, int]:
        """Return, for each server, the number of leading blocks of a text that were sent there."""
        keys = self._keys(text)
        return {name: self._num_matched(name, keys) for name in servers}

    def note(self, text: bytes, server: str) -> None:
        """Record that a text was sent to a server."""
        self._note(server, self._keys(text))

    def _note(self, server: str, keys: list[bytes]) -> None:
        blocks = self._blocks.setdefault(server, OrderedDict())
        for key in reversed(keys):  # so that the end of a text is dropped before its beginning
            blocks[key] = None
            blocks.move_to_end(key)
        while len(blocks) > self._kept_blocks:
            blocks.popitem(last=False)

    def _num_matched(self, server: str, keys: list[bytes]) -> int:
        blocks = self._blocks.get(server)
        if not blocks:
            return 0
        for count, key in enumerate(keys):
            if key not in blocks:
                return count
        return len(keys)

    def _keys(self, text: bytes) -> list[bytes]:
        """Return the hashes of the full blocks. A text shorter than one block gives one hash."""
        last = max(self._block, len(text) // self._block * self._block)
        last = min(last, MAX_BLOCKS * self._block)
        keys, key = [], b""
        for start in range(0, last, self._block):
            key = blake2b(key + text[start : start + self._block], digest_size=8).digest()
            keys.append(key)
        return keys
