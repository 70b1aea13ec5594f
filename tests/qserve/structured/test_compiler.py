"""GrammarCompiler: what is kept, and what is not."""

import pytest

from qserve.errors import ParameterError
from qserve.structured import compiler as module
from qserve.structured.compiler import GrammarCompiler
from qserve.structured.params import StructuredOutputsParams

PARAMS = StructuredOutputsParams(regex="[ab]+")


@pytest.fixture
def compiler(docs_5m):
    return GrammarCompiler(str(docs_5m), vocab_size=8192, eos_token_ids={2})


def test_the_same_grammar_is_compiled_once(compiler):
    first = compiler.submit(PARAMS)
    assert not compiler.constraint(first.result()).is_complete
    assert compiler.submit(PARAMS) is first


def test_grammar_refused_for_its_time_is_tried_again(compiler, monkeypatch):
    monkeypatch.setattr(module, "MAX_FIRST_MASK_SECONDS", -1)
    with pytest.raises(ParameterError, match="too complex"):
        compiler.submit(PARAMS).result()
    monkeypatch.undo()
    assert not compiler.constraint(compiler.submit(PARAMS).result()).is_complete
    assert compiler._num_chars == sum(map(len, compiler._compiled))
