"""The command line ``liger-like``; it needs the ``cli`` extra (rich, typer), and ``doctor`` the ``hf`` extra, too.

``bench`` needs the ``bench`` extra and the repository: what it measures with is in no wheel.
"""

import dataclasses
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Annotated

import torch

import liger_like
from liger_like.ops._common import INTERPRET


def kernels() -> str:
    """Say how an op runs on this machine's default device: compiled, interpreted, or as its plain torch reference."""
    if torch.cuda.is_available():
        return "compiled for the GPU"
    if INTERPRET:
        return "interpreted on the CPU (TRITON_INTERPRET=1)"
    return "not used: no GPU, so every op runs its plain torch reference (TRITON_INTERPRET=1 interprets the kernels)"


def env_rows() -> list[tuple[str, str]]:
    """Return (what, version or state) for Python, the packages, each GPU and the kernels."""
    rows = [("python", platform.python_version()), ("liger_like", liger_like.__version__), ("torch", torch.__version__)]
    for package in ("triton", "transformers"):
        try:
            rows.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((package, "not installed"))
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.1f} GiB"
        rows.append((f"GPU {index}", f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {memory}"))
    if not torch.cuda.is_available():
        rows.append(("GPU", "none"))
    return [*rows, ("kernels", kernels())]


def missing(error: ModuleNotFoundError, extra: str) -> str:
    """What to install."""
    package = str(error.name).partition(".")[0]
    return f"liger-like: {package} is not installed; run: pip install 'liger-like[{extra}]'"


def main() -> None:
    """Run ``liger-like``; without the ``cli`` extra, say what to install and exit with 1."""
    try:
        import typer
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError as error:
        sys.exit(missing(error, "cli"))

    app = typer.Typer(add_completion=False, help="Triton kernels for training LLMs.", no_args_is_help=True)

    @app.command()
    def env() -> None:
        """Show versions, GPUs, and how the kernels run here."""
        table = Table(show_header=False)
        for row in env_rows():
            table.add_row(*row)
        Console().print(table)

    @app.command()
    def doctor(
        path: Path, as_json: Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")] = False
    ) -> None:
        """Try patch on a tiny model of a config.json, or of the folder that it is in.

        Exit code 1: something that could be patched was left alone or differs; 2: the config cannot be examined.
        """
        try:
            from transformers.utils import logging

            from liger_like.doctor import NotExaminedError, examine, table

            logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # it would warn of the tiny sizes
            diagnosis = examine(path)
        except ModuleNotFoundError as error:
            sys.exit(missing(error, "hf"))
        except NotExaminedError as error:
            print(f"liger-like: {error}", file=sys.stderr)
            raise typer.Exit(2) from error
        if as_json:
            print(json.dumps({**dataclasses.asdict(diagnosis), "kernels": kernels()}, indent=1))
        else:
            Console().print(table(diagnosis), *(f"warning: {text}" for text in diagnosis.warnings), sep="\n")
            Console().print(f"kernels: {kernels()}")
        raise typer.Exit(int(not diagnosis.sound))

    @app.command()
    def bench(
        op: Annotated[list[str] | None, typer.Option(help="An op; may be repeated. All, if none is given.")] = None,
        peer: Annotated[list[str] | None, typer.Option(help="A peer; may be repeated.")] = None,
        shape: Annotated[list[str] | None, typer.Option(help="A model, or a sweep; may be repeated.")] = None,
        quick: Annotated[bool, typer.Option("--quick", help="A shape of each op; without a GPU a tiny one.")] = False,
        out: Annotated[Path, typer.Option(help="The folder for csv, Markdown and pictures.")] = Path(".cache/bench"),
        report: Annotated[bool, typer.Option("--report", help="Only write what benchmark/results/ says.")] = False,
    ) -> None:
        """Measure every op against every peer that is installed."""
        sys.path.append(str(Path(__file__).parents[1]))
        try:
            from benchmark import bench, bench_report

            if report:
                bench_report.write_report()
                return
            chosen = op or (), peer or (), shape or (), quick
            if complaint := bench.complaint(*chosen):
                raise typer.BadParameter(complaint)
            print(bench.run(*chosen, out))
        except ModuleNotFoundError as error:
            if error.name == "benchmark":
                sys.exit("liger-like: the benchmarks are in the repository, not in the package: use a clone of it")
            sys.exit(missing(error, "bench"))

    app(prog_name="liger-like")
