"""A wheel has the native kernels of `kernels/cpu/src` as a library, where there is a compiler for them (docs/adr/097). With
BATON_COMPILE=1 it also has the modules of pyproject.toml's `tool.baton.compiled` as machine code (mypyc) beside their sources;
without it everything of Python is Python, as in development. ADR 109 says why.

Everything is made in a folder of its own: nothing lies beside the sources, where a stale one would hide their changes."""

import logging
import os
import runpy
import tempfile
import tomllib
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

SETTINGS = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["baton"]["compiled"]
CHECKS = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
"""What is not compiled need not even be installed."""
COMPILES = os.environ.get("BATON_COMPILE") == "1"
NATIVE = runpy.run_path("kernels/cpu/build.py")
"""The package itself may not be importable while it is built."""


def has_compiler() -> bool:
    try:
        NATIVE["find_compiler"]()
    except NATIVE["BuildError"] as error:
        logging.getLogger(__name__).warning("the wheel has no native kernels: %s", error)
        return False
    return True


class ForOnePlatform(Distribution):
    def has_ext_modules(self) -> bool:
        return COMPILES or has_compiler()


class BuildNative(build_py):
    """An editable install builds the library when it is first used, by what the sources are then."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode and has_compiler():
            NATIVE["compile_to"](Path(self.build_lib).resolve() / "kernels" / "cpu" / NATIVE["NAME"])


class TagByPlatform(bdist_wheel):
    """The library asks for a platform, and for no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if COMPILES else ("py3", "none", platform)


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


NATIVE_COMMANDS = {"build_py": BuildNative, "bdist_wheel": TagByPlatform}
if COMPILES:
    with tempfile.TemporaryDirectory() as made:
        setup(
            distclass=ForOnePlatform,
            cmdclass={**NATIVE_COMMANDS, "build_ext": Compile, "editable_wheel": Refuse},
            setup_requires=[SETTINGS["compiler"]],
            options={"build": {"build_base": made}},
        )
else:
    setup(distclass=ForOnePlatform, cmdclass=NATIVE_COMMANDS)
