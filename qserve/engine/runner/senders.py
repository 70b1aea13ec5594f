"""Senders: sends the pages and states of a rank's steps to other engines (kv_transfer/peer)."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from qserve.kv_transfer.peer.sender import PageSender


@dataclass(slots=True)
class Senders:
    """The senders of one rank. None: nothing is sent."""

    pages: PageSender | None = None
    states: PageSender | None = None

    @contextlib.contextmanager
    def around_forward(self, num_of_drafter: int) -> Iterator[None]:
        """Context for the forward pass of a step, whose pages may be sent.

        `num_of_drafter`: number of layers of the drafter, which runs later.
        """
        if self.pages is None:
            yield
            return
        self.pages.wait_for_last()
        with self._not_sending_failed():
            yield
            self.pages.send_rest(leaves=num_of_drafter)

    @contextlib.contextmanager
    def around_sampling(self) -> Iterator[None]:
        """Context for sampling, in which the drafter writes its pages."""
        if self.pages is None:
            yield
            return
        with self._not_sending_failed():
            yield
            self.pages.send_rest()

    def send_states(self) -> None:
        """Send states before the step's forward pass, which overwrites them.

        On a GPU the forward pass waits until they are copied.
        """
        if self.states is not None:
            self.states.send_rest()
            self.states.wait_for_last()

    @contextlib.contextmanager
    def _not_sending_failed(self) -> Iterator[None]:
        """Context for work whose pages and states are not sent if it fails."""
        try:
            yield
        except BaseException:
            for each in (self.pages, self.states):
                if each is not None:
                    each.forget_failed()
            raise
