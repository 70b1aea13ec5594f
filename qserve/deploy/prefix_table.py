"""PrefixTable: which of several servers has likely computed how a prompt begins. Knows no network.

A text is cut into blocks; each block's hash covers all blocks before it. A server has the blocks
of what was sent there, as many of the latest as are kept. A prompt goes to the server that has most
of its blocks, unless that one has much more to do than the one that has least.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from hashlib import blake2b

BLOCK = 256  # characters: some 64 tokens
MAX_BLOCKS = 1024  # of a text that are looked at
KEPT_BLOCKS = 200_000  # of a server: some 13 M tokens, 20 MB
# Both must be exceeded before load counts more than what a server has (the figures of SGLang's
# router): below, waiting behind some others costs less than computing a prompt again.
MUCH_MORE, TIMES_MORE = 32, 1.5


class PrefixTable:
    """What each server was sent."""

    def __init__(self, *, block: int = BLOCK, kept_blocks: int = KEPT_BLOCKS) -> None:
        self._block, self._kept_blocks = block, kept_blocks
        self._blocks: dict[str, OrderedDict[bytes, None]] = {}

    def keep(self, servers: Collection[str]) -> None:
        """Forget the servers that are not among these."""
        self._blocks = {name: self._blocks.get(name, OrderedDict()) for name in servers}

    def choose(self, text: bytes, loads: Mapping[str, float]) -> list[str]:
        """The servers of `loads`, the best first; the text counts as sent to that one.

        `loads`: requests under way. Of servers that have equally much of the text the one with
        less to do comes first, then the one that was sent less so far.
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

    def note(self, text: bytes, server: str) -> None:
        """A text was sent to a server."""
        self._note(server, self._keys(text))

    def _note(self, server: str, keys: list[bytes]) -> None:
        blocks = self._blocks.setdefault(server, OrderedDict())
        for key in reversed(keys):  # so that the end of a text goes before its beginning
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
        """Of the full blocks; of a text that is shorter than one, of all of it."""
        last = max(self._block, len(text) // self._block * self._block)
        last = min(last, MAX_BLOCKS * self._block)
        keys, key = [], b""
        for start in range(0, last, self._block):
            key = blake2b(key + text[start : start + self._block], digest_size=8).digest()
            keys.append(key)
        return keys
