"""RayExecutor: runs ranks on the nodes of a Ray cluster. Ray places them and reports their death.

A Ray actor reserves a rank's GPU and starts the rank's process, which connects to the leader. Calls
use that connection: a call through Ray takes 0.6 ms (on two CPU cores), which may be as long as a
whole step. The model folder must be at the same path on every node. A process needs the token to
connect, but the traffic is not encrypted: all nodes must belong to one trusted network.
"""

import contextlib
import hmac
import os
import secrets
import socket
import subprocess
import sys
import threading
from pathlib import Path

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.distributed.executors import MODULE, OnDeath, log_level
from qserve.engine.distributed.rank_channel import Failure, RankChannel, call
from qserve.engine.distributed.rank_process import TOKEN_VARIABLE
from qserve.processes import frames

FLAG = "--distributed-executor-backend ray"
PLACE_SECONDS = 120.0  # time for the cluster to find resources
CONNECT_SECONDS = 180.0  # time for a rank to start and connect
END_SECONDS = 5.0
HOME = str(Path(__file__).resolve().parents[2])


class RayRank:
    """The actor: reserves resources of a node and starts the rank's process on them."""

    def place(self) -> tuple[str, int]:
        """Return the node's address and the index of the GPU; -1: no GPU."""
        import ray

        ids = ray.get_gpu_ids()
        return ray.util.get_node_ip_address(), int(ids[0]) if ids else -1

    def start(self, host: str, port: int, token: str, rank: int, level: str) -> None:
        """Start the rank's process, which connects to the leader at `host` and `port`."""
        arguments = [f"--connect={host}:{port}", f"--rank={rank}", f"--log-level={level}"]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, *arguments],
            env={**os.environ, TOKEN_VARIABLE: token},
            stdin=subprocess.DEVNULL,
        )

    def wait(self, seconds: float | None) -> int | None:
        """Wait for the process. Returns its exit code, or None if it still runs."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


class RayRankHandle:
    """A rank whose process was started by an actor."""

    def __init__(self, actor: object) -> None:
        self._actor = actor

    def describe_end(self) -> str:
        import ray

        try:
            code = ray.get(self._actor.wait.remote(END_SECONDS), timeout=2 * END_SECONDS)
        except ray.exceptions.RayError as error:
            return f"its Ray actor is gone: {type(error).__name__}"
        if code is None:
            return "it closed its connection"
        return f"its process ended with code {code}; see the log of its node"

    def end(self) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._actor.wait.remote(END_SECONDS), timeout=2 * END_SECONDS)
            ray.kill(self._actor)

    def print_stacks(self) -> None:
        """Do nothing: `ray stack` on the rank's node prints them."""


class RayExecutor:
    """Runs ranks as processes started by Ray actors; also reserves the leader's GPU in Ray."""

    def __init__(self, config: EngineConfig, max_model_len: int) -> None:
        """Raises InputError if Ray is not installed or not running, or lacks resources."""
        ray = _ray()
        self._config, self._max_model_len = config, max_model_len
        uses_gpus = config.device != "cpu" and bool(ray.cluster_resources().get("GPU"))
        self._here = ray.util.get_node_ip_address()
        bundle = {"CPU": 1.0, **({"GPU": 1.0} if uses_gpus else {})}
        # The leader's bundle must be on this node: otherwise Ray gives the leader's GPU to others.
        bundles = [{**bundle, f"node:{self._here}": 0.001}]
        bundles += [bundle for _ in range(config.num_ranks - 1)]
        self._group = ray.util.placement_group(bundles, strategy="PACK")
        try:
            ray.get(self._group.ready(), timeout=PLACE_SECONDS)
        except ray.exceptions.GetTimeoutError:
            ray.util.remove_placement_group(self._group)
            raise InputError(
                FLAG,
                f"the cluster has no resources for {config.num_ranks} x {bundle}",
                "add nodes, or use fewer ranks",
            ) from None
        self._actors = [
            self._start_actor(ray, index, uses_gpus) for index in range(config.num_ranks)
        ]
        self._nodes = ray.get([actor.place.remote() for actor in self._actors])
        self._port = _free_port(self._here)

    def _start_actor(self, ray: object, index: int, uses_gpus: bool) -> object:
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=index
        )
        path = os.environ.get("PYTHONPATH")
        variables = {
            "PYTHONPATH": f"{HOME}{os.pathsep}{path}" if path else HOME,
            # Ranks of a node see all of its GPUs, so that they can access each other's memory.
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        }
        options = {"num_cpus": 1, "num_gpus": int(uses_gpus), "max_concurrency": 4}
        return (
            ray.remote(RayRank)
            .options(scheduling_strategy=strategy, runtime_env={"env_vars": variables}, **options)
            .remote()
        )

    @property
    def address(self) -> str:
        """Rendezvous address of the ranks."""
        return f"tcp://{self._here}:{self._port}"

    @property
    def leader_index(self) -> int:
        """Index of the leader's device on its machine."""
        return max(0, self._nodes[0][1])

    @property
    def num_here(self) -> int:
        """Number of devices that the leader's machine must have."""
        return self.leader_index + 1

    def start(self, on_death: OnDeath) -> list[RankChannel]:
        """Start ranks 1 and up, and send each its first call."""
        token = secrets.token_hex(32)
        others = range(1, self._config.num_ranks)
        with socket.create_server((self._here, 0)) as server:
            port = server.getsockname()[1]
            for rank in others:
                self._actors[rank].start.remote(self._here, port, token, rank, log_level())
            server.settimeout(CONNECT_SECONDS)
            connections = _accept(server, token, len(others))
        links = []
        for rank in others:
            link = RankChannel(rank, connections[rank], RayRankHandle(self._actors[rank]), on_death)
            index = max(0, self._nodes[rank][1])
            first = (self._config, self._max_model_len, rank, index, index + 1, self.address)
            link.send(call("start", *first))
            threading.Thread(
                target=_watch, args=(self._actors[rank], rank, on_death), daemon=True
            ).start()
            links.append(link)
        return links

    def end(self) -> None:
        """Remove the placement group. Call only after the ranks have ended."""
        import ray

        if ray.is_initialized():
            ray.kill(self._actors[0])
            ray.util.remove_placement_group(self._group)


def _ray() -> object:
    """Return the module `ray`, connected to a cluster. Raises InputError."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise InputError(FLAG, "Ray is not installed", 'pip install "qserve-kit[ray]"') from None
    if not ray.is_initialized():
        try:
            ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=True)
        except ConnectionError as error:
            raise InputError(
                FLAG,
                f"found no cluster: {str(error).partition(chr(10))[0]}",
                "run `ray start --head` here, and `ray start --address` on the other nodes",
            ) from None
    return ray


def _accept(server: socket.socket, token: str, count: int) -> dict[int, socket.socket]:
    """Accept the connections of ranks 1 to `count`. Connections without the token are closed."""
    found: dict[int, socket.socket] = {}
    while len(found) < count:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            missing = sorted(set(range(1, count + 1)) - found.keys())
            raise InputError(
                f"rank {missing[0]}",
                f"did not connect within {CONNECT_SECONDS:.0f} s",
                "check the logs of its Ray worker",
            ) from None
        connection.settimeout(END_SECONDS)
        try:
            rank, _, given = frames.receive(connection).decode(errors="replace").partition(" ")
        except (EOFError, OSError, frames.MessageError):
            given = ""
        if not hmac.compare_digest(given.encode(), token.encode()):
            connection.close()
            continue
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found[int(rank)] = connection
    return found


def _watch(actor: object, rank: int, on_death: OnDeath) -> None:
    """Report the death of an actor. Needed because a lost node closes no connection."""
    import ray

    try:
        ray.get(actor.wait.remote(None))
    except ray.exceptions.RayActorError as error:
        on_death(Failure(rank, "", f"its Ray actor is gone: {type(error).__name__}", ""))
    except ray.exceptions.RayError:
        return  # Ray is shutting down


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]
