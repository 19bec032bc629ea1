"""Find the fastest way to train that fits: what ``plan`` returns."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_like.planning import _report
from liger_like.planning._machine import GIB, GPU
from liger_like.planning._prediction import Prediction
from liger_like.planning._settings import CHECKPOINTS, DEFAULTS, STAGES, TOKENS, WHOLE, Setting, contradiction
from liger_like.planning._trace import RefusedError

# GiB that torch's counts do not hold: the context and libraries, and NCCL's buffers of a group of GPUs (assumed)
CONTEXT, GROUP = 0.6, 1.0
FRAGMENTS = 1.02  # of the peak: what the allocator reserves beyond it
# ways to spend less memory on activations, and those that are tried if none of these fits
PLAIN: tuple[dict[str, Any], ...] = tuple({"checkpoint": name} for name in CHECKPOINTS)
TILED: dict[str, Any] = {"checkpoint": "full", "tiled_mlp": True}
SAVING: tuple[dict[str, Any], ...] = (
    TILED,
    {"checkpoint": "full", "checkpoint_on_host": True},
    *(TILED | {"checkpoint_on_host": True, "checkpoint": kept} for kept in ("full", "attention")),
    *(
        TILED | {"checkpoint_on_host": True, "step_in_backward": True, "checkpoint": kept}
        for kept in ("full", "attention")
    ),
    TILED | {"checkpoint_on_host": True, "step_in_backward": True, "checkpoint_layers": 2},
)
QUICK = 2**17  # tokens of a GPU whose trace takes no longer than others
Predict = Callable[[Setting], Prediction]


@dataclass(frozen=True)
class Candidate:
    """A setting, its prediction, the GiB of a GPU that it needs in all, and whether these are there."""

    setting: Setting
    prediction: Prediction
    needs: float
    fits: bool

    @property
    def host_gib(self) -> int:
        """Return GiB of the host that the checkpoints of all GPUs take."""
        return self.prediction.host_gib * self.setting.gpus

    @property
    def tokens_per_second(self) -> float:
        """Return tokens of all GPUs per second."""
        return self.setting.batch * self.setting.seq / self.prediction.seconds


@dataclass(frozen=True)
class Plan:
    """Ways to train a model, the fastest that fits first; ``best`` is None if none fits.

    ``rows`` holds the fastest of each mesh and checkpointing, those that do not fit last.
    """

    model: str
    parameters: int
    gpu: GPU
    gpus: int
    batch: int
    seq: int
    rows: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """Return the fastest that fits, or None."""
        return self.rows[0] if self.rows[0].fits else None

    def table(self) -> str:
        """Return a table of the rows, and the command that starts the best."""
        return _report.table(self)

    def peak(self) -> str:
        """Return a table of the first row's peak by layer and kind."""
        return _report.peak(self)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, for JSON."""
        return _report.to_dict(self)

    def picture(self, path: str | Path) -> None:
        """Write a picture: memory by kind of each row, and over the step of the first. Needs matplotlib."""
        _report.picture(self, path)


def needed(setting: Setting, prediction: Prediction) -> float:
    """Return GiB of a GPU: the peak, what the allocator reserves beyond it, the context and NCCL's buffers."""
    groups = int(setting.gpus > 1) + sum(size > 1 for size in (setting.cp, setting.tp, setting.pp))
    return FRAGMENTS * prediction.gib + CONTEXT + GROUP * groups


def searched(
    predict: Predict,
    gpu: GPU,
    gpus: int,
    batch: int,
    seq: int,
    fix: Mapping[str, Any],
    host: float | None = None,
    layers: int = 2,
) -> tuple[Candidate, ...]:
    """Return the candidates, the fastest that fits first. Raises ValueError if ``fix`` or ``batch`` allows none.

    Bisection finds the largest micro-batch that fits a mesh, a stage of ZeRO and a checkpointing. Only if nothing fits
    without, tiled MLPs, checkpoints on the host, of which ``host`` GiB are there, and a step in the backward are tried,
    and last ``cp`` GPUs that share rows, since that sends keys and values. ``layers`` of the model may share a
    checkpoint. Ways that the model refuses are left out. Raises RefusedError if it refuses the first.
    """
    found: list[Candidate] = []
    for mesh in meshes(gpus, batch, seq, fix):
        rows = batch // mesh["fsdp"]
        passes = rows // fix.get("micro_batch", rows)
        dtype = "bf16" if gpus == 1 or fix.get("zero") in WHOLE else "fp32"
        fields: dict[str, Any] = {"seq": seq, "dtype": dtype, "accumulation": passes, **fix, **mesh}
        stages = STAGES[fields["dtype"]] if mesh["fsdp"] * mesh["cp"] > 1 else (fix.get("zero", DEFAULTS["zero"]),)
        plain = [way | {"zero": stage} for way in PLAIN for stage in stages]
        saving = [way | {"zero": fix.get("zero", max(stages))} for way in SAVING]
        tried: set[Setting] = set()
        for ways in (plain, saving):
            possible = [way for way in ways if way.get("checkpoint_layers", 1) <= layers]
            bases = {base: None for way in possible if (base := _base(fields, way)) and base not in tried}
            tried.update(bases)
            order = [*bases]
            if ways is plain:  # the last needs the least: if it does not fit, the others do not
                order = order[-1:] + order[:-1]
            for i, base in enumerate(order):
                if i > 0 and ways is plain and not any(candidate.fits for candidate in found):
                    break
                try:
                    found.append(_largest(predict, gpu, base, batch, fix, host))
                except RefusedError:
                    if not found:
                        raise
            if any(candidate.fits for candidate in found):
                break
        if any(candidate.fits for candidate in found):
            break
    if not found:
        raise ValueError(f"micro_batch must be all rows of a GPU with step_in_backward, got {fix['micro_batch']}")
    return (*sorted(found, key=lambda each: (not each.fits, each.prediction.seconds if each.fits else each.needs)),)


def _base(fields: Mapping[str, Any], way: Mapping[str, Any]) -> Setting | None:
    """Return the setting of ``fields`` in this ``way``, for any micro-batch; None if they contradict."""
    if any(fields.get(name, value) != value for name, value in way.items()):
        return None
    both = {**DEFAULTS, **way, **fields}
    if contradiction(both):
        return None
    return Setting(**{name: value for name, value in both.items() if name not in ("micro_batch", "accumulation")})


def meshes(gpus: int, batch: int, seq: int, fix: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """Yield the meshes of ``gpus`` that divide batch and sequence, those that share fewer rows first."""
    split = fix.get("tp", 1) * fix.get("pp", 1)
    if gpus % split:
        given = ", ".join(f"{name} {fix[name]}" for name in ("tp", "pp") if name in fix)
        raise ValueError(f"tp times pp must divide gpus, {gpus}, got {given}")
    gpus //= split
    sizes = [(gpus // cp, cp) for cp in range(1, gpus + 1) if gpus % cp == 0]
    sizes = [(f, c) for f, c in sizes if f == fix.get("fsdp", f) and c == fix.get("cp", c)]
    if not sizes:
        given = ", ".join(f"{name} {fix[name]}" for name in ("fsdp", "cp") if name in fix)
        raise ValueError(
            f"{'fsdp times cp' if split == 1 else 'the product of the mesh'} must be gpus, {gpus * split}, got {given}"
        )
    if fix.get("patched") is False or fix.get("zero") in WHOLE or fix.get("dtype") == "bf16":
        sizes = [(f, c) for f, c in sizes if c == 1] or sizes
    short = [(f, c) for f, c in sizes if seq <= TOKENS * c]
    if not short:
        cp = max(c for _, c in sizes)
        raise ValueError(f"seq must be at most {TOKENS * cp} with cp {cp}, got {seq}: longer passes are not traced")
    fitting = [(f, c) for f, c in short if batch % f == 0 and (c == 1 or seq % (2 * c) == 0)]
    if not fitting:
        fsdp, cp = short[0]
        if batch % fsdp:
            raise ValueError(f"batch must be a multiple of fsdp, {fsdp}, got {batch}")
        raise ValueError(f"seq must be a multiple of 2 x cp, {2 * cp}, got {seq}")
    yield from ({"fsdp": f, "cp": c} for f, c in fitting)


def _largest(
    predict: Predict, gpu: GPU, base: Setting, batch: int, fix: Mapping[str, Any], host: float | None
) -> Candidate:
    """Return the candidate with the largest micro-batch that fits, else the one with the smallest."""
    rows, seq = batch // base.fsdp, base.seq
    small = [n for n in range(1, math.isqrt(rows) + 1) if rows % n == 0]
    sizes = sorted({*small, *(rows // n for n in small)})
    pipeline = 2 * base.pp if base.pp > 1 and "micro_batch" not in fix else None
    passes = fix.get("accumulation", 1 if base.step_in_backward else pipeline)
    sizes = [n for n in sizes if n == fix.get("micro_batch", n) and rows // n == (passes or rows // n)]
    sizes = [n for n in sizes if n * seq <= TOKENS * base.cp] or sizes  # none: the setting says so
    if not sizes and passes and passes == pipeline:
        raise ValueError(f"batch must be a multiple of fsdp x 2 x pp, {base.fsdp * passes}, got {batch}")
    if not sizes:
        given = ", ".join(f"{name} {fix[name]}" for name in ("micro_batch", "accumulation") if name in fix)
        raise ValueError(f"micro_batch times accumulation must be the {rows} rows of a GPU, got {given}")

    def candidate(size: int) -> Candidate:
        setting = dataclasses.replace(base, micro_batch=size, accumulation=rows // size)
        prediction = predict(setting)
        needs = needed(setting, prediction)
        room = host is None or prediction.host_gib * setting.gpus <= host
        return Candidate(setting, prediction, needs, room and needs <= gpu.memory / GIB)

    low, high = 0, len(sizes) - 1
    if high == 0 or sizes[high] * seq <= QUICK * base.cp:
        best = candidate(sizes[high])
        if best.fits or high == 0:
            return best
    else:
        high += 1  # no size: the largest is tried only if the half of them fit
    best = candidate(sizes[low])
    if not best.fits:
        return best
    while high - low > 1:
        middle = (low + high) // 2
        tried = candidate(sizes[middle])
        if tried.fits:
            low, best = middle, tried
        else:
            high = middle
    return best
