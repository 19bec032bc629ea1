"""Times training steps on long sequences on one GPU: checkpoints and attention on the host, tiled MLPs, and neither.

    make bench-long-context                                      measures, writes results/ and from it the report
    python -m benchmark long_context --layers 8 --tokens 65536   other shapes; results/ keeps what it has of the rest
    python -m benchmark long_context --contestants liger_like "liger_like, tiled"
    python -m benchmark long_context --copies                    only the rates of copies between GPU and host
    python -m benchmark long_context --quick                     tiny shapes, printed only; needs no GPU
    python -m benchmark long_context --report                    the report again, without a GPU

A step is forward, backward and optimizer in bf16, with every layer checkpointed, on random tokens and weights of layers
of Llama-3-8B. All contestants have the same weights and take turns, so that 1 % shows; Liger comes last, because it
changes the model for good. GPU memory is the peak of all that torch allocated. Host memory is what a step copies there.
"""

import argparse
import gc
import statistics
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

import liger_like
from benchmark.common.markdown import Row
from benchmark.common.measure import RESULTS, attempt, environment, known, locked, present, rounded, save
from benchmark.common.processes import DEVICE, GPU, reset_peak, times
from benchmark.training.long_context_report import tables, write_report
from benchmark.training.training import build, nothing, patch_by_liger, tokens_of
from examples.parallel import LARGER
from examples.train import CONFIGS
from liger_like.parallel import checkpoint_policy, offload_checkpoints
from liger_like.parallel.host_memory import ENGINES
from liger_like.parallel.offload import GIB, CheckpointOffload

PREFIX, COPIED = "long-context", 1 << 30  # bytes of a timed copy


class Contestant(NamedTuple):
    """Contestant: what patches the model, and which checkpoints and results go to the host."""

    patch: dict[str, Any] | None = None
    offload: bool = False
    host: tuple[str, ...] = ()


OURS = "liger_like"
CONTESTANTS = {
    "transformers": Contestant(),
    OURS: Contestant({}),
    "liger_like, offloaded": Contestant({}, offload=True),
    "liger_like, tiled": Contestant({"mlp": "tiled"}),
    "liger_like, offloaded, tiled": Contestant({"mlp": "tiled"}, offload=True),
    "liger_like, offloaded, tiled, attention kept": Contestant({"mlp": "tiled"}, offload=True, host=("attention",)),
    "Liger": Contestant(),
}


def adam_in_8_bits(parameters: Any) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, lr=1e-5)  # type: ignore[no-any-return]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-5, fused=True),
    "AdamW of 8 bits": adam_in_8_bits,
    "SGD": partial(torch.optim.SGD, lr=1e-5, fused=True),
}


class Setting(NamedTuple):
    """Step to measure: the number of layers, the tokens of its sequence, and the optimizer."""

    layers: int
    tokens: int
    optimizer: str

    def text(self) -> str:
        return f"{self.layers} layers, {self.tokens:,} tokens, {self.optimizer}"


def prepare(model: PreTrainedModel, name: str) -> None:
    """Turn ``model`` into the contestant ``name``, whatever it was before."""
    contestant = CONTESTANTS[name]
    liger_like.unpatch(model)
    if contestant.patch is not None:
        liger_like.patch(model, strict=True, **contestant.patch)
    policy = {"context_fn": checkpoint_policy((), host=contestant.host)} if contestant.host else {}
    model.gradient_checkpointing_enable({"use_reentrant": False, **policy})
    if name == "Liger":
        patch_by_liger(model)


def clear(model: nn.Module) -> None:
    """Free what a step, or its failure, left behind."""
    model.zero_grad()
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
    reset_peak()


def time_steps(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    host: CheckpointOffload | None,
    warmup: int,
    steps: int,
) -> Row:
    """Measure steps: their times in ms, peak memory, GiB that went to the host and ms that were waited for copies."""

    def step() -> None:
        with host or nullcontext():
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    clear(model)
    times(step, warmup)
    before = (host.out_gib, host.seconds_waited) if host else (0.0, 0.0)
    row: Row = {"ms": times(step, steps)}
    after = (host.out_gib, host.seconds_waited) if host else (0.0, 0.0)
    gib, waited = ((b - a) / steps for a, b in zip(before, after, strict=True))
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if GPU else (0, 0)
    gpu, reserved = (peak / GIB for peak in peaks)
    return row | {"gib": gpu, "reserved": reserved, "host": gib, "waited": waited * 1e3}


def measure(setting: Setting, names: Collection[str], config: LlamaConfig, options: argparse.Namespace) -> Row:
    """Return a row for each contestant, from rounds in which each of them has its turn."""
    config.num_hidden_layers = setting.layers
    model = build(nothing, config, checkpointing=False)
    tokens = tokens_of(config, 1, setting.tokens)
    optimizer = OPTIMIZERS[setting.optimizer](model.parameters())
    host = offload_checkpoints(options.host_gib)
    rows: Row = {}
    for turn in range(options.rounds):
        for name in present({name: None for name in CONTESTANTS if name in names}):
            if "reason" in rows.get(name, {}) or (name == "Liger" and turn + 1 < options.rounds):
                continue
            prepare(model, name)
            offload = host if CONTESTANTS[name].offload else None
            found = attempt(partial(time_steps, model, optimizer, tokens, offload, options.warmup, options.steps))
            if "ms" in found:
                found["ms"] = rows.get(name, {}).get("ms", []) + found["ms"]
            rows[name] = found
            print(f"{setting.text()}, round {turn}, {name}: {found}", flush=True)
    for row in rows.values():
        if "ms" in row:
            row["ms"] = statistics.median(row["ms"])
            row["tokens"] = setting.tokens / row["ms"] * 1e3
    return rows


def copies() -> Row:
    """Measure copies of 1 GiB both ways in GB/s, alone and under matrix products, and those products in TFLOP/s."""
    engine = ENGINES["cuda"](torch.device("cuda", torch.cuda.current_device()))
    memory, on_gpu = engine.memory(COPIED), torch.empty(COPIED, dtype=torch.uint8, device=DEVICE)
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    pairs = {"out": (memory, on_gpu), "back": (on_gpu, memory)}

    def copy(pair: tuple[Tensor, Tensor]) -> None:
        engine.wait(engine.start([pair], engine.current()), on_gpu)

    def products(pair: tuple[Tensor, Tensor] | None, count: int = 60) -> None:
        end = engine.start([pair] * 2, engine.current()) if pair else None
        for _ in range(count):
            torch.mm(a, a, out=out)
        if end:
            engine.wait(end, on_gpu)

    row: Row = {}
    products(None)
    alone = statistics.median(times(partial(products, None), 3))
    row["alone"] = {"TFLOP/s": 60 * 2 * 8192**3 / alone / 1e9}
    for name, pair in pairs.items():
        copy(pair)
        under = statistics.median(times(partial(products, pair), 3))
        rate = COPIED / statistics.median(times(partial(copy, pair), 5)) / 1e6
        row[name] = {"GB/s": rate, "TFLOP/s": 60 * 2 * 8192**3 / under / 1e9}
    return row


def merged(earlier: Row, now: Row) -> Row:
    """Return ``now`` with the settings and contestants of ``earlier`` that it lacks."""
    before, found = earlier.get("settings", {}), now.get("settings", {})
    settings = {}
    for text in dict.fromkeys((*before, *found)):
        rows = before.get(text, {}) | found.get(text, {})
        settings[text] = {name: rows[name] for name in CONTESTANTS if name in rows}
    return {"copies": earlier.get("copies", {})} | now | {"settings": settings}


def keep(result: Row) -> None:
    """Save ``result`` merged into its file, which other processes may have updated meanwhile."""
    RESULTS.mkdir(exist_ok=True)
    with locked(RESULTS):
        save(merged(known(result, PREFIX), result), PREFIX)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark long_context")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768, 65536])
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="AdamW")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--host-gib", type=float, default=None, help="of pinned memory; default: 80 %% of what is free")
    parser.add_argument("--warmup", type=int, default=1, help="steps before the timed ones of a turn")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--copies", action="store_true", help="only the rates of copies between GPU and host")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, printed only; needs no GPU")
    parser.add_argument("--report", action="store_true", help="only write the report of results/; needs no GPU")
    options = parser.parse_args(arguments)
    if options.report:
        return write_report()
    if not GPU and not options.quick:
        parser.error("needs a GPU (all but --quick and --report)")
    result: Row = environment("transformers", "Liger") | {"settings": {}}
    if GPU:
        result["copies"] = copies()
        print(result["copies"], flush=True)
    for tokens in () if options.copies else (64,) if options.quick else options.tokens:
        setting = Setting(options.layers, tokens, options.optimizer)
        config = LlamaConfig(**(CONFIGS["tiny"] if options.quick else LARGER["8b"]).to_dict())
        result["settings"][setting.text()] = measure(setting, options.contestants, config, options)
        if not options.quick:
            keep(rounded(result))
    print(tables(merged({}, rounded(result))))
    if not options.quick:
        keep(rounded(result))
        write_report()
