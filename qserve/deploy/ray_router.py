"""Request routers for Ray Serve: by cached prefix, and round robin.

Ray creates a router in each process that sends requests; here that is the gateway (ray_gateway.py).
"""

from ray.serve.request_router import (
    FIFOMixin,
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from qserve.engine.ipc.prefix_table import PrefixTable

# DeploySettings.router -> import path of the router class
ROUTER_PATHS = {
    "prefix": "qserve.deploy.ray_router:PrefixRouter",
    "round-robin": "qserve.deploy.ray_router:RoundRobinRouter",
    "power-of-two": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
}


class _Router(LocalityMixin, MultiplexMixin, RequestRouter):
    """Base class that prefers, for a request that names a model, replicas that have it loaded."""

    def candidates(
        self, replicas: list[RunningReplica], request: PendingRequest | None
    ) -> list[RunningReplica]:
        if request is None or not request.metadata.multiplexed_model_id:
            return replicas
        holders = self.apply_multiplex_routing(pending_request=request)
        return [each for each in replicas if each.replica_id in holders]


class PrefixRouter(_Router):
    """Prefer the replica that has seen most of the prompt, unless its load is much higher."""

    def initialize_state(self, **options: int) -> None:
        """Create the table of prefixes. `options`: arguments of PrefixTable."""
        self._table = PrefixTable(**options)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._table.keep([each.replica_id.to_full_id_str() for each in replicas])

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        replicas = self.candidates(candidate_replicas, pending_request)
        by_name = {each.replica_id.to_full_id_str(): each for each in replicas}
        queued = self.replica_queue_len_cache
        loads = {name: queued.get(each.replica_id) or 0 for name, each in by_name.items()}
        order = self._table.choose(_text(pending_request), loads)
        return [[by_name[name]] for name in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Record which replica got the request; it may not be the first choice."""
        self._table.note(_text(pending_request), replica_id.to_full_id_str())


class RoundRobinRouter(FIFOMixin, _Router):
    """Use each replica in turn, regardless of load; a baseline for comparison."""

    def initialize_state(self) -> None:
        self._turn = 0

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        replicas = self.candidates(candidate_replicas, pending_request)
        replicas = sorted(replicas, key=lambda each: each.replica_id.unique_id)
        self._turn += 1
        first = self._turn % max(1, len(replicas))
        return [[each] for each in (*replicas[first:], *replicas[:first])]


def _text(request: PendingRequest | None) -> bytes:
    return getattr(request.args[0], "text", b"") if request is not None and request.args else b""
