"""Ranks on the nodes of a Ray cluster: Ray places them and tells of their death, no more.

An actor holds a rank's GPU and starts its process there, which connects to the leader. Calls travel
over that connection: one through Ray takes 0.6 ms (two CPU cores), as much as a step may. The model
folder must be at the same path on every node. Only who has the token may connect, but what is sent
is not encrypted: nodes belong to one trusted network.
"""

import contextlib
import hmac
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from formats.errors import InputError
from qserve import frames
from qserve.config import EngineConfig
from qserve.engine.rank_executors import MODULE, OnDeath, log_level
from qserve.engine.rank_link import Failure, RankLink, call
from qserve.engine.rank_process import TOKEN_VARIABLE

FLAG = "--distributed-executor-backend ray"
PLACE_SECONDS = 120.0  # that a cluster has to find room
CONNECT_SECONDS = 180.0  # that a rank has to start and connect
END_SECONDS = 5.0
HOME = str(Path(__file__).resolve().parents[2])


class Seat:
    """The actor: a place on a node, and the process of the rank that has it."""

    def place(self) -> tuple[str, int]:
        """The node's address, and the number of the GPU; -1: none."""
        import ray

        ids = ray.get_gpu_ids()
        return ray.util.get_node_ip_address(), int(ids[0]) if ids else -1

    def start(self, host: str, port: int, token: str, rank: int, level: str) -> None:
        """Start the process, which connects to the leader at that address."""
        arguments = [f"--connect={host}:{port}", f"--rank={rank}", f"--log-level={level}"]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, *arguments],
            env={**os.environ, TOKEN_VARIABLE: token},
            stdin=subprocess.DEVNULL,
        )

    def wait(self, seconds: float | None) -> int | None:
        """The process's exit code; None: it runs."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


class SeatHandle:
    """A rank whose process an actor holds."""

    def __init__(self, seat: object) -> None:
        self._seat = seat

    def describe_end(self) -> str:
        import ray

        try:
            code = ray.get(self._seat.wait.remote(END_SECONDS), timeout=2 * END_SECONDS)
        except ray.exceptions.RayError as error:
            return f"its Ray actor is gone: {type(error).__name__}"
        if code is None:
            return "it closed its connection"
        return f"its process ended with code {code}; the log lines of its node say why"

    def end(self) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._seat.wait.remote(END_SECONDS), timeout=2 * END_SECONDS)
            ray.kill(self._seat)


class RayExecutor:
    """Ranks as processes that actors of a cluster hold, the leader's GPU among their places."""

    def __init__(self, config: EngineConfig, max_model_len: int) -> None:
        """Raises InputError where Ray is not installed, not there, or has no room."""
        ray = _ray()
        self._config, self._max_model_len = config, max_model_len
        uses_gpus = config.device != "cpu" and bool(ray.cluster_resources().get("GPU"))
        self._here = ray.util.get_node_ip_address()
        bundle = {"CPU": 1.0, **({"GPU": 1.0} if uses_gpus else {})}
        # The leader's place is on this node, or Ray would give its GPU to others.
        bundles = [{**bundle, f"node:{self._here}": 0.001}]
        bundles += [bundle for _ in range(config.num_ranks - 1)]
        self._group = ray.util.placement_group(bundles, strategy="PACK")
        try:
            ray.get(self._group.ready(), timeout=PLACE_SECONDS)
        except ray.exceptions.GetTimeoutError:
            ray.util.remove_placement_group(self._group)
            raise InputError(
                FLAG,
                f"the cluster has no room for {config.num_ranks} of {bundle}",
                "add nodes, or use fewer ranks",
            ) from None
        self._seats = [self._seat(ray, index, uses_gpus) for index in range(config.num_ranks)]
        self._places = ray.get([seat.place.remote() for seat in self._seats])
        self._port = _free_port(self._here)

    def _seat(self, ray: object, index: int, uses_gpus: bool) -> object:
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=index
        )
        path = os.environ.get("PYTHONPATH")
        variables = {
            "PYTHONPATH": f"{HOME}{os.pathsep}{path}" if path else HOME,
            # Ranks of a node see all of its GPUs: they reach each other's memory.
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        }
        options = {"num_cpus": 1, "num_gpus": int(uses_gpus), "max_concurrency": 4}
        return (
            ray.remote(Seat)
            .options(scheduling_strategy=strategy, runtime_env={"env_vars": variables}, **options)
            .remote()
        )

    @property
    def address(self) -> str:
        """Where all ranks meet."""
        return f"tcp://{self._here}:{self._port}"

    @property
    def leader_index(self) -> int:
        """The number of the leader's device on its machine."""
        return max(0, self._places[0][1])

    @property
    def num_here(self) -> int:
        """Devices that the leader's machine must have."""
        return self.leader_index + 1

    def start(self, on_death: OnDeath) -> list[RankLink]:
        """Start ranks 1 and up, and send each its first call."""
        token = secrets.token_hex(32)
        others = range(1, self._config.num_ranks)
        with socket.create_server((self._here, 0)) as server:
            port = server.getsockname()[1]
            for rank in others:
                self._seats[rank].start.remote(self._here, port, token, rank, log_level())
            server.settimeout(CONNECT_SECONDS)
            connections = _accept(server, token, len(others))
        links = []
        for rank in others:
            link = RankLink(rank, connections[rank], SeatHandle(self._seats[rank]), on_death)
            index = max(0, self._places[rank][1])
            first = (self._config, self._max_model_len, rank, index, index + 1, self.address)
            link.send(call("start", *first))
            threading.Thread(
                target=_watch, args=(self._seats[rank], rank, on_death), daemon=True
            ).start()
            links.append(link)
        return links

    def met(self) -> None:
        """All ranks have met."""

    def end(self) -> Callable[[], None]:
        """What gives the places back, once the ranks have ended."""
        group, seat = self._group, self._seats[0]

        def give_back() -> None:
            import ray

            if ray.is_initialized():
                ray.kill(seat)
                ray.util.remove_placement_group(group)

        return give_back


def _ray() -> object:
    """The module, connected to a cluster. Raises InputError."""
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
                f"finds no cluster: {str(error).partition(chr(10))[0]}",
                "run `ray start --head` here, and `ray start --address` on the other nodes",
            ) from None
    return ray


def _accept(server: socket.socket, token: str, count: int) -> dict[int, socket.socket]:
    """The connections of so many ranks. Others are closed."""
    found: dict[int, socket.socket] = {}
    while len(found) < count:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            missing = sorted(set(range(1, count + 1)) - found.keys())
            raise InputError(
                f"rank {missing[0]}",
                f"did not connect within {CONNECT_SECONDS:.0f} s",
                "look at the logs of its Ray worker",
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


def _watch(seat: object, rank: int, on_death: OnDeath) -> None:
    """Tell of the death of an actor, with which its node may be gone, and no connection closed."""
    import ray

    try:
        ray.get(seat.wait.remote(None))
    except ray.exceptions.RayActorError as error:
        on_death(Failure(rank, "", f"its Ray actor is gone: {type(error).__name__}", ""))
    except ray.exceptions.RayError:
        return  # Ray itself ends


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]
