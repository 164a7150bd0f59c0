"""With BATON_COMPILE=1 the wheel has the modules of pyproject.toml's `tool.baton.compiled` as machine code (mypyc) beside their
sources; without it everything is Python, as in development. ADR 013 says why.

Everything is made in a folder of its own: nothing lies beside the sources, where a stale one would hide their changes."""

import os
import tempfile
import tomllib
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.editable_wheel import editable_wheel

SETTINGS = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["baton"]["compiled"]
CHECKS = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
"""What is not compiled need not even be installed."""


class Compiled(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class Compile(build_ext):
    def finalize_options(self) -> None:
        # Only here, since mypy is not there yet while pip asks what it needs to build.
        from mypyc.build import mypycify

        self.distribution.ext_modules = mypycify(
            [*CHECKS, *SETTINGS["modules"]],
            opt_level=os.environ.get("BATON_COMPILE_OPT", "3"),
            target_dir=made,
            debug_level="0",
            multi_file=True,
            group_name="baton",
        )
        super().finalize_options()


class Refuse(editable_wheel):
    """An editable install runs the sources of the working tree; compiled ones would hide what is changed there."""

    def run(self) -> None:
        raise SystemExit("BATON_COMPILE=1 makes no editable install: unset it, or see `make compiled`")


if os.environ.get("BATON_COMPILE") == "1":
    with tempfile.TemporaryDirectory() as made:
        setup(
            distclass=Compiled,
            cmdclass={"build_ext": Compile, "editable_wheel": Refuse},
            setup_requires=[SETTINGS["compiler"]],
            options={"build": {"build_base": made}},
        )
else:
    setup()
