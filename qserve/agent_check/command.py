"""Definition of the command `qserve agent-check`. The tasks are imported only when it runs."""

from qserve.agent_check.settings import AgentCheckConfig
from qserve.command_line.command import Command


def _run(target: str, config: AgentCheckConfig) -> int:
    from qserve.agent_check.check import check

    return check(target, config)


AGENT_CHECK = Command(
    help="run agent tasks (tools, results, streams) against a server, over three APIs",
    settings=(AgentCheckConfig,),
    run=_run,
    argument="target",
    argument_help="URL of a server, or a model folder to serve for the check",
)
