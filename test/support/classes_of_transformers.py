"""Classes in the modeling files of transformers, and a config with which those of any family are built."""

import importlib
import inspect
import re
from pathlib import Path

import transformers


class Config(transformers.PreTrainedConfig):
    """A config whose fields are those of ``fields``: pattern of a name -> value."""

    def __init__(self, fields, **options):
        object.__setattr__(self, "_fields", fields)
        super().__init__(**options)

    def __getattr__(self, name):
        for pattern, value in () if name.startswith("_") else self._fields.items():
            if re.fullmatch(pattern, name):
                return value
        raise AttributeError(name)


def classes_in(mentions):
    """Yield the classes of each modeling file whose text ``mentions`` what is looked for."""
    for path in sorted(Path(transformers.models.__file__).parent.glob("*/modeling_*.py")):
        if mentions(path.read_text()):
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            for cls in vars(module).values():
                if inspect.isclass(cls) and cls.__module__ == module.__name__:
                    yield cls
