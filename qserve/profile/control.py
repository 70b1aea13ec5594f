"""ProfileControl: an engine's recordings on request, which may begin and end by step counts."""

import logging

from formats.errors import InputError
from qserve.profile.profiler_config import ProfilerConfig
from qserve.profile.recorder import Recorder
from qserve.profile.report import write_report

logger = logging.getLogger(__name__)


class ProfileControl:
    """One recording at a time. `is_armed` is False where a step has nothing to do for it."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._config = ProfilerConfig()
        self._num_recordings = 0
        self._delay_left = 0
        self.is_armed = False

    def start(self, config: ProfilerConfig) -> None:
        """Raises InputError where one is under way."""
        if self.is_armed:
            raise InputError("profiler", "is recording already", "stop it first")
        self._config, self._delay_left, self.is_armed = config, config.delay, True
        if not config.delay:
            self._begin()

    def stop(self) -> None:
        """End it and write the trace; nothing where none is under way."""
        self.is_armed = False
        path = self.recorder.stop()
        if path is not None and self.recorder.num_steps:
            text = write_report(path)
            path.with_name(path.name.replace(".pt.trace.json.gz", ".profiler_out.txt")).write_text(
                text + "\n", encoding="utf-8"
            )
            logger.info("%s", text)

    def after_step(self) -> None:
        """Count a step, where `is_armed`."""
        try:
            if self._delay_left:
                self._delay_left -= 1
                if not self._delay_left:
                    self._begin()
            elif self._config.most and self.recorder.num_steps >= self._config.most:
                self.stop()
        except (InputError, OSError) as error:
            # Nobody waits for an answer here, and requests must not end with a profile.
            logger.error("The profile ended: %s", error)

    def _begin(self) -> None:
        config = self._config
        try:
            self.recorder.start(
                config.path(self._num_recordings), with_stack=config.with_stack, kind=config.kind
            )
        except BaseException:
            self.is_armed = False
            raise
        self._num_recordings += 1
