"""DeploySettings: flags for the number of engines and their router. Loads no torch and no ray."""

from dataclasses import dataclass

from formats.errors import InputError
from qserve.command_line.setting import check_settings, setting

BACKENDS = ("ray",)
ROUTERS = ("prefix", "power-of-two", "round-robin")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploySettings:
    """Settings of `qserve serve` for replicas."""

    backend: str | None = setting(
        None,
        "framework that runs --replicas; ray: Ray Serve (pip install 'qserve-kit[ray]')",
        BACKENDS,
    )
    replicas: int = setting(
        1, "number of engines, each with the whole model, behind one address", low=1
    )
    max_replicas: int | None = setting(
        None, "add engines under load, up to this number (--replicas is the minimum)", low=1
    )
    target_ongoing_requests: int | None = setting(
        None,
        "add engines if there are more requests in progress than this per engine; default: 0.8 of "
        "--max-num-seqs",
        low=1,
    )
    router: str = setting(
        "prefix",
        "how requests are routed; prefix: to the engine that has computed the longest prefix of "
        "the prompt, unless its load is much higher than that of the others",
        ROUTERS,
    )
    drain_timeout: float = setting(
        600.0, "seconds that an engine gets to finish its requests when it is scaled down", low=0
    )
    gpus_per_replica: float | None = setting(
        None,
        "number of GPUs per engine; default: one per rank, or 0 on a CPU",
        low=0,
    )
    ray_address: str | None = setting(
        None, "address of a running Ray cluster, or auto; default: a new one on this machine"
    )
    multiplexed_model: list[str] = setting(
        [],
        "NAME=FOLDER: another model that clients may request; a replica loads it on demand and "
        "unloads the least recently used one",
        many=True,
    )
    models_per_replica: int = setting(1, "number of models that a replica loads at a time", low=1)

    def __post_init__(self) -> None:
        check_settings(self)
        _ = self.other_models  # raises if an entry is invalid
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise InputError(
                "--max-replicas",
                f"expected at least --replicas ({self.replicas}), found {self.max_replicas}",
                "raise it, or lower --replicas",
            )
        if self.backend is None:
            for name, default in (("replicas", 1), ("max_replicas", None)):
                if getattr(self, name) != default:
                    flag = f"--{name.replace('_', '-')}"
                    raise InputError(flag, "requires --backend", "add --backend ray")
            if self.multiplexed_model:
                raise InputError("--multiplexed-model", "requires --backend", "add --backend ray")

    @property
    def other_models(self) -> dict[str, str]:
        """Name -> folder. Raises InputError."""
        found = {}
        for each in self.multiplexed_model:
            name, equals, folder = each.partition("=")
            if not (equals and name and folder) or name in found:
                raise InputError(
                    "--multiplexed-model",
                    f"expected NAME=FOLDER, each name once, found {each!r}",
                    "give each adapter another name",
                )
            found[name] = folder
        return found
