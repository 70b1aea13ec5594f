"""Operations on a server in random order, and kills of its engine in the middle of them."""

import os
import random
import signal
import threading
import time

from load import NUM_PROMPTS, WAIT_SECONDS, Load, prompt
from server import Server, Wrong
from weights import NEW, OLD, Weights

from formats.errors import InputError
from qserve.training import send_weights


class Cycles:
    """Operations on the server, in random order."""

    def __init__(self, load: Load, server: Server, weights: Weights, parts: bool) -> None:
        self.load, self.server, self.weights, self._parts = load, server, weights, parts
        self._random = random.Random(5)
        self.in_use = self.of_folder = OLD
        self.version = self.version_of_folder = "0"
        self.after_restart = OLD  # of a folder; tensors cannot be read again
        self._number = 0

    def cycle(self) -> None:
        """Do one update, or one sleep and wake; at random also pause, and abort all requests."""
        chance, choice = self._random.random, self._random.choice
        self.load.wait_for_replies(1)
        time.sleep(0.05 * chance())
        if chance() < 0.3:
            self._tell(f"/pause?mode={choice(('wait', 'keep'))}")
            self._tell("/resume")
        if chance() < 0.1:
            self.load.num_aborts += 1
            self._tell("/abort_requests")
        if chance() < 0.6:
            self._sleep(choice((1, 2)), choice(("wait", "keep")), updates=chance() < 0.5)
        else:
            self.update(choice((OLD, NEW)))
        self.compare_digest()

    def _tell(self, path: str) -> None:
        self.server.json(path)

    def _sleep(self, level: int, mode: str, *, updates: bool) -> None:
        self._tell(f"/sleep?level={level}&mode={mode}")
        time.sleep(0.05 * self._random.random())
        if updates:
            self.update(self._random.choice((OLD, NEW)))
        lost = level == 2 and not updates
        back = self.of_folder if lost else self.in_use
        with self.load.changing(back):
            if self._random.random() < 0.5:
                self._tell("/wake_up?tags=weights")
                self._tell("/wake_up?tags=kv_cache")
            else:
                self._tell("/wake_up")
            if lost:
                self.in_use, self.version = self.of_folder, self.version_of_folder

    def update(self, which: int) -> None:
        with self.load.changing(which):
            self.send_update(which)
            self.in_use, self.version = which, f"v{self._number}"

    def send_update(self, which: int) -> None:
        self._number += 1
        mode, version = self._random.choice(("wait", "keep")), f"v{self._number}"
        if self._random.random() < 0.5:
            body = {"model_path": self.weights.folders[which], "mode": mode}
            self.server.json("/update_weights_from_disk", {**body, "weight_version": version})
            self.of_folder, self.version_of_folder = which, version
            self.after_restart = which
        else:
            part = self._random.choice((None, 2**20)) if self._parts else None
            send_weights(
                self.server.url,
                self.weights.tensors[which],
                api_key=self.server.key,
                version=version,
                mode=mode,
                part_bytes=part,
            )
            self.after_restart = OLD

    def compare_digest(self) -> None:
        found = self.server.json("/weights/digest", method="GET")
        if found["weight_version"] != self.version:
            raise Wrong(f"version {found['weight_version']}, expected {self.version}")
        if found["total"] != self.weights.digests[self.in_use]:
            raise Wrong(f"the digest is not that of weights {self.in_use}")

    def kill(self, seconds: float) -> str:
        """Kill the engine `seconds` after an operation began; return what the server said."""
        load, said = self.load, "it had ended before"
        load.num_kills += 1
        killer = threading.Timer(seconds, os.kill, (self.server.engine_pid(), signal.SIGKILL))
        is_update, which = self._random.random() < 0.7, 1 - self.in_use
        killer.start()
        try:
            if is_update:
                self.send_update(which)
            else:
                self._tell(f"/sleep?level={self._random.choice((1, 2))}&mode=keep")
                self._tell("/wake_up")
        except (Wrong, InputError) as error:
            said = str(error)
        killer.join()
        self._until_alive()
        self.in_use = self.after_restart
        found = self.server.json("/weights/digest", method="GET")["total"]
        if found != self.weights.digests[self.in_use]:
            raise Wrong(f"after a restart the digest is not that of weights {self.in_use}")
        self.version = self.server.json("/weight_info", method="GET")["weight_version"]
        load.history.append(self.in_use)
        for number in range(NUM_PROMPTS):
            tokens = self.server.complete(prompt(number), 12).tokens
            if tokens != self.weights.tokens(self.in_use, prompt(number), 12):
                raise Wrong(f"after a restart prompt {number} gave wrong tokens")
        load.num_kills += 1
        return f"{'update' if is_update else 'sleep'} killed after {seconds:.2f} s: {said}"

    def _until_alive(self) -> None:
        """Wait for the restart. Until then /health must be 503, and replies have Retry-After."""
        deadline, was_down = time.monotonic() + WAIT_SECONDS, False
        while (status := self.server.status("/health")) != 200 or not was_down:
            was_down = was_down or status == 503
            if time.monotonic() > deadline:
                raise Wrong("the engine was not started again")
            time.sleep(0.01)
