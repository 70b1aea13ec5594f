"""DeploySettings: how many engines, behind which router. Loads no torch and no ray."""

from dataclasses import dataclass

from formats.errors import InputError
from qserve.setting import check_settings, setting

BACKENDS = ("ray",)
ROUTERS = ("prefix", "power-of-two", "round-robin")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploySettings:
    """What `qserve serve` is told beside the engine's and the server's settings."""

    backend: str | None = setting(
        None, "what runs --replicas; ray: Ray Serve (pip install 'qserve-kit[ray]')", BACKENDS
    )
    replicas: int = setting(1, "engines, each with the whole model, behind one address", low=1)
    max_replicas: int | None = setting(
        None, "under load, add engines up to this number; --replicas is the minimum", low=1
    )
    target_ongoing_requests: int | None = setting(
        None,
        "requests under way per engine, beyond which engines are added; default: 0.8 of"
        " --max-num-seqs",
        low=1,
    )
    router: str = setting(
        "prefix",
        "which engine a request goes to; prefix: the one that has already computed the beginning"
        " of its prompt, unless it is much busier than the others",
        ROUTERS,
    )
    drain_timeout: float = setting(
        600.0, "seconds that an engine which is no longer needed gets to finish its requests", low=0
    )
    gpus_per_replica: float | None = setting(
        None,
        "GPUs of each engine; default: one for each of its ranks, or 0 on a CPU",
        low=0,
    )
    ray_address: str | None = setting(
        None, "a running Ray cluster, or auto; default: one on this machine, for this server alone"
    )
    multiplexed_model: list[str] = setting(
        [],
        "NAME=FOLDER: another model that clients may name; an engine loads it when it is asked for,"
        " in place of the one that was asked for longest ago",
        many=True,
    )
    models_per_replica: int = setting(1, "models that a replica holds at once", low=1)

    def __post_init__(self) -> None:
        check_settings(self)
        _ = self.other_models  # raises where one cannot be read
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise InputError(
                "--max-replicas",
                f"expected at least --replicas ({self.replicas}), found {self.max_replicas}",
            )
        if self.backend is None:
            for name, default in (("replicas", 1), ("max_replicas", None)):
                if getattr(self, name) != default:
                    flag = f"--{name.replace('_', '-')}"
                    raise InputError(flag, "expected with --backend", "add --backend ray")
            if self.multiplexed_model:
                raise InputError(
                    "--multiplexed-model", "expected with --backend", "add --backend ray"
                )

    @property
    def other_models(self) -> dict[str, str]:
        """Name -> folder. Raises InputError."""
        found = {}
        for each in self.multiplexed_model:
            name, equals, folder = each.partition("=")
            if not (equals and name and folder) or name in found:
                raise InputError(
                    "--multiplexed-model", f"expected NAME=FOLDER, each name once, found {each!r}"
                )
            found[name] = folder
        return found
