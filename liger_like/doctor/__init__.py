"""Report what ``patch`` does to the model of a config, by trying it on a tiny model of the same class.

Nothing is downloaded, and only code of the installed packages runs. On a GPU each patched module is also timed, in a
model with the config's sizes and the first layer of each kind.
"""

import copy
import dataclasses
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.models.auto import modeling_auto

from liger_like.doctor import tiny
from liger_like.patches import generation
from liger_like.patches.catalogue import INTERFACES, RECOGNISERS
from liger_like.patches.heads import FORWARDS
from liger_like.patches.lm_head import LMHead
from liger_like.patching import PATCHED, SKIPPED, Row, patch
from liger_like.runtime import versions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIFFERS = "differs"
# error ratio = error of the patched model / max(error of the unpatched model, FLOOR * norm), both against float64.
# Rounding gives about 1; a wrong formula gives an error of at least 1e-2 of the norm.
FLOOR, LIMIT, WORST = 1e-6, 10.0, 1e9
TOKENS = 4096
TOGETHER = "together"
ALL = ("norm", "rope", "mlp", "attention", "loss", "lora")
OPTIONS = {each.pattern: each.options for each in (*RECOGNISERS.values(), *INTERFACES)} | {TOGETHER: ALL}
MAPPINGS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
)
Results = dict[str, Tensor]


class NotExaminedError(Exception):
    """Signal that a config cannot be examined; the message is the reason."""


@dataclass(frozen=True)
class Diagnosis:
    """Result of an examination of the class named ``model``.

    ``rows`` are the rows of the ``PatchReport`` as dictionaries; the last row has all patterns together. "forward" and
    "backward" are the error ratios of the whole tiny model with only that pattern's options on. On a GPU, "ms" and
    "MiB" are time and peak memory of the module in real size, as (unpatched, patched). The status is "differs" if a
    ratio is more than rounding.
    """

    model: str
    rows: tuple[dict[str, Any], ...]
    warnings: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Return True if a module is patched, none is skipped and none differs."""
        patched = any(row["status"] == PATCHED for row in self.rows if row["pattern"] != TOGETHER)
        return patched and not {row["status"] for row in self.rows} & {SKIPPED, DIFFERS}


def examine(path: Path) -> Diagnosis:
    """Examine a config.json, or a folder with a config.json and optionally an adapter_config.json.

    Raises NotExaminedError if no tiny model can be built from it.
    """
    file = path / "config.json" if path.is_dir() else path
    fields = read(file)
    quantised = fields.pop("quantization_config", None)
    config, cls = known(fields)
    try:
        model: Any = tiny.build(cls, config)
    except Exception as error:
        raise NotExaminedError(f"transformers builds no tiny {cls.__name__} from {file}: {_said(error)}") from error
    warnings = [*_untested(), *_unseen(cls, config, model)]
    if quantised:
        warnings.append("its weights are quantised, the tiny model's are not: read patch's report on the real model")
    _adapt(model, file.parent)
    report = patch(model.to(DEVICE), verify="numeric")
    report.unpatch()
    dropping = _left_for_dropout(cls, config)
    together = Row(TOGETHER, cls.__name__, "", 1, PATCHED)
    examined = [row for row in report.rows if row.pattern != generation.PATTERN]  # training alone
    rows = [dataclasses.asdict(dropping.get((row.pattern, row.cls), row)) for row in (*examined, together)]
    warnings += _unfused(report.rows, config)
    try:
        inputs, same = tiny.first_that_run(tiny.without_dropout(model))
    except Exception as error:
        warnings.append(f"the tiny model does not run, so only its single modules were compared: {_said(error)}")
    else:
        _add_errors(rows, model, inputs, same, _exact(model, inputs) or same)
        if DEVICE == "cuda":
            warnings += _add_costs(rows, cls, config)
    return Diagnosis(cls.__name__, tuple(rows), tuple(warnings))


def read(file: Path) -> dict[str, Any]:
    """Return the fields of a config.json. Raises NotExaminedError if it cannot be read or holds no object."""
    try:
        fields = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise NotExaminedError(f"{file} cannot be read: {_said(error)}") from error
    if not isinstance(fields, dict):
        raise NotExaminedError(f"{file} must hold a JSON object, got {type(fields).__name__}")
    return fields


def known(fields: dict[str, Any]) -> tuple[Any, Any]:
    """Return transformers' config and model class with a language-model head. Raises NotExaminedError."""
    if _has("auto_map", fields):
        raise NotExaminedError(
            "the config brings code of its own (auto_map), which is not run; remove auto_map to examine the model that "
            "transformers has for its model_type"
        )
    model_type: Any = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        raise NotExaminedError(f"transformers {transformers.__version__} has no model_type {model_type!r}")
    try:
        config = transformers.CONFIG_MAPPING[model_type].from_dict(fields)
    except Exception as error:
        raise NotExaminedError(f"transformers refuses the config: {_said(error)}") from error
    heads: list[Any] = [mapping[type(config)] for mapping in MAPPINGS if type(config) in mapping]
    classes = [cls for head in heads for cls in (head if isinstance(head, tuple) else (head,))]
    # a model_type may run the class of another family, as InternLM3 runs Llama's
    classes = [cls for cls in classes if cls.config_class not in config.sub_configs.values()]
    named = [cls for cls in classes if cls.__name__ in (config.architectures or ())]
    if not classes:
        raise NotExaminedError(f"transformers has no {model_type} model with a language-model head")
    return config, [*named, *classes][0]


def _has(name: str, fields: Any) -> bool:
    return isinstance(fields, dict) and (name in fields or any(_has(name, part) for part in fields.values()))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _untested() -> list[str]:
    """Return a warning for each package that is older than allowed or newer than tested."""
    verdicts = {package: versions.verdict(package) for package in versions.TESTED}
    return [
        f"the installed {name} {versions.installed(name)} is {said}"
        for name, said in verdicts.items()
        if said != "tested"
    ]


def _unseen(cls: Any, config: Any, model: nn.Module) -> list[str]:
    """Return a warning that names the classes of the full model that the tiny model lacks; empty if it lacks none."""
    try:
        with torch.device("meta"):
            whole = cls._from_config(config, attn_implementation="eager")
    except Exception as error:
        return [f"transformers builds no full {cls.__name__}, so the tiny model may lack some layers: {_said(error)}"]
    missing = {type(m).__name__ for m in whole.modules()} - {type(m).__name__ for m in model.modules()}
    return [f"classes that the tiny model lacks are not examined: {', '.join(sorted(missing))}"] if missing else []


def _left_for_dropout(cls: Any, config: Any) -> dict[tuple[str, str], Row]:
    """Return the rows, by pattern and class, of attention that ``patch`` skips for the dropout of ``config``."""
    with warnings.catch_warnings(action="ignore"):
        report = patch(tiny.build(cls, config, dropout=True), norm=False, rope=False, mlp=False, loss=False)
    return {(row.pattern, row.cls): row for row in report.rows if row.status == SKIPPED and "dropout" in row.reason}


def _adapt(model: Any, folder: Path) -> None:
    """Add the adapter of ``folder``, if there is one, to ``model``, with random trainable weights."""
    if not (folder / "adapter_config.json").is_file():
        return
    import peft

    try:
        config: Any = peft.PeftConfig.from_pretrained(str(folder))
        for name, value in {"inference_mode": False, "init_lora_weights": False, "layers_to_transform": None}.items():
            if hasattr(config, name):
                setattr(config, name, value)
        peft.get_peft_model(model, config)
    except (ValueError, TypeError) as error:
        raise NotExaminedError(f"the adapter does not fit the tiny model: {_said(error)}") from error


def _unfused(rows: tuple[Row, ...], config: Any) -> list[str]:
    """Return a warning with the size of the logits for each loss that is not fused with its head."""
    reasons = [row.reason for row in rows if row.pattern == LMHead.pattern and row.status == SKIPPED]
    size = TOKENS * getattr(config.get_text_config(), "vocab_size", 0) * 4 / 2**30
    return [
        f"the loss is not fused with the head ({reason}): {TOKENS} tokens make {size:.1f} GiB of logits in fp32, which "
        "neither ZeRO-3 nor FSDP shards"
        for reason in reasons
    ]


def _exact(model: nn.Module, inputs: Results) -> Results | None:
    """Return the results in float64, or None if the model does not run in float64."""
    try:
        double: Any = copy.deepcopy(model).double()
        double.set_experts_implementation("eager")  # the other implementations have no float64 kernel
        found = tiny.results(double, {k: t.double() if t.is_floating_point() else t for k, t in inputs.items()})
    except Exception:  # the model's own code may raise anything where it needs another dtype
        return None
    return found if all(t.isfinite().all() for t in found.values()) else None


def _patched(model: nn.Module, pattern: str) -> Any:
    """Return a context in which ``model`` is patched with only the options of ``pattern``."""
    options: dict[str, Any] = {name: name in OPTIONS[pattern] for name in ALL}
    return patch(model, **options)


def _add_errors(rows: list[dict[str, Any]], model: nn.Module, inputs: Results, same: Results, exact: Results) -> None:
    """Add the error ratios to the patched ``rows``, and set the status of rows that differ."""
    found: dict[str, tuple[float, float]] = {}
    for row in rows:
        pattern = row["pattern"]
        if row["status"] != PATCHED:
            continue
        if pattern not in found:
            with _patched(model, pattern):
                found[pattern] = error_ratios(tiny.results(model, inputs), same, exact)
        row["forward"], row["backward"] = found[pattern]
        if max(found[pattern]) > LIMIT:
            row["status"] = DIFFERS


def error_ratios(got: Results, same: Results, exact: Results) -> tuple[float, float]:
    """Return the worse error ratio of loss and logits, and the ratio of all gradients as one vector.

    Both are at most WORST, also for a NaN.
    """

    def ratio(names: list[str]) -> float:
        difference, allowed = (
            torch.stack([(x.get(name, torch.zeros_like(exact[name])).double() - exact[name]).norm() for name in names])
            for x in (got, same)
        )
        floor = FLOOR * torch.stack([exact[name].double().norm() for name in names]).norm()
        error = float(difference.norm() / max(allowed.norm(), floor))
        return error if error < WORST else WORST

    gradients = [name for name in exact if name not in ("loss", "logits")]
    return max(ratio(["loss"]), ratio(["logits"])), ratio(gradients)


def _add_costs(rows: list[dict[str, Any]], cls: Any, config: Any) -> list[str]:
    """Add time and memory in real size to the patched ``rows``.

    Returns a warning if the modules do not fit on the GPU or do not run on these inputs, else an empty list.
    """
    text = config.get_text_config()
    tokens = min(TOKENS, getattr(text, "max_position_embeddings", None) or TOKENS)
    ids = torch.randint(3, text.vocab_size, (1, tokens), device=DEVICE)
    inputs = {"input_ids": ids, "labels": ids} | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})
    try:
        model = _in_real_size(cls, config)
        for row in rows:
            if row["status"] != PATCHED or row["variant"] in FORWARDS:  # a head's cost is counted in the model's loss
                continue
            of_class = [module for module in model.modules() if type(module).__name__ == row["cls"]]
            module = max(of_class, key=lambda module: sum(p.numel() for p in module.parameters()))
            before = _cost(model, module, inputs)
            with _patched(model, row["pattern"]):
                after = _cost(model, module, inputs)
            if before and after:
                row["ms"], row["MiB"] = zip(before, after, strict=True)
    except Exception as error:
        return [f"some modules are not timed with {tokens} tokens: {_said(error)}"]
    return []


def _in_real_size(cls: Any, config: Any) -> nn.Module:
    """Return a bf16 model with random weights, the config's sizes and the first layer of each kind."""
    small = type(config).from_dict(tiny.with_few_layers(config.to_dict()))
    small.use_cache = small.get_text_config().use_cache = False
    # the default of transformers; the config may name an implementation that would be downloaded
    attention = "sdpa" if cls._supports_sdpa else "eager"
    with torch.device(DEVICE):
        model: nn.Module = cls._from_config(small, attn_implementation=attention, dtype=torch.bfloat16)
    return model.train()


def _cost(model: nn.Module, module: nn.Module, inputs: Results) -> tuple[float, float] | None:
    """Return ms and peak MiB of a forward and backward of ``module`` on its inputs in ``model``.

    Returns None if ``model`` does not call ``module``.
    """
    given: list[Any] = []
    with module.register_forward_pre_hook(lambda _, *call: given.append(call), with_kwargs=True):
        model(**inputs)
    if not given:
        return None
    args, kwargs = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), given[0])
    given.clear()
    leaves = [t for t in _tensors((args, kwargs, [*module.parameters()])) if t.requires_grad]

    def step() -> None:
        output = next(t for t in _tensors(module(*args, **kwargs)) if t.requires_grad)
        torch.autograd.grad(output, leaves, output.detach(), allow_unused=True)

    time = triton.testing.do_bench(step, return_mode="median")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return time, (torch.cuda.max_memory_allocated() - before) / 2**20


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def table(diagnosis: Diagnosis) -> Any:
    """Return the rows, without reasons, as a rich table that fits into 80 columns.

    Each row has two lines: the class above pattern and variant, forward above backward, unpatched above patched. The
    columns of times and memory appear only if they were measured.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    measured = [name for name in ("ms", "MiB") if any(name in row for row in diagnosis.rows)]
    caption = "forward, backward: error ratios; about 1 is rounding"
    if measured:
        caption += "; ms, MiB: one forward and backward of the module in real size, unpatched -> patched"
    shown = Table(title=diagnosis.model, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    shown.show_edge = False
    for header in ("class\n  count x pattern, variant", "status", "forward\nbackward", *measured):
        shown.add_column(header)
    for row in diagnosis.rows:
        where = ", ".join(filter(None, (row["pattern"], row["variant"])))
        name = f"{row['cls'] or '-'}\n  {row['count']} x {where}"
        errors = "\n".join(_number(row[way]) for way in ("forward", "backward") if way in row)
        costs = ["\n-> ".join(map(_number, row.get(name, ()))) for name in measured]
        shown.add_row(*map(Text, (name, row["status"], errors, *costs)))
    return shown


def notes(diagnosis: Diagnosis) -> list[str]:
    """Return the reasons of the rows and the warnings, one line each."""
    reasons = [
        f"{', '.join(filter(None, (row['pattern'], row['cls'])))}: {row['reason']}"
        for row in diagnosis.rows
        if row["reason"]
    ]
    return [*reasons, *(f"warning: {text}" for text in diagnosis.warnings)]


def _number(value: float) -> str:
    return f"{value:.0f}" if 999.5 <= value < 1e6 else f"{value:.3g}"
