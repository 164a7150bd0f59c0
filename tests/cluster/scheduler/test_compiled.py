"""The scheduler as machine code (setup.py) decides what the interpreted one decides, and is made only where it is asked for."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from baton.own_tree import PACKAGES
from cluster.scheduler.compiled import scheduler_is_compiled
from cluster.scheduler.recorded_scheduler import RecordedScheduler, replay
from cluster.scheduler.scheduler_events import PeerLost, PrefillNeeded, Tick
from core.config.cluster_config import ScheduleConfig
from core.messages import Leaving, NeedPrefill, PeerRequest, PeersChanged, PlacedByPeer, ReleasedByPeer
from core.types import Route, Slo
from sim.coarse.coarse_workload import Load, jobs
from sim.coarse.world import CoarseConfig, Log, simulate
from tests.cluster.scheduler.routing_world import ask
from tests.sim.coarse_outcomes import outcomes
from tests.sim.random_rows import BLOCK, random_rows

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMPILED = SETTINGS["tool"]["baton"]["compiled"]
FLEETS = {
    "few of any role": (0, 0, 5, 40.0),
    "flooded, of any role": (0, 0, 2, 300.0),
    "many of any role": (0, 0, 70, 500.0),
    "few with roles": (2, 3, 0, 40.0),
    "many with roles": (40, 40, 0, 500.0),
}
REPLAY = """
import sys
from pathlib import Path
from cluster.scheduler.compiled import scheduler_is_compiled
from cluster.scheduler.recorded_scheduler import replay
assert scheduler_is_compiled()
for name in sys.argv[1:]:
    Path(name + ".decided").write_text("\\n".join(replay(Path(name))[1]))
"""

SIMULATE = """
import json
import sim.coarse.world
from tests.sim.coarse_outcomes import outcomes
assert not sim.coarse.world.__file__.endswith(".py")
print(json.dumps(outcomes()))
"""

needs_compiler = pytest.mark.skipif(not shutil.which("gcc"), reason="there is no C compiler: gcc")


def run(command: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "BATON_COMPILE": "1", **env},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Baton's packages, some of them compiled: without optimising, which takes half as long, and without the native
    kernels. pip would ask for the metadata first, and have all modules translated to C a second time."""
    tree, made = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("compiled")
    for name in (*PACKAGES, "LICENSE", "README.md", "pyproject.toml", "setup.py"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(made)!r})"
    done = run(["-c", build], tree, BATON_COMPILE_OPT="0", CXX="none")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tree.rglob("*.so"))
    [wheel] = made.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(made)
    return made


def record(path: Path, fleet: tuple[int, int, int, float]) -> None:
    """What a scheduler is told and decides in a simulation, and when it has lost some of what it knew."""
    *roles, rate = fleet
    made: list[RecordedScheduler] = []

    def make(config: ScheduleConfig, _: Log) -> RecordedScheduler:
        made.append(RecordedScheduler(config, path))
        return made[0]

    rows = random_rows(3, int(rate), rate / 2)
    work = jobs(Load(rows=rows, duration_s=10.0), Slo(name="chat", ttft_s=1.0, tpot_s=0.05), BLOCK)
    simulate(
        CoarseConfig(
            num_prefill=roles[0], num_decode=roles[1], num_both=roles[2], block_tokens=BLOCK, num_blocks=512
        ),
        work,
        make,
        ends_at=4.0,
    )
    scheduler, now = made[0], 5.0
    scheduler.on(PeersChanged("a", ("b",)), now)
    for number in range(100):
        scheduler.on(ask(f"s{number}", 100 + 90 * (number % 30), prefix=number % 3), now + number / 100)
    first, second, *_ = (member.address for member in scheduler.members)
    scheduler.on(PeerRequest("b", second, 0), now + 1)
    for placed in scheduler.placements[:5]:
        need = NeedPrefill(
            request_id=placed.place.request_id,
            attempt=placed.place.attempt,
            epoch=1,
            num_tokens=50,
            lost=placed.route.prefill,
        )
        scheduler.on(PrefillNeeded(placed.route.decode, need), now + 1)
    scheduler.on(
        PlacedByPeer(
            scheduler="b",
            frontend="f",
            place=ask("t").place,
            route=Route(first),
            num_blocks=9,
            compute_tokens=100,
            expected_tokens=20.0,
        ),
        now + 1,
    )
    scheduler.on(
        ReleasedByPeer(scheduler="b", request_id="t", attempt=0, num_output_tokens=12, complete=True), now + 1
    )
    scheduler.on(Leaving(first), now + 1)
    scheduler.on(PeerLost(second), now + 1)
    scheduler.on(Tick(), now + 100)


@pytest.mark.turns(6, number=0)
@needs_compiler
@pytest.mark.timeout(500)
def test_the_compiled_scheduler_decides_the_same(compiled: Path, tmp_path: Path) -> None:
    assert not scheduler_is_compiled()
    paths = [tmp_path / name for name in FLEETS]
    for path, fleet in zip(paths, FLEETS.values(), strict=True):
        record(path, fleet)
    done = run(["-P", "-c", REPLAY, *map(str, paths)], tmp_path, PYTHONPATH=str(compiled))
    assert done.returncode == 0, done.stdout + done.stderr
    for path in paths:
        lines, _ = replay(path)
        assert sum(line.startswith("place") for line in lines) > 30
        assert Path(f"{path}.decided").read_bytes() == "\n".join(lines).encode()


@pytest.mark.turns(6, number=0)
@needs_compiler
@pytest.mark.timeout(500)
def test_the_compiled_simulation_has_the_same_outcome_to_the_last_bit(compiled: Path, tmp_path: Path) -> None:
    done = run(["-P", "-c", SIMULATE], tmp_path, PYTHONPATH=os.pathsep.join((str(compiled), str(ROOT))))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout) == outcomes()


@pytest.mark.turns(6, number=0)
@needs_compiler
@pytest.mark.timeout(500)
def test_everything_that_is_listed_is_machine_code(compiled: Path) -> None:
    missing = [
        name for name in COMPILED["modules"] if not list(compiled.glob(f"{name.removesuffix('.py')}.*.so"))
    ]
    assert missing == []


def test_an_editable_install_is_refused(tmp_path: Path) -> None:
    build = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    done = run(["-c", build], ROOT)
    assert done.returncode != 0
    assert "BATON_COMPILE=1 makes no editable install" in done.stderr


def test_the_compiler_is_asked_for_only_where_it_is_needed_and_is_that_of_the_tests() -> None:
    asks = "from setuptools import build_meta; print(build_meta.get_requires_for_build_wheel())"
    done = run(["-c", asks], ROOT)
    assert done.stdout.splitlines()[-1] == str([COMPILED["compiler"]]), done.stderr
    assert COMPILED["compiler"] in SETTINGS["project"]["optional-dependencies"]["dev"]
    assert not any("mypy" in one for one in SETTINGS["build-system"]["requires"])
