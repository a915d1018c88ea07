"""From one definition: classic JSON, v2 manifests and provisioning files, and the committed ones are up to date."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.models import dashboardv2beta1 as v2
from rich.console import Console

from prefixwatch.alerts.settings import RuleSettings
from prefixwatch.dashboards.build import rendered
from prefixwatch.dashboards.definition import ORDER
from prefixwatch.documents.errors import InputError
from prefixwatch.stack.cli.dashboards import run_build

COMMITTED = Path("dashboards")


@cache
def files() -> dict[str, str]:
    return rendered()


def test_the_committed_files_are_what_the_definitions_make() -> None:
    kept = {name: text for name, text in files().items() if not name.startswith("v2/")}
    differing = [name for name, text in kept.items() if (COMMITTED / name).read_text(encoding="utf-8") != text]

    assert differing == [], "run `prefixwatch dashboards build`"
    assert run_build(COMMITTED, Console(quiet=True), check_only=True) == 0, "v2 manifests are built, not kept"


def test_check_tells_what_is_out_of_date(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    run_build(tmp_path, Console(quiet=True), check_only=False)
    (tmp_path / "json/overview.json").write_text("{}", encoding="utf-8")
    (tmp_path / "v2/overview.json").unlink()
    (tmp_path / "json/old.json").write_text("{}", encoding="utf-8")

    exit_code = run_build(tmp_path, console, check_only=True)

    told = console.export_text()
    assert exit_code == 1
    assert f"{tmp_path}/json/overview.json: differs" in told
    assert f"{tmp_path}/v2/overview.json: missing" in told
    assert f"{tmp_path}/json/old.json: no longer made, delete it" in told


def _classic_panels(model: dict[str, Any]) -> dict[int, dict[str, Any]]:
    rows = [panel for panel in model["panels"] if panel["type"] == "row"]
    inner = [panel for row in rows for panel in row.get("panels", ())]
    return {panel["id"]: panel for panel in [*model["panels"], *inner] if panel["type"] != "row"}


@pytest.mark.parametrize("name", ORDER)
def test_both_forms_say_the_same(name: str) -> None:
    classic = json.loads(files()[f"json/{name}.json"])
    manifest = json.loads(files()[f"v2/{name}.json"])
    spec, panels = manifest["spec"], _classic_panels(classic)

    assert (manifest["apiVersion"], manifest["kind"]) == ("dashboard.grafana.app/v2beta1", "Dashboard")
    assert manifest["metadata"]["name"] == classic["uid"]
    assert set(spec["elements"]) == {f"panel-{number}" for number in panels}
    for number, panel in panels.items():
        element = spec["elements"][f"panel-{number}"]["spec"]
        queries = [query["spec"]["query"]["spec"]["expr"] for query in element["data"]["spec"]["queries"]]
        assert queries == [target["expr"] for target in panel["targets"]]
        assert element["vizConfig"]["group"] == panel["type"]
        assert element["vizConfig"]["spec"]["options"] == panel["options"]
        assert element["vizConfig"]["spec"]["fieldConfig"] == panel["fieldConfig"]
    placed = [item for row in spec["layout"]["spec"]["rows"] for item in row["spec"]["layout"]["spec"]["items"]]
    assert [item["spec"]["element"]["name"] for item in placed] == [f"panel-{number}" for number in sorted(panels)]
    assert [v["spec"]["name"] for v in spec["variables"]] == [v["name"] for v in classic["templating"]["list"]]


@pytest.mark.parametrize("name", ORDER)
def test_a_manifest_is_whole_in_the_sdks_schema(name: str) -> None:
    """Read by the SDK's own v2 models and written again, nothing is lost and nothing unknown was there."""
    spec = json.loads(files()[f"v2/{name}.json"])["spec"]

    again = v2.Dashboard.from_json(spec)

    assert again.title == spec["title"]
    assert again.elements is not None
    assert len(again.elements) == len(spec["elements"])


def test_provisioning_declares_the_scrape_interval_that_dashboards_begin_with() -> None:
    """weka/csi-wekafs#741, canonical/grafana-k8s-operator#289 (SL08)."""
    source = yaml.safe_load(files()["provisioning/datasource.yaml"])["datasources"][0]
    variables = json.loads(files()["json/overview.json"])["templating"]["list"]
    [scrape] = [variable for variable in variables if variable["name"] == "scrape"]

    assert source["jsonData"]["timeInterval"] == scrape["current"]["value"] == "15s"


def test_config_maps_hold_the_dashboards_and_are_small_enough_to_apply() -> None:
    """`kubectl apply` writes the object into an annotation of at most 256 KiB."""
    texts = files()["provisioning/configmap.yaml"].split("\n---\n")
    maps = [yaml.safe_load(text) for text in texts]

    held = {key: json.loads(value) for each in maps for key, value in each["data"].items()}

    assert held == {f"{name}.json": json.loads(files()[f"json/{name}.json"]) for name in ORDER}
    assert max(len(text.encode()) for text in texts) < 262_144
    assert all(each["metadata"]["labels"]["grafana_dashboard"] == "1" for each in maps)


@pytest.mark.parametrize("base", ["runbooks", "/runbooks", "wiki.example.com", "https://", "ftp://wiki/runbooks"])
def test_a_base_of_runbooks_that_leads_nowhere_in_grafana_is_refused(base: str) -> None:
    with pytest.raises(InputError, match="an absolute address"):
        rendered(base)


def test_the_shipped_pages_link_to_the_runbooks_that_the_exporter_serves() -> None:
    for text in (text for name, text in files().items() if name.startswith("json/")):
        [variable] = [each for each in json.loads(text)["templating"]["list"] if each["name"] == "runbooks"]
        assert variable["query"] == RuleSettings().runbook_base


def test_runbooks_may_be_served_elsewhere() -> None:
    elsewhere = json.loads(rendered("https://wiki.example.com/runbooks")["json/overview.json"])
    [variable] = [each for each in elsewhere["templating"]["list"] if each["name"] == "runbooks"]

    assert variable["query"] == "https://wiki.example.com/runbooks"
