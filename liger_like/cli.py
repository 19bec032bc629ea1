"""Command line ``liger-like``.

It needs the ``cli`` extra (rich, typer); ``doctor`` also needs the ``hf`` extra. ``bench`` runs the benchmarks of a
checkout of the repository and needs the ``bench`` extra. ``--version`` needs no extra.
"""

import dataclasses
import importlib.util
import json
import platform
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import torch

import liger_like
from liger_like.runtime.fallback import BROKEN
from liger_like.runtime.support import INTERPRET
from liger_like.runtime.versions import TESTED, installed, newer_than_tested, verdict


def kernels() -> str:
    """Return a line that says how ops run here: compiled, interpreted, or as their plain torch references."""
    if torch.cuda.is_available():
        return "compiled for the GPU"
    if INTERPRET:
        return "interpreted on the CPU (TRITON_INTERPRET=1)"
    return "not used: no GPU, so every op runs its plain torch reference (TRITON_INTERPRET=1 interprets the kernels)"


def try_gluon() -> None:
    """Compile each kind of Gluon kernel once, if the GPU is a Hopper and Triton is newer than tested.

    Failures are recorded in BROKEN.
    """
    if newer_than_tested("triton") and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
        for D in (128, 256):
            liger_like.explain("flash_attention", {"B": 1, "S": 256, "Sk": 256, "H": 1, "Hk": 1, "D": D})
        liger_like.explain("fused_linear_cross_entropy", {"lead": (256,), "H": 256, "V": 512}, chunk_rows=128)


def env_rows() -> list[tuple[str, str]]:
    """Return rows (name, version or state) for Python, the packages, each GPU and the kernels."""
    rows = [("python", platform.python_version()), ("liger_like", liger_like.__version__)]
    for package, (oldest, newest) in TESTED.items():
        version = f"{installed(package)}: " if installed(package) else ""
        rows.append((package, f"{version}{verdict(package)} (tested range: {oldest} to {newest})"))
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.1f} GiB"
        rows.append((f"GPU {index}", f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {memory}"))
    if not torch.cuda.is_available():
        rows.append(("GPU", "none"))
    try_gluon()
    broken = "; ".join(f"{module} {reason}" for module, reason in BROKEN.items())
    if broken:
        rows.append(("Gluon", f"portable kernels run instead, which are slower: {broken}"))
    return [*rows, ("kernels", kernels())]


def missing(module: str | None, extra: str) -> str:
    """Return the message that the package of ``module`` is not installed, with the ``extra`` that installs it."""
    package = str(module).partition(".")[0]
    return f"liger-like: {package} is not installed; run: pip install 'liger-like[{extra}]'"


def show_version(asked: bool) -> None:
    """Print the version and exit if ``asked``."""
    if asked:
        print(f"liger-like {liger_like.__version__}")
        sys.exit()


def add_plan(app: Any) -> None:
    """Add the command ``plan`` to ``app``."""
    import typer.core

    def plan(
        config: Path,
        gpus: Annotated[int, typer.Option(help="number of GPUs")] = 1,
        gpu: Annotated[
            str | None, typer.Option(help="h200 (default), h100, a100, b200, here (measured), or GiB")
        ] = None,
        batch: Annotated[int, typer.Option(help="sequences of all GPUs in one optimizer step")] = 1,
        seq: Annotated[int, typer.Option(help="tokens of a sequence")] = 2048,
        host: Annotated[float | None, typer.Option(help="GiB of CPU memory for activations, if limited")] = None,
        layers: Annotated[int | None, typer.Option(help="plan for the first layers of the model alone")] = None,
        optimizer: Annotated[str | None, typer.Option(help="adamw (default), adamw8bit or sgd")] = None,
        dtype: Annotated[
            str | None, typer.Option(help="bf16, or fp32 that computes in bf16 (default on several GPUs)")
        ] = None,
        lora: Annotated[int | None, typer.Option(help="rank of LoRA, if only adapters are trained")] = None,
        fix: Annotated[list[str], typer.Option(help="settings that you choose, as checkpoint=full tp=2")] = [],  # noqa: B006
        top: Annotated[int, typer.Option(help="rows of the table, at most")] = 10,
        peak: Annotated[bool, typer.Option("--peak", help="Show the first row's peak by layer and kind.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")] = False,
        out: Annotated[Path | None, typer.Option(help="folder for plan.json and plan.png")] = None,
        calibrate: Annotated[bool, typer.Option("--calibrate", help="Measure this GPU's rates and keep them.")] = False,
    ) -> None:
        """Predict memory and time of training the model of a config.json, or of its folder; needs no GPU.

        Exit code 1: nothing fits; 2: the model cannot be traced, or an argument is not possible.
        """
        try:
            from liger_like.planning._command import run
        except ModuleNotFoundError as error:
            sys.exit(missing(error.name, "hf"))
        named = {"optimizer": optimizer, "dtype": dtype, "lora": lora}
        texts = [*fix, *(f"{name}={value}" for name, value in named.items() if value is not None)]
        raise typer.Exit(run(config, gpus, gpu, batch, seq, host, layers, texts, top, peak, as_json, out, calibrate))

    class Command(typer.core.TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            """Take several values behind one --fix."""
            taken: list[str] = []
            for arg in args:
                follows = taken[-2:-1] == ["--fix"] and "=" in arg and not arg.startswith("-")
                taken += ["--fix", arg] if follows else [arg]
            return super().parse_args(ctx, taken)

    app.command(cls=Command)(plan)


def main() -> None:
    """Run ``liger-like``. Without the ``cli`` extra, print what to install and exit with code 1."""
    show_version(sys.argv[1:] == ["--version"])
    try:
        import typer
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError as error:
        sys.exit(missing(error.name, "cli"))

    app = typer.Typer(add_completion=False, help="Triton kernels for training LLMs.", no_args_is_help=True)

    @app.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
        ] = False,
    ) -> None: ...

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
        """Try patch on a tiny model built from a config.json, or from the folder that contains it.

        Exit code 1: a module that could be patched was left alone or differs; 2: the config cannot be examined.
        """
        try:
            from transformers.utils import logging

            from liger_like.doctor import NotExaminedError, examine, notes, table
            from liger_like.planning._command import line as planned

            logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # else it warns of the tiny sizes
            diagnosis = examine(path)
        except ModuleNotFoundError as error:
            sys.exit(missing(error.name, "hf"))
        except NotExaminedError as error:
            print(f"liger-like: {error}", file=sys.stderr)
            raise typer.Exit(2) from error
        if as_json:
            print(
                json.dumps({**dataclasses.asdict(diagnosis), "memory": planned(path), "kernels": kernels()}, indent=1)
            )
        else:
            console = Console()
            console.print(table(diagnosis))
            for line in ("", *notes(diagnosis), planned(path), f"kernels: {kernels()}"):
                print(textwrap.fill(line, console.width, break_long_words=False, break_on_hyphens=False))
        raise typer.Exit(int(not diagnosis.sound))

    add_plan(app)

    @app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
    def bench(context: typer.Context) -> None:
        """Measure every op against every peer that is installed; only in a checkout of the repository."""
        if not Path("benchmark/kernels/bench.py").is_file():
            needs = "liger-like: bench needs a checkout of the repository; in its root, run: python -m benchmark bench"
        elif not importlib.util.find_spec("matplotlib"):
            needs = missing("matplotlib", "bench")
        else:
            needs = ""
        if needs and "--help" in context.args:  # else the benchmark gives its own
            print(context.get_help())
            raise typer.Exit
        if needs:
            sys.exit(needs)
        raise typer.Exit(subprocess.run([sys.executable, "-m", "benchmark", "bench", *context.args]).returncode)

    app(prog_name="liger-like")
