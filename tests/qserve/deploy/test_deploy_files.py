"""The files of examples/deploy name what the server has, and their linters find nothing.

A linter or renderer that is not installed (pip's extra `lint`; kubectl) is left out.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from qserve.cli import build_parser

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "examples" / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = sorted(path.parent for path in KUBERNETES.rglob("kustomization.yaml"))
KUBERNETES_VERSION = "1.34.0"
CUSTOM = ("PodMonitor", "InferencePool", "HTTPRoute", "EndpointPickerConfig", "Kustomization")


class _Loader(yaml.SafeLoader):
    """Compose has a tag of its own."""


_Loader.add_constructor("!reset", lambda loader, node: {})


def documents(path):
    return [each for each in yaml.load_all(path.read_text(), _Loader) if each is not None]


def yaml_files():
    return sorted(DEPLOY.rglob("*.yaml"))


def manifests():
    files = [*KUBERNETES.rglob("*.yaml"), *(DEPLOY / "production-stack").glob("*.yaml")]
    for path in sorted(files):
        for each in documents(path):
            if each["kind"] not in CUSTOM:
                yield pytest.param(each, id=f"{path.relative_to(DEPLOY)}:{each['kind']}")


def server_of(deployment):
    return deployment["spec"]["template"]["spec"]["containers"][0]


@pytest.fixture(scope="module")
def deployment():
    (found,) = documents(KUBERNETES / "base" / "deployment.yaml")
    return found


def check_arguments(arguments):
    parsed = build_parser().parse_args(["serve", *arguments])
    assert parsed.command == "serve"
    return parsed


def test_kubernetes_deployment_flags_exist(deployment):
    parsed = check_arguments(server_of(deployment)["args"])
    drain = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    pause = server_of(deployment)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert drain > parsed.shutdown_timeout + pause


def test_probes_use_routes_without_key(deployment):
    from qserve.server.http.api_key import OPEN

    server = server_of(deployment)
    probes = {name: server[f"{name}Probe"]["httpGet"]["path"] for name in PROBES}
    assert probes == PROBES and set(probes.values()) <= OPEN


PROBES = {"startup": "/health", "readiness": "/ready", "liveness": "/health"}


def test_compose_flags_exist():
    (compose,) = documents(DEPLOY / "compose" / "compose.yaml")
    server = compose["services"]["server"]
    parsed = check_arguments(server["command"])
    assert float(server["stop_grace_period"].rstrip("s")) > parsed.shutdown_timeout


def test_compose_mounts_exist():
    (compose,) = documents(DEPLOY / "compose" / "compose.yaml")
    mounts = [each for service in compose["services"].values() for each in service["volumes"]]
    relative = [each.partition(":")[0] for each in mounts if each.startswith(".")]
    assert len(relative) == 5
    for path in relative:
        assert (DEPLOY / "compose" / path).is_file(), path


def test_dockerfile_command_and_copied_files_exist():
    text = (DEPLOY / "Dockerfile").read_text()
    command = [
        json.loads(re.search(rf"^{name} (\[.*\])$", text, re.M)[1])
        for name in ("ENTRYPOINT", "CMD")
    ]
    assert command[0] == ["qserve", "serve"]
    check_arguments(command[1])
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M):
        for source in line.split():
            assert (ROOT / source).exists() and f"!{source}" in ignored, source


def test_overlay_shared_folder_is_valid(deployment):
    from qserve.config import EngineConfig

    (overlay,) = documents(KUBERNETES / "overlays" / "shared-kv" / "kustomization.yaml")
    patches = yaml.safe_load(overlay["patches"][0]["patch"])
    added = [each["value"] for each in patches if each["path"].endswith("args/-")]
    parsed = check_arguments([*server_of(deployment)["args"], *added])
    transfer = EngineConfig(model="m", kv_transfer_config=parsed.kv_transfer_config).kv_transfer
    mounts = [each["value"]["mountPath"] for each in patches if "volumeMounts" in each["path"]]
    assert transfer.saves and transfer.loads
    assert transfer.extra["path"].startswith(f"{mounts[0]}/")
    assert transfer.extra["secret_file"].startswith(f"{mounts[1]}/")


def test_serve_config_settings_exist():
    from qserve.config import EngineConfig, ServerConfig
    from qserve.deploy.settings import DeploySettings

    (config,) = documents(DEPLOY / "ray" / "serve.yaml")
    (application,) = config["applications"]
    arguments = application["args"]
    module, _, name = application["import_path"].partition(":")
    assert f"def {name}(" in (ROOT / (module.replace(".", "/") + ".py")).read_text()
    EngineConfig(model=arguments["model"], **arguments["engine"])
    ServerConfig(**arguments["server"])
    DeploySettings(backend="ray", **arguments["replicas"])


def test_yaml_passes_linter():
    pytest.importorskip("yamllint")
    rules = "{extends: default, rules: {line-length: {max: 120}, document-start: disable,"
    rules += " comments: {min-spaces-from-content: 1}}}"
    command = [sys.executable, "-m", "yamllint", "--strict", "-d", rules, *yaml_files()]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def test_dockerfile_passes_linter():
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
        "hadolint"
    )
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    # DL3008: versions of Debian's packages, which vanish with the next one.
    command = [hadolint, "--ignore", "DL3008", DEPLOY / "Dockerfile"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("manifest", list(manifests()))
def test_manifests_match_kubernetes_schemas(manifest):
    validator = pytest.importorskip("kubernetes_validate")
    if manifest["kind"] == "Deployment" and "selector" not in manifest["spec"]:
        manifest["spec"]["selector"] = {"matchLabels": {}}  # which kustomize adds
    validator.validate(manifest, KUBERNETES_VERSION, strict=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_overlays_render_to_valid_manifests(overlay):
    validator = pytest.importorskip("kubernetes_validate")
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "kustomize", overlay]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rendered = [each for each in yaml.safe_load_all(run.stdout) if each]
    for each in rendered:
        if each["kind"] not in CUSTOM:
            validator.validate(each, KUBERNETES_VERSION, strict=True)
    (deployment,) = [each for each in rendered if each["kind"] == "Deployment"]
    spec, labels = deployment["spec"], deployment["spec"]["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    check_arguments(server_of(deployment)["args"])
    (service,) = [each for each in rendered if each["kind"] == "Service"]
    assert service["spec"]["selector"].items() <= labels.items()
    volumes = {each["name"] for each in spec["template"]["spec"]["volumes"]}
    assert {each["name"] for each in server_of(deployment)["volumeMounts"]} == volumes
    has_gpu = "nvidia.com/gpu" in server_of(deployment)["resources"]["limits"]
    assert has_gpu == (overlay.name != "cpu")
