"""The quantized tiny models that the tests of ranks share."""

from tests.qserve.model.conftest import written  # noqa: F401
