"""A command that has to fail, and what its error says."""

from qserve.cli import main


def fails_with(capsys, arguments, *words):
    assert main(arguments) == 1
    captured = capsys.readouterr()
    line = captured.err.strip().splitlines()[-1]
    num_words = 1 + (arguments[0] == "bench")
    assert line.startswith(f"qserve {' '.join(arguments[:num_words])}: ")
    for word in words:
        assert word in line
    return captured
