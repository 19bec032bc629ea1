"""Times training steps on long sequences on one GPU: checkpoints and attention on the host, tiled MLPs, and neither.

    make bench-long-context                                measures, writes results/ and from it the report
    python -m benchmark long_context --settings 0 3        some of the settings; results/ keeps what it has of the rest
    python -m benchmark long_context --contestants liger_like "liger_like, tiled"
    python -m benchmark long_context --copies              only the rates of copies between GPU and host
    python -m benchmark long_context --quick               tiny shapes, printed only; needs no GPU
    python -m benchmark long_context --report              the report again, without a GPU

A step is forward, backward and optimizer in bf16, with every layer checkpointed, on random tokens and weights of layers
of Llama-3-8B. Each setting has a process of its own, which ends with the setting's time. In it all contestants have the
same weights and take turns, so that 1 % shows; Liger comes last, because it changes the model for good. A turn begins
with steps on at most 65,536 tokens: they compile kernels, and last until the clock has fallen to where it stays. AdamW
steps in the backward, with states of 8 bits for all layers of the longest. GPU memory is the peak of all that torch
allocated. Host memory is what a step copies there. The host's memory is pinned before. The floor is the time of a
step's matrix products and attention alone.
`python -m benchmark plan --files long-context` compares the peaks with predicted ones.
"""

import argparse
import gc
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

import liger_like
from benchmark.common.markdown import Row
from benchmark.common.measure import RESULTS, ToldError, attempt, environment, known, locked, present, rounded, save
from benchmark.common.processes import DEVICE, GPU, Processes, reset_peak, times
from benchmark.training.long_context_report import tables, write_report
from benchmark.training.planned import optimizer_kind
from benchmark.training.training import build, nothing, patch_by_liger, tokens_of
from examples.parallel import LARGER
from examples.train import CONFIGS
from liger_like.parallel import checkpoint_policy, group_checkpoints, offload_checkpoints, step_in_backward
from liger_like.parallel.host_memory import ENGINES
from liger_like.parallel.offload import GIB, CheckpointOffload

PREFIX, COPIED = "long-context", 1 << 30  # bytes of a timed copy
WARM, LOAD = 65536, 2.0  # tokens, and seconds under load: the first second runs at a clock that the power limit ends


class Contestant(NamedTuple):
    """Contestant: what patches the model, which checkpoints and results go to the host, and layers of a checkpoint."""

    patch: dict[str, Any] | None = None
    offload: bool = False
    host: tuple[str, ...] = ()
    group: int = 1


OURS = "liger_like"
CONTESTANTS = {
    "transformers": Contestant(),
    OURS: Contestant({}),
    "liger_like, offloaded": Contestant({}, offload=True),
    "liger_like, tiled": Contestant({"mlp": "tiled"}),
    "liger_like, offloaded, tiled": Contestant({"mlp": "tiled"}, offload=True),
    "liger_like, offloaded, tiled, attention kept": Contestant({"mlp": "tiled"}, offload=True, host=("attention",)),
    "liger_like, offloaded, tiled, 2 layers a checkpoint": Contestant({"mlp": "tiled"}, offload=True, group=2),
    "Liger": Contestant(),
}


class Setting(NamedTuple):
    """Steps to measure: layers, tokens of the sequence, who takes turns, how often, seconds for all, and optimizer."""

    layers: int
    tokens: int
    contestants: tuple[str, ...]
    rounds: int
    steps: int
    limit: float
    optimizer: str = "adamw"

    def text(self) -> str:
        return f"{self.layers} layers, {self.tokens:,} tokens" + ", 8-bit AdamW" * (self.optimizer == "adamw8bit")

    def floor(self, config: LlamaConfig, kept: bool) -> float:
        """Return the seconds of a step's products and attention, at the rates that both reach alone on an H100.

        ``kept``: attention's forward runs once, else twice.
        """
        H, L, S, V = config.hidden_size, self.layers, self.tokens, config.vocab_size
        kv = H * config.num_key_value_heads // config.num_attention_heads
        weights = L * (2 * H * (H + kv) + 3 * H * config.intermediate_size)
        attention = 2 * S * S * H * L
        products = S * (8 * weights + 6 * V * H)
        return products / 726e12 + (1 if kept else 2) * attention / 762e12 + 2.5 * attention / 611e12


TILED = "liger_like, offloaded, tiled"
KEPT, PAIRS = f"{TILED}, attention kept", f"{TILED}, 2 layers a checkpoint"
SETTINGS = (
    *(Setting(4, tokens, tuple(CONTESTANTS), 3, 3, 300) for tokens in (16384, 32768, 65536)),
    Setting(8, 131072, ("transformers", "liger_like, tiled", TILED, KEPT, "Liger"), 1, 1, 150),
    Setting(8, 262144, ("liger_like, tiled", KEPT), 1, 1, 150),
    Setting(4, 655360, (KEPT,), 1, 1, 200),
    Setting(2, 1310720, (KEPT,), 1, 1, 300),
    Setting(32, 131072, (KEPT,), 1, 1, 200),
    Setting(32, 655360, (PAIRS,), 1, 1, 1500, "adamw8bit"),  # needs an H200
)
QUICK = Setting(3, 64, tuple(CONTESTANTS), 1, 1, 300)


def prepare(model: PreTrainedModel, name: str) -> None:
    """Turn ``model`` into the contestant ``name``, whatever it was before."""
    contestant = CONTESTANTS[name]
    liger_like.unpatch(model)
    if contestant.patch is not None:
        liger_like.patch(model, strict=True, **contestant.patch)
    policy = {"context_fn": checkpoint_policy((), host=contestant.host)} if contestant.host else {}
    model.gradient_checkpointing_enable({"use_reentrant": False, **policy})
    if contestant.group > 1:
        group_checkpoints(model, contestant.group)
    if name == "Liger":
        patch_by_liger(model)


def clear(model: nn.Module) -> None:
    """Free what a step, or its failure, left behind."""
    model.zero_grad()
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
    reset_peak()


def time_steps(model: PreTrainedModel, tokens: Tensor, host: CheckpointOffload | None, warmups: int, steps: int) -> Row:
    """Measure steps: their times in ms, peak memory, GiB that went to the host and ms that were waited for copies."""

    def step(tokens: Tensor) -> None:
        with host or nullcontext():
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    times(partial(step, tokens[:, :WARM]), warmups)
    reset_peak()
    before = (host.out_gib, host.seconds_waited) if host else (0.0, 0.0)
    row: Row = {"ms": times(partial(step, tokens), steps)}
    after = (host.out_gib, host.seconds_waited) if host else (0.0, 0.0)
    gib, waited = ((b - a) / steps for a, b in zip(before, after, strict=True))
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if GPU else (0, 0)
    gpu, reserved = (peak / GIB for peak in peaks)
    return row | {"gib": gpu, "reserved": reserved, "host": gib, "waited": waited * 1e3}


def pin(host: CheckpointOffload, setting: Setting, config: LlamaConfig) -> None:
    """Let ``host`` pin what the contestants of ``setting`` send there: inputs of layers, and results of attention."""
    chosen = [CONTESTANTS[name] for name in setting.contestants if CONTESTANTS[name].offload]
    row, lse = 2 * config.hidden_size, 4 * config.num_attention_heads
    inputs = -(-setting.layers // min((c.group for c in chosen), default=1)) - 1  # the last checkpoint stays
    several = [row] * inputs * bool(chosen) + [row, lse] * (setting.layers - 1) * any(c.host for c in chosen)
    pages = host.pages_of(torch.device("cuda", torch.cuda.current_device()))
    start = time.perf_counter()
    taken = [pages.take(setting.tokens * each) for each in several]
    for own in taken:
        pages.give(own or [])
    print(f"{host.host_gib:.1f} GiB pinned in {time.perf_counter() - start:.1f} s", flush=True)


def turns(setting: Setting, config: LlamaConfig, host_gib: float | None) -> Iterator[Row]:
    """Yield name and figures of each turn: rounds in which every contestant has its own."""
    config.num_hidden_layers = setting.layers
    model = build(nothing, config, checkpointing=False)
    tokens = tokens_of(config, 1, setting.tokens)
    step_in_backward(model, optimizer_kind(setting.optimizer))
    warm = setting._replace(tokens=min(setting.tokens, WARM))
    warmups = math.ceil(LOAD / warm.floor(config, True)) if GPU else 1
    host = offload_checkpoints(host_gib)
    if GPU:
        pin(host, setting, config)
    failed = set()
    for turn in range(setting.rounds):
        for name in setting.contestants[:: -1 if turn % 2 else 1]:  # a GPU that grows warmer slows down the later ones
            if name in failed or (name == "Liger" and turn + 1 < setting.rounds):
                continue
            start = time.perf_counter()
            clear(model)
            prepare(model, name)
            offload = host if CONTESTANTS[name].offload else None
            found = attempt(partial(time_steps, model, tokens, offload, warmups, setting.steps))
            failed |= {name} if "reason" in found else set()
            print(f"{setting.text()}, round {turn}, {name}: {found}, {time.perf_counter() - start:.0f} s", flush=True)
            yield {"name": name, **found}


def measured(setting: Setting, config: LlamaConfig, rows: list[Row]) -> Row:
    """Return a row for each contestant from its turns; the end of the process is the reason of those without."""
    result: Row = {}
    for name in setting.contestants:
        own = [row for row in rows if row.get("name") == name]
        timed = [row for row in own if "ms" in row]
        if timed:
            ms = statistics.median(ms for row in timed for ms in row["ms"])
            floor = 1e3 * setting.floor(config, CONTESTANTS[name].host != ())
            result[name] = timed[-1] | {"ms": ms, "tokens": setting.tokens / ms * 1e3, "floor": floor}
            del result[name]["name"]
        elif told := [row["reason"] for row in (*own, *rows[-1:]) if "reason" in row]:
            result[name] = {"reason": told[0]}
    return result


def copies() -> Iterator[Row]:
    """Yield the GB/s of copies of 1 GiB both ways, and the TFLOP/s of matrix products, alone and beside copies."""
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
    yield row


def merged(earlier: Row, now: Row) -> Row:
    """Return ``now`` with the settings and contestants of ``earlier`` that it lacks."""
    before, found = earlier.get("settings", {}), now.get("settings", {})
    settings = {}
    order = {setting.text(): i for i, setting in enumerate(SETTINGS)}
    for text in sorted({**before, **found}, key=lambda text: order.get(text, len(order))):
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
    parser.add_argument("--settings", type=int, nargs="+", choices=range(len(SETTINGS)), default=range(len(SETTINGS)))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--host-gib", type=float, default=None, help="of pinned memory; default: 80 %% of what is free")
    parser.add_argument("--copies", action="store_true", help="only the rates of copies between GPU and host")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, printed only; needs no GPU")
    parser.add_argument("--report", action="store_true", help="only write the report of results/; needs no GPU")
    options = parser.parse_args(arguments)
    if options.report:
        return write_report()
    if not GPU and not options.quick:
        parser.error("needs a GPU (all but --quick and --report)")
    result: Row = environment("transformers", "Liger", "bitsandbytes") | {"settings": {}}
    if GPU and (options.copies or len(options.settings) == len(SETTINGS)):
        (result["copies"],) = Processes(1, 60).run(copies)
        if "reason" in result["copies"]:
            raise ToldError(result["copies"]["reason"])
        print(result["copies"], flush=True)
    chosen = [QUICK] if options.quick else [] if options.copies else [SETTINGS[i] for i in options.settings]
    for setting in chosen:
        names = present({name: None for name in setting.contestants if name in options.contestants})
        asked = setting._replace(contestants=tuple(names))
        config = LlamaConfig(**(CONFIGS["tiny"] if options.quick else LARGER["8b"]).to_dict())
        print(f"{setting.text()}, a step takes at least {setting.floor(config, True):.2f} s", flush=True)
        rows = Processes(1, setting.limit).run(turns, asked, config, options.host_gib)
        result["settings"][setting.text()] = measured(asked, config, rows)
        if not options.quick:
            keep(rounded(result))
    print(tables(merged({}, rounded(result))))
    if not options.quick:
        keep(rounded(result))
        write_report()
