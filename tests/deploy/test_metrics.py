"""The profile ``metrics`` of docker-compose.yml: each part of it against the part that it talks to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from fedcross.deploy.federation import OWN, PAGE, TOKEN
from fedcross.server.board import Board
from fedcross.server.gauges import RunCollector
from fedcross.server.live import Live
from tests.conftest import ROOT
from tests.server.test_board import STARTED, entry, sent

FOLDER = ROOT / "deploy" / "metrics"
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
CONFIG = (ROOT / "deploy" / "page.cfg").read_text()
DASHBOARD = json.loads((FOLDER / "grafana" / "dashboards" / "fedcross.json").read_text())
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
#: What stands in an expression beside metrics and their labels.
FUNCTIONS = {"rate", "increase"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The metrics of a run in which everything has happened, each with the names of its labels."""
    board = Board(60)
    board.note("run_started", STARTED | {"seed": 1})
    board.note("round_started", {"round": 3, "clients": [4]})
    board.note("request_sent", sent(0, 4))
    board.note("reply_rejected", sent(0, 4) | {"reason": "non_finite", "detail": "w"})
    board.note("round_finished", entry(3, pool_similarity_mean=0.75))
    board.note("checkpoint_written", {"round": 3, "seconds": 0.5})
    registry = CollectorRegistry()
    registry.register(RunCollector(board, tmp_path_factory.mktemp("run")))
    found: dict[str, set[str]] = {}
    for line in generate_latest(registry).decode().splitlines():
        if not line.startswith("#"):
            name, labels = re.fullmatch(r"(\w+)(?:\{(.*)\})? \S+", line).groups()  # type: ignore[union-attr]
            found.setdefault(name, set()).update(re.findall(r"(\w+)=", labels or ""))
    return found


def test_every_expression_names_a_metric_that_a_run_exports(exported: dict[str, set[str]]) -> None:
    for target in TARGETS:
        words = set(re.findall(r"[a-z_]{3,}", re.sub(r"\[\w+\]", "", target["expr"]))) - FUNCTIONS
        assert len(words) == 1, target
        assert words <= set(exported), target
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= exported[words.pop()]
        assert target["expr"].count("(") == target["expr"].count(")")


def test_every_metric_is_on_the_dashboard(exported: dict[str, set[str]]) -> None:
    shown = " ".join(target["expr"] for target in TARGETS)
    assert {name for name in exported if name not in shown} == set()


def test_counters_are_shown_as_rates_and_gauges_as_they_are() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            counts = re.search(r"fedcross_\w+_total", target["expr"])
            assert bool(counts and panel["type"] == "timeseries") == bool(re.search("rate|increase", target["expr"]))


def test_no_panel_lies_on_another_one() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def mounted(service: str, path: str) -> str:
    """Return what a service mounts at the folder that holds `path`."""
    for volume in SERVICES[service]["volumes"]:
        source, target, *mode = volume.split(":")
        if path == target or path.startswith(f"{target}/"):
            assert mode == ["ro"]
            return source + path.removeprefix(target)
    raise AssertionError(f"{service} does not mount {path}")


def test_prometheus_asks_the_gateway_with_the_token_and_nobody_else() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["gateway:8444"]}]
    assert (job["scheme"], job["metrics_path"]) == ("https", "/metrics")
    assert "insecure_skip_verify" not in job["tls_config"]
    assert mounted("prometheus", job["authorization"]["credentials_file"]) == f"page-keys/{TOKEN}"
    assert mounted("prometheus", job["tls_config"]["ca_file"]) == "page-keys/ca.crt"
    assert SERVICES["prometheus"]["networks"] == ["watch"]
    users = {n for n, s in SERVICES.items() if "watch" in s.get("networks", [])}
    assert users == {"gateway", "prometheus", "grafana"}
    assert COMPOSE["networks"]["watch"]["internal"] is True
    file = "--config.file=/etc/fedcross/prometheus.yml"
    assert file in SERVICES["prometheus"]["command"]
    assert mounted("prometheus", file.partition("=")[2]) == "./deploy/metrics/prometheus.yml"
    # A minute shows data: twelve questions, and a rate needs two samples.
    assert int(config["global"]["scrape_interval"].removesuffix("s")) <= 15


def test_grafana_shows_this_dashboard_from_this_prometheus_and_lets_nobody_in() -> None:
    settings = SERVICES["grafana"]["environment"]
    provisioning = FOLDER / "grafana"
    assert mounted("grafana", settings["GF_PATHS_PROVISIONING"]) == "./deploy/metrics/grafana"
    (source,) = yaml.safe_load((provisioning / "datasources" / "fedcross.yml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in [*DASHBOARD["panels"], *TARGETS]} == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
    assert "--web.listen-address=0.0.0.0:9090" in SERVICES["prometheus"]["command"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "fedcross.yml").read_text())["providers"]
    home = settings["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(provider["options"]["path"])
    assert Path(mounted("grafana", home)) == Path("deploy/metrics/grafana/dashboards/fedcross.json")
    assert (settings["GF_AUTH_BASIC_ENABLED"], settings["GF_AUTH_DISABLE_LOGIN_FORM"]) == ("false", "true")
    assert settings["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert settings["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"


def test_the_gateway_passes_on_what_the_page_answers_and_nothing_else(tmp_path: Path) -> None:
    page = Live(Board(60), tmp_path, "127.0.0.1", 0)
    paths = {getattr(route, "path", None) for route in page.app(local=True).routes}
    page.close()
    (allowed,) = re.findall(r"deny_status 403 if !\{ path (.*) \}", CONFIG)
    assert set(allowed.split()) == paths
    assert "deny_status 405 if !METH_GET" in CONFIG
    place = SERVICES["superexec"]["environment"]["FEDCROSS_PAGE"]
    assert f"server superexec superexec:{place.rpartition(':')[2]} " in CONFIG
    assert "frontend page" in CONFIG  # deadline.lua ends long requests of `fleet` only; a stream of events is one
    assert "fe=fleet" in (ROOT / "deploy" / "deadline.lua").read_text()
    assert not {"query", "%r", "url"} & set(re.findall(r"%\w+|\w+", re.findall(r"log-format (.*)", CONFIG)[0]))


def test_the_token_is_made_once_for_the_two_that_need_it() -> None:
    users = {n for n, s in SERVICES.items() if any(v.startswith("page-keys:") for v in s.get("volumes", []))}
    assert users == {"certificates", "superexec", "prometheus"}
    assert PAGE in OWN
    file = SERVICES["superexec"]["environment"]["FEDCROSS_PAGE_TOKEN_FILE"]
    assert mounted("superexec", file) == f"page-keys/{TOKEN}"
    # Docker gives a new volume the owner of the folder in the image that mounts it first.
    assert "metrics-state:/state" in SERVICES["certificates"]["volumes"]
    assert "certificates" in SERVICES["prometheus"]["depends_on"]
