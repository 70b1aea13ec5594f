"""The server of the forty cases: its flags, and the numbers that the cases know of it."""

ORIGIN = "https://a.example"
KEY = "s3cret"
NUM_SEQS, NUM_QUEUED, NUM_PAGES, PAGE = 8, 40, 48, 16
CONTEXT = 256


def start_cases(start_server, folder):
    """A real server process."""
    return start_server(
        folder,
        *("--served-model-name", "docs", "also-docs", "--api-key", KEY),
        *("--max-model-len", str(CONTEXT), "--max-num-seqs", str(NUM_SEQS)),
        *("--max-num-queued-reqs", str(NUM_QUEUED), "--num-gpu-blocks-override", str(NUM_PAGES)),
        *("--admission", "fits"),  # so that outputs are preempted
        *("--allowed-origins", ORIGIN, "--restart-engine", "1", "--max-body-bytes", "4000000"),
    )
