"""`python -m qserve.bench.offline.start_once SETTINGS INPUT_LEN`: print times of one start as JSON.

The clock starts before the first import. The parent process adds the time before that.
"""

import time

BEGUN = time.time()

import json  # noqa: E402  (the clock starts before the imports)
import logging  # noqa: E402
import sys  # noqa: E402


class PhaseTimes(logging.Handler):
    """Collects the times of phases that qserve/engine/start_phases.py logs."""

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
    from qserve.params.sampling_params import SamplingParams

    imported = time.time()
    settings, input_len = json.loads(sys.argv[1]), int(sys.argv[2])
    check_input_len(EngineConfig(**settings), input_len, 1)
    llm = LLM(**settings)
    ready = time.time()
    params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0, detokenize=False)
    llm.generate([[5] * input_len], params, use_tqdm=False)
    times = {"begun": BEGUN, "imported": imported, "ready": ready, "first_token": time.time()}
    print(json.dumps(times | {"phases": phases.seconds}))


if __name__ == "__main__":
    main()
