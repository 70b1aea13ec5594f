"""ProfileControl: starts and stops recordings of an engine's steps, by request or step count."""

import logging

from formats.errors import InputError
from qserve.profile.profiler_config import ProfilerConfig
from qserve.profile.recorder import Recorder
from qserve.profile.report import write_report

logger = logging.getLogger(__name__)


class ProfileControl:
    """Controls one recording at a time. While `is_armed`, call `after_step` after each step."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._config = ProfilerConfig()
        self._num_recordings = 0
        self._delay_left = 0
        self.is_armed = False

    def start(self, config: ProfilerConfig) -> None:
        """Start a recording. Raises InputError if one is running."""
        if self.is_armed:
            raise InputError("profiler", "is already recording", "stop it first")
        self._config, self._delay_left, self.is_armed = config, config.delay, True
        if not config.delay:
            self._begin()

    def stop(self) -> None:
        """Stop the recording, if any, and write the trace."""
        self.is_armed = False
        path = self.recorder.stop()
        if path is not None and self.recorder.num_steps:
            text = write_report(path)
            path.with_name(path.name.replace(".pt.trace.json.gz", ".profiler_out.txt")).write_text(
                text + "\n", encoding="utf-8"
            )
            logger.info("%s", text)

    def after_step(self) -> None:
        """Count a step. Start or stop the recording if it is time."""
        try:
            if self._delay_left:
                self._delay_left -= 1
                if not self._delay_left:
                    self._begin()
            elif self._config.most and self.recorder.num_steps >= self._config.most:
                self.stop()
        except (InputError, OSError) as error:
            # Log the error: no caller waits for it, and a failed profile must not end requests.
            logger.error("Profiling stopped: %s", error)
        except Exception:
            logger.exception("Profiling failed")

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
