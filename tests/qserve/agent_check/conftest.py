"""The scripted servers of the server's tests."""

from tests.qserve.server.conftest import make_server, run_live, tokenizer  # noqa: F401
