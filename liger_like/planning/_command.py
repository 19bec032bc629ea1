"""The command ``liger-like plan``, and the line that ``liger-like doctor`` has of it."""

import dataclasses
import importlib.util
import json
import sys
import warnings
from pathlib import Path
from typing import Any

from transformers.utils import logging

from liger_like.cli import missing
from liger_like.doctor import NotExaminedError
from liger_like.planning import NotTracedError, Setting, plan, predict
from liger_like.planning._calibration import calibrated
from liger_like.planning._models import model_class

SEQ = 2048  # tokens of the doctor's step


def fixed(texts: list[str]) -> dict[str, Any]:
    """Return fields of ``Setting`` from texts such as "cp=2". Raises ValueError for other texts."""
    kinds = {field.name: type(field.default) for field in dataclasses.fields(Setting) if field.name != "seq"}
    found: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in kinds or not value:
            raise ValueError(f"fix must be NAME=VALUE with a name out of {', '.join(kinds)}, got {text!r}")
        if kinds[name] is bool and value not in ("true", "false"):
            raise ValueError(f"{name} must be true or false, got {value!r}")
        if kinds[name] is int and not value.removeprefix("-").isdecimal():
            raise ValueError(f"{name} must be an integer, got {value!r}")
        chosen = value == "true" if kinds[name] is bool else int(value) if kinds[name] is int else value
        if found.setdefault(name, chosen) != chosen:
            raise ValueError(f"{name} must be given once, got {found[name]} and {chosen}")
    return found


def run(
    config: Path,
    gpus: int,
    gpu: str | None,
    batch: int,
    seq: int,
    host: float | None,
    layers: int | None,
    fix: list[str],
    top: int,
    peak: bool,
    as_json: bool,
    out: Path | None,
    calibrate: bool,
) -> int:
    """Print the plan and return the exit code; errors take one line."""
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        if calibrate and gpu not in (None, "here"):
            raise ValueError(f"gpu must be here with calibrate, which measures the GPU at hand, got {gpu!r}")
        if top < 1:
            raise ValueError(f"top must be at least 1, got {top}")
        if out is not None and out.exists() and not out.is_dir():
            raise ValueError(f"out must be a folder, got the file {out}")
        if out is not None and not importlib.util.find_spec("matplotlib"):
            sys.exit(missing("matplotlib", "bench"))
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings(action="ignore"):
            chosen = calibrated() if calibrate else gpu if gpu is not None else "h200"
            found = plan(config, gpus, chosen, batch, seq, fixed(fix), host, layers)
        found = dataclasses.replace(found, rows=found.rows[:top])
        if out is not None:
            (out / "plan.json").write_text(json.dumps(found.to_dict(), indent=1) + "\n")
            found.picture(out / "plan.png")
    except OSError as error:
        print(f"liger-like: out or the file of rates cannot be used: {error}", file=sys.stderr)
        return 2
    except (NotExaminedError, NotTracedError, ValueError, TypeError) as error:
        print(f"liger-like: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found.to_dict(), indent=1) if as_json else found.table())
    if peak and not as_json:
        print(f"\n{found.peak()}")
    return int(found.best is None)


def line(config: Path) -> str:
    """Return what a row of 2048 tokens takes, of fewer if the model has fewer positions, or why that is not known."""
    try:
        with warnings.catch_warnings(action="ignore"):
            read, _ = model_class(config)
            seq = min(SEQ, getattr(read.get_text_config(), "max_position_embeddings", None) or SEQ)
            found = predict(config, Setting(1, seq))
    except (NotExaminedError, NotTracedError, TypeError, ValueError) as error:
        return f"memory: {error}"
    return (
        f"memory: a step with AdamW in bf16 on 1 x {seq} tokens takes {found.gib:.1f} GiB; `liger-like plan` searches"
    )
