"""Each metric that a page, an alert or the dashboard names is one that /metrics has, under that very name."""

import json
import re
from pathlib import Path

import pytest

from cluster.ingress.telemetry.observers import make_observers
from core.reports import InstanceStatus, PoolStatus, Status

ROOT = Path(__file__).parents[2]
FILES = ROOT / "charts" / "baton" / "files"
PLACES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *FILES.glob("*.yaml"), *FILES.rglob("*.json")]
NAME = re.compile(r"\bbaton_[a-z0-9_]+(?![a-z0-9_*-])")
OTHERS = {"baton_model"}
"""A label."""
SUFFIXES = {"counter": ("_total",), "histogram": ("", "_bucket", "_sum", "_count")}


def exposed() -> set[str]:
    instance = InstanceStatus(
        address="d",
        prefills=False,
        decodes=True,
        num_blocks=8,
        free_blocks=8,
        num_waiting=0,
        num_running=0,
        defect="",
    )
    pools = (PoolStatus(pool="decode", cold_start_s=1.0),)
    observers = make_observers("m")
    observers.instances.update(Status(nonce=0, why_not="", num_queued=0, instances=(instance,), pools=pools))
    return {
        family.name + suffix
        for family in observers.registry.collect()
        for suffix in SUFFIXES.get(family.type, ("",))
    }


@pytest.mark.parametrize("place", PLACES, ids=lambda place: str(place.relative_to(ROOT)))
def test_what_is_named_is_there(place: Path) -> None:
    named = {name for name in NAME.findall(place.read_text()) if not name.endswith("_")}
    assert named - exposed() - OTHERS == set()


def test_each_query_of_the_dashboard_is_of_the_chosen_jobs_and_models() -> None:
    """`baton_model` is a label of the chart's, and `model` one of a table's rows; elsewhere nothing has them, and all are chosen."""
    board = json.loads((FILES / "dashboards" / "baton.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert queries
    for query in queries:
        assert query.count('{job=~"$job",baton_model=~"$model",model=~"$row"') == len(
            NAME.findall(query)
        ) - query.count("baton_model")
    assert {"job", "model", "row"} <= {variable["name"] for variable in board["templating"]["list"]}
