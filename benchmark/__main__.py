"""Run a measurement or a report by its name: ``python -m benchmark training --report``."""

import importlib
import sys

ENTRIES = {
    "kernels": (
        "attention",
        "attention_grid",
        "attention_profile",
        "bench",
        "compiled",
        "fp_fusion",
        "losses",
        "memory_bound",
        "post_training",
        "report",
        "tune",
    ),
    "training": ("curves", "long_context", "plan", "planned", "sharded", "small", "sweeps", "trainers", "training"),
    "generation": ("generation",),
    "coverage": ("coverage",),
}


def module_of(name: str) -> str:
    """Return the module of the measurement or report ``name``. Exits with an error if ENTRIES does not hold it."""
    for folder, names in ENTRIES.items():
        if name in names:
            return f"benchmark.{folder}.{name}"
    known = ", ".join(name for names in ENTRIES.values() for name in names)
    sys.exit(f"usage: python -m benchmark NAME [--help], with NAME out of: {known}; got {name!r}")


if __name__ == "__main__":
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    importlib.import_module(module_of(name)).main()
