"""One start: `python -m qserve.bench.start_once SETTINGS INPUT_LEN` prints its times as JSON.

Its own clock begins with the first import; who starts it adds the time before.
"""

import time

BEGUN = time.time()

import json  # noqa: E402  (the clock comes first)
import logging  # noqa: E402
import sys  # noqa: E402


class PhaseTimes(logging.Handler):
    """Collects what qserve/engine/start_phases.py logs."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and len(record.args) == 2:
            self.seconds[str(record.args[0])] = float(record.args[1])


def main() -> None:
    phases = PhaseTimes()
    logger = logging.getLogger("qserve.engine.start_phases")
    logger.addHandler(phases)
    logger.setLevel(logging.INFO)
    from qserve.config import EngineConfig
    from qserve.engine.sizes import check_input_len
    from qserve.llm import LLM
    from qserve.sampling_params import SamplingParams

    imported = time.time()
    settings, input_len = json.loads(sys.argv[1]), int(sys.argv[2])
    check_input_len(EngineConfig(**settings), input_len, 1)
    llm = LLM(**settings)
    ready = time.time()
    params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0)
    llm.generate([[5] * input_len], params, use_tqdm=False, detokenize=False)
    times = {"begun": BEGUN, "imported": imported, "ready": ready, "first_token": time.time()}
    print(json.dumps(times | {"phases": phases.seconds}))


if __name__ == "__main__":
    main()
