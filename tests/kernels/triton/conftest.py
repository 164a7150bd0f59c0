"""The Triton kernels against pure PyTorch: in Triton's interpreter (TRITON_INTERPRET=1), or compiled where there is a GPU.

Without either there is nothing to run them with, and they are not collected: test_triton_interpreted.py, one folder up, runs
them in processes of their own."""

import os

import pytest
import torch

from benchmarks.gpu.interpreter import replace_once

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = ["test_graphs.py"] if torch.cuda.is_available() else ["test_*.py"]
"""Graphs are repeated launches of the interpreter there; real ones are in tests/engine/sizing/test_devices.py."""

if INTERPRETED:
    collect_ignore_glob = []

if INTERPRETED:
    replace_once()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
