"""Tested versions of torch, triton and transformers, and a verdict on the installed versions."""

import importlib.metadata
import re
import sys

TESTED = {"torch": ("2.11", "2.15"), "triton": ("3.6", "3.9"), "transformers": ("5.17", "5.24")}  # oldest, newest
NEWER = {
    "torch": "the tests have not run with it",
    "triton": "Gluon kernels that do not compile fall back to the portable ones, with a warning",
    "transformers": "code that is not recognised is left alone, and the report of patch names it",
}


def release(version: str) -> tuple[int, int]:
    """Return the major and minor number of ``version``, such as (2, 15) of "2.15.0a0+cu130"."""
    major, minor = re.match(r"(\d+)\.(\d+)", version).groups()  # type: ignore[union-attr]  # every version has both
    return int(major), int(minor)


def installed(package: str) -> str | None:
    """Return the version of ``package``, or None if it is not installed.

    An imported module takes precedence over the package metadata: builds for AMD GPUs distribute triton under other
    names.
    """
    if module := sys.modules.get(package):
        return str(module.__version__)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def newer_than_tested(package: str) -> bool:
    """Return True if ``package``, a key of TESTED, is installed and newer than the newest tested minor version."""
    version = installed(package)
    return version is not None and release(version) > release(TESTED[package][1])


def older_than_allowed(package: str) -> bool:
    """Return True if ``package``, a key of TESTED, is installed and older than the oldest allowed minor version."""
    version = installed(package)
    return version is not None and release(version) < release(TESTED[package][0])


def verdict(package: str) -> str:
    """Return one line on the installed version of ``package``, a key of TESTED: tested, newer, older or missing."""
    if installed(package) is None:
        return "not installed"
    if newer_than_tested(package):
        return f"newer than tested: {NEWER[package]}"
    if older_than_allowed(package):
        return f"older than allowed: install {package} {TESTED[package][0]} or newer"
    return "tested"
