"""The deployment kit says the same everywhere, and only of files that are there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from trtllm_specprefill.serving.settings import ServeSettings

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PORTS = [8000, 8001, 8002]  # Triton's own: HTTP, gRPC, metrics


def dockerfile() -> str:
    return (DEPLOY / "Dockerfile").read_text(encoding="utf-8")


def manifests() -> dict[str, Any]:
    text = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def compose() -> dict[str, Any]:
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    service: dict[str, Any] = yaml.safe_load(text)["services"]["triton"]
    return service


def test_the_image_copies_what_is_there_and_all_that_engines_are_built_with() -> None:
    copied = [w for line in re.findall(r"^COPY (.*)$", dockerfile(), re.M) for w in line.split()]
    sources = {word for word in copied if word != "./" and not word.startswith("/")}
    assert all((ROOT / source).exists() for source in sources)
    assert {"trtllm_specprefill", "engine_build", "triton_model_repo"} <= sources
    assert {"pyproject.toml", "README.md"} <= sources
    readme = re.search(r'readme = "(.*)"', (ROOT / "pyproject.toml").read_text())
    assert readme is not None
    assert readme[1] in sources  # the build needs it


def installed_extras() -> list[str]:
    found = re.search(r"pip install .* '\.\[([\w,]+)\]'", dockerfile())
    assert found is not None
    return found[1].split(",")


def test_the_image_has_onnxruntime_for_drafts_that_are_built_for_it() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "onnx" in installed_extras()
    assert re.search(r'^onnx = \["onnxruntime', project, re.M)


def test_what_cannot_live_with_tensorrt_llm_is_not_in_its_image_and_said_to_go_elsewhere() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^(trtllm|build) = (\[.*?\n?\])", project, re.M | re.S))
    wanted = {name: re.findall(r'nvidia-modelopt([^"]+)', pin) for name, pin in pins.items()}
    assert wanted == {"trtllm": ["~=0.37.0"], "build": [">=0.47"]}
    assert "build" not in installed_extras()
    for name in ("engines.md", "deployment.md"):
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert "tensorrt-cu13==10.14.1.48" in text
        assert "[build]" in text


def test_ports_are_the_same_everywhere() -> None:
    exposed = re.search(r"^EXPOSE (.*)$", dockerfile(), re.M)
    assert exposed is not None
    assert [int(port) for port in exposed[1].split()] == PORTS
    assert [int(port.split(":")[-1]) for port in compose()["ports"]] == PORTS
    assert all(port.startswith("127.0.0.1:") for port in compose()["ports"])
    pod = manifests()["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert sorted(named.values()) == PORTS
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(named["metrics"])
    service = manifests()["Service"]["spec"]
    assert {p["targetPort"]: p["port"] for p in service["ports"]} == named


def test_probes_ask_the_server_and_give_an_engine_time_to_load() -> None:
    deployment = manifests()["Deployment"]["spec"]
    (container,) = deployment["template"]["spec"]["containers"]
    ready = container["readinessProbe"]["httpGet"]
    assert ready == container["startupProbe"]["httpGet"]
    assert ready["path"] == "/v2/health/ready"
    assert ready["path"] in dockerfile()
    start = container["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 1800
    assert "--start-period=30m" in dockerfile()
    assert manifests()["Service"]["spec"]["selector"] == deployment["selector"]["matchLabels"]
    assert deployment["template"]["metadata"]["labels"] == deployment["selector"]["matchLabels"]


def test_every_way_reads_models_and_settings_from_the_same_places() -> None:
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounted = {m["mountPath"] for m in container["volumeMounts"]}
    assert {"/etc/specprefill", "/engines", "/dev/shm"} == mounted
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    places = {v.split(":")[-2] for v in compose()["volumes"]}
    assert places == {"/etc/specprefill/serve.yaml", "/engines"}
    assert "COPY deploy/serve.yaml /etc/specprefill/serve.yaml" in dockerfile()


def test_the_image_serves_an_engine_to_others_with_settings_that_hold() -> None:
    command = re.search(r"^CMD (.*)$", dockerfile(), re.M)
    assert command is not None
    words = json.loads(command[1])
    assert words == ["specprefill", "serve", "--config", "/etc/specprefill/serve.yaml"]
    settings = ServeSettings.read(DEPLOY / "serve.yaml")
    assert settings.ports.host == "0.0.0.0"
    assert list(settings.ports.model_dump(exclude={"host"}).values()) == PORTS
    assert settings.target.backend == "trtllm_executor"
    assert {Path(m).parent for m in (settings.draft.model, settings.target.model)} == {
        Path("/engines")
    }
    config = manifests()["ConfigMap"]
    assert config["data"]["serve.yaml"] == (DEPLOY / "serve.yaml").read_text(encoding="utf-8")
    volumes = manifests()["Deployment"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "settings", "configMap": config["metadata"]["name"]} in [
        {**v, "configMap": v["configMap"]["name"]} for v in volumes if "configMap" in v
    ]
