"""GPUs that can be planned for, with the rates at which they run."""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from liger_like.runtime.machine import Machine

GIB = 2**30
CUBLAS = {9: 32 << 20, 10: 32 << 20}  # bytes of cuBLAS's workspace, by architecture
HERE = "here"
PRODUCTS = 690  # TFLOP/s of products on an H200
CUBLAS_ELSEWHERE = 8 * 1024**2 + 128 * 1024


@dataclass(frozen=True)
class GPU(Machine):
    """Machine with rates of its clock: ``calibrated`` ones are measured, others follow the data sheets."""

    tflops: float  # of products in bf16 that a step reaches
    attention: float  # the rate of attention over an H200's
    bandwidth: float  # TB/s of a copy
    link: float  # GB/s of an all-gather to each GPU
    pcie: float  # GB/s of a copy between GPU and host
    calibrated: bool = False

    @property
    def workspace(self) -> int:
        """Return bytes of cuBLAS's workspaces: one for the forward's thread, one for autograd's."""
        return 2 * CUBLAS.get(self.architecture, CUBLAS_ELSEWHERE)


def _gpu(
    name: str, arch: int, sms: int, gib: float, l2: int, shared: int, tflops: float, copy: float, link: float,
    pcie: float,
) -> GPU:  # fmt: skip
    sizes = l2 << 20, shared << 10, int(gib * GIB)
    return GPU(name, arch, sms, *sizes, tflops, tflops / PRODUCTS, copy, link, pcie, name == "H200")


GPUS = {
    "h200": _gpu("H200", 9, 132, 139.8, 50, 227, PRODUCTS, 4.18, 370, 55),
    "h100": _gpu("H100", 9, 132, 79.1, 50, 227, PRODUCTS, 2.9, 370, 55),
    "a100": _gpu("A100", 8, 108, 79.1, 40, 163, 240, 1.7, 230, 25),
    "b200": _gpu("B200", 10, 148, 178.3, 126, 227, 1500, 6.9, 740, 55),
}


def path() -> Path:
    """Return the file of measured rates, in ``$XDG_CACHE_HOME`` or else in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "liger_like/gpu.json"


def keep(gpu: GPU) -> None:
    """Write ``gpu`` to the file of measured rates."""
    path().parent.mkdir(parents=True, exist_ok=True)
    path().write_text(json.dumps(asdict(gpu), indent=1) + "\n")


def gpu_of(gpu: Any) -> GPU:
    """Return the GPU named ``gpu``, or an H200 with that many GiB, whose rates are then not calibrated.

    "here" is the GPU that was measured last. Raises ValueError for an unknown name, for memory that is not positive,
    and for "here" before a measurement.
    """
    if isinstance(gpu, GPU):
        return gpu
    if gpu == HERE:
        try:
            return GPU(**json.loads(path().read_text()))
        except (FileNotFoundError, TypeError, ValueError):  # other fields, or no JSON
            measure = "run liger-like plan CONFIG --calibrate"
            raise ValueError(f"gpu must be measured before it is {HERE}, got no rates in {path()}: {measure}") from None
    if isinstance(gpu, str) and gpu.lower() in GPUS:
        return GPUS[gpu.lower()]
    try:
        gib = float(gpu)
    except (TypeError, ValueError):
        gib = 0.0
    if not 0 < gib < 1e6:
        raise ValueError(f"gpu must be out of {', '.join(GPUS)}, {HERE}, or GiB of memory, got {gpu!r}")
    return replace(GPUS["h200"], name=f"GPU of {gib:g} GiB", memory=int(gib * GIB), calibrated=False)
