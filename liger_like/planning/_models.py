"""Models without data, and the step that trains them: what ``predict`` traces."""

import contextlib
import copy
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from liger_like.parallel import (
    checkpoint_policy,
    context_parallel,
    group_checkpoints,
    offload_checkpoints,
    step_in_backward,
)
from liger_like.patching import patch
from liger_like.planning._optimizers import optimizer_of
from liger_like.planning._settings import Setting
from liger_like.planning._stages import options_of, passes_of, spread_over
from liger_like.runtime.checks import require_integer

ADAPTER = "adapter_config.json"  # of a folder that PEFT wrote
OFFSET = 2  # rows of OPT's positions before the first
ENDLESS = 2.0**30  # GiB of the host: what a step sends there is counted, not limited
KEPT = {"selective": (), "attention": (("attention", "loss"),)}


def model_class(config: Any) -> tuple[Any, Any]:
    """Return config and class of a path to a config.json, or of its folder; or of a config itself.

    Raises ``liger_like.doctor.NotExaminedError`` for a file that cannot be read and a model that is not known, and
    TypeError or ValueError for a model without layers.
    """
    from liger_like.doctor import NotExaminedError, known, read

    if isinstance(config, str | Path):
        path = Path(config)
        fields = read(path / "config.json" if path.is_dir() else path)
        if "quantization_config" in fields:
            raise NotExaminedError(f"quantization_config of {path} is not predicted: remove it to plan without it")
        config, cls = known(fields)
    else:
        cls = known(config.to_dict())[1]
    require_integer("num_hidden_layers", getattr(config.get_text_config(), "num_hidden_layers", None), 1)
    return config, cls


def adapter_of(config: Any) -> Any:
    """Return PEFT's config of LoRA that is beside the config.json of the folder ``config``, or None.

    Raises ``liger_like.doctor.NotExaminedError`` for another kind of adapter, ValueError without PEFT, and TypeError or
    ValueError for a rank that is none.
    """
    from liger_like.doctor import NotExaminedError, read

    path = Path(config) / ADAPTER if isinstance(config, str | Path) else None
    if path is None or not path.exists():
        return None
    fields = read(path)
    if fields.get("peft_type") != "LORA":
        raise NotExaminedError(f"peft_type of {path} must be LORA, got {fields.get('peft_type')!r}")
    require_integer(f"r of {path}", fields.get("r", 8), 1)
    # weights have no data, from which some methods would take their first values
    return _peft().LoraConfig.from_peft_type(**fields | {"inference_mode": False, "init_lora_weights": True})


def rank_of(adapter: Any, lora: int) -> int:
    """Return the rank of ``adapter``, or ``lora`` without one. Raises ValueError if ``lora`` is another rank."""
    if adapter is not None and lora not in (0, adapter.r):
        raise ValueError(f"lora must be {adapter.r}, the r of {ADAPTER}, got {lora}")
    return lora if adapter is None else int(adapter.r)


def made(config: Any, cls: Any, **options: Any) -> Any:
    """Return the model on "meta". Raises ``liger_like.doctor.NotExaminedError`` if transformers cannot make it."""
    from liger_like.doctor import NotExaminedError

    try:
        with torch.device("meta"):
            return cls._from_config(config, **options)
    except Exception as error:  # whatever a size of the config leads to
        said = " ".join(str(error).split())[:200]
        raise NotExaminedError(f"transformers cannot make {cls.__name__}: {type(error).__name__}: {said}") from error


def shortened(config: Any, layers: int) -> Any:
    """Return ``config`` with its first ``layers`` layers. Raises TypeError or ValueError for a number it has not."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    count = text.num_hidden_layers
    if require_integer("layers", layers, 1) > count:
        raise ValueError(f"layers must be at most the model's {count}, got {layers}")
    for name, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return config


def build(config: Any, cls: Any, setting: Setting, adapter: Any = None) -> Any:
    """Return a model on "meta" in the dtype of its parameters, patched and checkpointed as ``setting`` says.

    ``adapter``: PEFT's config of the adapters, for other modules than all linear ones.

    Raises ValueError if more layers share a checkpoint than there are, and for a row of more tokens than positions.
    """
    attention = "sdpa" if cls._supports_sdpa else "eager"
    dtype = torch.bfloat16 if setting.dtype == "bf16" else torch.float32
    model = made(config, cls, attn_implementation=attention, dtype=dtype).train()
    if setting.seq > (most := positions_of(model)):
        raise ValueError(f"seq must be at most the {most} positions of {cls.__name__}, got {setting.seq}")
    if setting.checkpoint_layers > (count := len(layers_of(model))):
        raise ValueError(f"checkpoint_layers must be at most the model's {count}, got {setting.checkpoint_layers}")
    if setting.lora:
        model = adapted(model, adapter or _peft().LoraConfig(r=setting.lora, target_modules="all-linear"))
    if setting.patched:
        patch(model, mlp="tiled" if setting.tiled_mlp else True)
    if setting.checkpoint != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False, **policy_of(setting)})
    return model


def positions_of(model: Any) -> float:
    """Return how many positions ``model`` learned; infinity if it computes them.

    Tables with a row for padding, as RoBERTa's, have their first position behind it.
    """
    count: int = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not model.get_input_embeddings()]
    learned = [table for table in tables if count and 0 <= table.num_embeddings - count <= OFFSET]
    skipped = (0 if table.padding_idx is None else table.padding_idx + 1 for table in learned)
    return count - max(skipped) if learned else math.inf


def policy_of(setting: Setting) -> dict[str, Any]:
    """Return the further arguments of a checkpoint."""
    if setting.checkpoint == "attention" and setting.checkpoint_on_host:
        return {"context_fn": checkpoint_policy((), host=("attention",))}
    kept = KEPT.get(setting.checkpoint)
    return {} if kept is None else {"context_fn": checkpoint_policy(*kept)}


def adapted(model: Any, adapter: Any) -> Any:
    """Return ``model`` with the adapters of PEFT's config; the rest is frozen. Raises ValueError if it has no place."""
    try:
        return _peft().get_peft_model(model, adapter)
    except ValueError as error:
        raise ValueError(f"target_modules of {ADAPTER}: {' '.join(str(error).split())[:200]}") from error


def _peft() -> Any:
    if not importlib.util.find_spec("peft"):
        raise ValueError("lora must be 0 without PEFT: run pip install peft")
    import peft

    return peft


def parameters_of(config: Any, cls: Any) -> int:
    """Return the number of parameters."""
    return sum(p.numel() for p in made(config, cls).parameters())


def materialise(model: nn.Module, device: str = "cpu") -> None:
    """Put empty tensors on ``device`` in the place of those on "meta"; tied ones stay tied."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, old in table.items():
                if old is not None and old.is_meta:
                    if old not in made:
                        new = torch.empty_like(old, device=device)  # of a DTensor, its shard
                        made[old] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                    table[name] = made[old]  # type: ignore[assignment]


@contextlib.contextmanager
def processes(count: int, rank: int = 0) -> Iterator[None]:
    """Let torch.distributed take this process for ``rank`` of ``count`` whose collectives send nothing."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("a sharded setting is planned in a process without a process group of its own")
    hook = sys.excepthook  # torch puts one of its own before it, and leaves it there
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # its meshes are those of this rank


def shard(model: Any, mesh: Any, setting: Setting) -> Any:
    """Return ``model``, or the stage of it, sharded over ``mesh``."""
    if setting.staged:
        return spread_over(model, mesh, setting)
    from torch.distributed.fsdp import fully_shard

    tokens = mesh["fsdp", "cp"]._flatten("tokens")
    options = options_of(setting)
    layers, together = layers_of(model), setting.checkpoint_layers
    for unit in (*([*layers[i : i + together]] for i in range(0, len(layers), together)), model):
        fully_shard(unit, mesh=tokens, **options)
    return model


def layers_of(model: Any) -> list[nn.Module]:
    """Return the layers of ``model``: the longest list of modules that a module holds."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [*max(lists, key=lambda each: (len(each), sum(p.numel() for p in each.parameters())), default=())]


def inputs_of(setting: Setting, context: Any) -> dict[str, Any]:
    """Return what the model is called with, with data; ``context`` shares the rows among processes."""
    tokens = torch.zeros((setting.micro_batch, setting.seq), dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens}
    shared: dict[str, Any] = batch if context is None else context.shard(batch)
    return shared


def step_of(model: Any, setting: Setting, context: Any, index: int) -> Callable[[dict[str, Any], int], None]:
    """Return a training step of an input, in so many passes; the optimizer's is behind them or in the backward.

    ``index``: of the stage that ``model`` is, if it is one.
    """
    make = partial(optimizer_of, setting.optimizer)
    if setting.checkpoint_layers > 1:
        group_checkpoints(model, setting.checkpoint_layers)
    if setting.step_in_backward:
        step_in_backward(model, make)
    optimizer = None if setting.step_in_backward else make([p for p in model.parameters() if p.requires_grad])
    host = offload_checkpoints(ENDLESS) if setting.checkpoint_on_host else contextlib.nullcontext()

    def passes_of_model(given: dict[str, Any], passes: int) -> None:
        for _ in range(passes):
            own = {k: torch.empty(v.shape, dtype=v.dtype) if isinstance(v, Tensor) else v for k, v in given.items()}
            with host:
                model(**own, use_cache=False).loss.backward()

    run = passes_of(model, setting, index) if setting.staged else passes_of_model

    def step(given: dict[str, Any], passes: int) -> None:
        with context or contextlib.nullcontext():
            run(given, passes)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


def mesh_of(setting: Setting, device: str = "cpu") -> Any:
    """Return the mesh of ``setting``, with the dimensions of ``examples/parallel.py``."""
    from torch.distributed.device_mesh import init_device_mesh

    names = "pp", "fsdp", "cp", "tp"
    return init_device_mesh(device, tuple(getattr(setting, name) for name in names), mesh_dim_names=names)


def context_of(setting: Setting, mesh: Any) -> Any:
    """Return the context that shares each row among ``setting.cp`` GPUs, or None; a stage has one in any case."""
    return context_parallel(mesh["cp"], method=setting.cp_method) if setting.cp > 1 or setting.staged else None
