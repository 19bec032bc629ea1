"""The command line ``liger-like``; it needs the ``cli`` extra (rich, typer)."""

import importlib.metadata
import platform
import sys

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


def main() -> None:
    """Run ``liger-like``; without the ``cli`` extra, say what to install and exit with 1."""
    try:
        import typer
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError as error:
        sys.exit(f"liger-like: {error.name} is not installed; run: pip install 'liger-like[cli]'")

    app = typer.Typer(add_completion=False, help="Triton kernels for training LLMs.", no_args_is_help=True)

    @app.callback()
    def commands() -> None:
        """Keep ``env`` a command: typer would make a lone one the program itself."""

    @app.command()
    def env() -> None:
        """Show versions, GPUs, and how the kernels run here."""
        table = Table(show_header=False)
        for row in env_rows():
            table.add_row(*row)
        Console().print(table)

    app(prog_name="liger-like")
