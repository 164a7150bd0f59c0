"""Have mypy read the modules that setup.py compiles, with its options: what mypy refuses makes no wheel."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent", "--cache-dir=build/mypy"]

modules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["baton"]["compiled"]["modules"]
sys.exit(subprocess.run([sys.executable, "-m", "mypy", *OPTIONS, *modules], cwd=ROOT, check=False).returncode)
