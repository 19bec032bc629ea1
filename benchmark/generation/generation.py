"""Times generation: a decode step of one layer's attention over a paged cache, and whole generations of a batch.

    make bench-generation                                        measures all, writes results/ and from it the report
    python -m benchmark generation --shapes 64x8192 16x8192      decode steps of some shapes; results/ keeps the others
    python -m benchmark generation --shapes 64x8192x576          decode steps over latents of DeepSeek-V3, 512 + 64 wide
    python -m benchmark generation --shapes 64x1024x0x64         decode steps of heads of 64 features
    python -m benchmark generation --settings 0 1                some of the whole generations
    python -m benchmark generation --settings 0 --contestants "liger_like, batch"      and some of the contestants
    python -m benchmark generation --quick                       tiny sizes, printed only; needs no GPU
    python -m benchmark generation --report                      the report again, without a GPU

Decode steps are replays of a CUDA graph, and each contestant of a shape has the memory to itself. Those over the cache
of transformers' continuous batching need version 5.23 or newer. Whole generations have a process each: a first call
that compiles and captures, whose seconds are reported as "cold", then warm ones, of which the median counts. By
``generate`` the time to the first token is that of a generation of one token, and a step's time what the other tokens
take, divided by their number. Continuous batching says when it had each token: the first one is that of the last
prompt, and a step the median of those that give each sequence a token. A step's GPU time is the sum of its kernels by
torch's profiler, of a generation less that of one of fewer tokens. Tokens/s count the whole call, and so the garbage
collection with which transformers ends it. Results are written at once.
"""

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import liger_like
from benchmark.common.markdown import Row
from benchmark.common.measure import Step, attempt, captured, environment, gpu_times, merged, rounded, settle, update
from benchmark.common.processes import DEVICE, GPU, times
from benchmark.common.turns import Remote
from benchmark.generation import latents, layers
from benchmark.generation.generation_report import tables, write_report
from benchmark.generation.layers import PAGE, Shape
from benchmark.training.small import MODELS

SHAPES = [Shape(B, S) for B in (1, 16, 64, 256) for S in (1024, 8192, 32768) if B * S <= 64 * 32768]
SHAPES += [Shape(B, 1024, features=64) for B in (1, 16, 64, 256)]
SHAPES += [Shape(B, 8192, latents.LATENT + latents.ROTATED) for B in (1, 16, 64)]
QUICK_SHAPES = [Shape(2, 300), Shape(2, 300, latents.LATENT + latents.ROTATED)]
REPEATS, ROUNDS = 5, 5
BATCH_TOKENS = 8192  # of prompts in a step of continuous batching
CALLS = 3  # warm calls, of which the median counts
PROFILED = 16  # steps whose kernels are summed
TIMEOUT = 300.0  # seconds of a contestant
COPIED = 1 << 30  # bytes of the copy that says how fast memory is


class Setting(NamedTuple):
    """Generation of ``new`` tokens for each of ``batch`` prompts of ``prompt`` tokens."""

    model: str
    batch: int
    prompt: int
    new: int

    def text(self) -> str:
        return f"{self.model}, {self.batch} x {self.prompt} + {self.new}"


SETTINGS = (
    Setting("Llama-3.2-1B", 64, 512, 128),
    Setting("Llama-3.2-1B", 256, 128, 512),
    Setting("Llama-3.2-1B", 16, 1024, 512),
    Setting("Llama-3.2-1B", 64, 2048, 64),
    Setting("Llama-3-8B", 64, 512, 128),
    Setting("Llama-3-8B", 16, 1024, 512),
)
QUICK = Setting("tiny", 2, 20, 6)
# a generation of so many new tokens, which returns the s to the first one and the ms of a step, if it knows them
Generate = Callable[[int], Row]


def _config(**options: Any) -> GenerationConfig:
    return GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, **options)


def by_generate(model: PreTrainedModel, setting: Setting, **options: Any) -> Generate:
    """Return ``generate`` of the batch. A static cache keeps its largest size: the first call must be the longest."""
    ids = torch.randint(3, model.config.vocab_size, (setting.batch, setting.prompt), device=DEVICE)
    mask = torch.ones_like(ids)

    def generate(new: int) -> Row:
        model.generate(ids, attention_mask=mask, generation_config=_config(max_new_tokens=new, **options))
        return {}

    return generate


def by_batch(model: PreTrainedModel, setting: Setting, **options: Any) -> Generate:
    """Return continuous batching by a manager that is kept, with its cache and its graphs."""
    ids = torch.randint(3, model.config.vocab_size, (setting.batch, setting.prompt)).tolist()
    pages = setting.batch * -(-(setting.prompt + setting.new) // PAGE)
    tokens = min(BATCH_TOKENS, setting.batch * setting.prompt)
    page = {"page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size": PAGE}
    settings = ContinuousBatchingConfig(num_blocks=pages + setting.batch, max_batch_tokens=tokens, **page)
    how = {"continuous_batching_config": settings, "persistent_manager": True, "record_timestamps": True, **options}

    def generate(new: int) -> Row:
        start = time.perf_counter()
        outputs = model.generate_batch(ids, generation_config=_config(max_new_tokens=new), **how).values()
        made = [len(output.generated_tokens) for output in outputs]
        if made != [new] * setting.batch:
            raise RuntimeError(f"{new} tokens for each of {setting.batch} prompts were expected, got {made}")
        last = max(outputs, key=lambda output: output.timestamps[0]).timestamps  # prompts take several steps
        end = min(output.timestamps[-1] for output in outputs)  # from here on some have all their tokens
        steps = [after - before for before, after in itertools.pairwise(last) if after <= end]
        return {"first_s": last[0] - start} | ({"ms": statistics.median(steps) * 1e3} if steps else {})

    return generate


def nothing(model: PreTrainedModel) -> None:
    """Leave the model as transformers makes it."""


class Contestant(NamedTuple):
    """Contestant: a change of the model, and the function that generates."""

    prepare: Callable[[PreTrainedModel], Any]
    generate: Callable[[PreTrainedModel, Setting], Generate]


static = partial(by_generate, cache_implementation="static")  # transformers compiles the steps
CONTESTANTS = {
    "transformers, dynamic": Contestant(nothing, by_generate),
    "transformers, static": Contestant(nothing, static),
    "transformers, batch": Contestant(nothing, by_batch),
    "liger_like, dynamic": Contestant(liger_like.patch, by_generate),
    "liger_like, static": Contestant(liger_like.patch, static),
    "liger_like, batch": Contestant(liger_like.patch, by_batch),
}
SETTINGS_BY_TEXT = {setting.text(): CONTESTANTS for setting in (*SETTINGS, QUICK)}


def contestants_of(shape: Shape) -> dict[str, Callable[[Shape], Step]]:
    """Return the contestants of a decode step."""
    return (latents if shape.latent else layers).CONTESTANTS


ORDER: dict[str, Iterable[str]] = {s.text(): contestants_of(s) for s in (*SHAPES, *QUICK_SHAPES)} | SETTINGS_BY_TEXT


def layer_row(build: Callable[[Shape], Step], shape: Shape) -> Row:
    """Return the time of a decode step of a layer in us: of graph replays, and without a GPU of the host."""
    torch.manual_seed(0)
    torch.compiler.reset()
    with torch.no_grad():
        step = build(shape)
        if not GPU:
            return {"us": statistics.median(times(step, 2)) * 1e3}
        for _ in range(3):
            step()
        graph = captured(step, REPEATS)
        row: Row = {"us": lambda: [ms / REPEATS * 1e3 for ms in gpu_times(graph.replay, 4)]}
        settle([row], ROUNDS)
    return row


def time_layers(shape: Shape, names: Sequence[str]) -> dict[str, Row]:
    """Return a row for each contestant; one after the other, since the keys of two may not fit into memory."""
    rows = {}
    for name in names:
        rows[name] = {"bytes": shape.bytes()} | attempt(partial(layer_row, contestants_of(shape)[name], shape))
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()
    return rows


def seconds(generate: Generate, new: int) -> tuple[float, Row]:
    """Return the time of a call, and the figures that it returns."""
    start = time.perf_counter()
    told = generate(new)
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - start, told


def gpu_seconds(generate: Generate, new: int) -> float:
    """Return the sum of the times of all kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        generate(new)
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6


def floor_ms(model: PreTrainedModel, setting: Setting) -> float:
    """Return the time in ms that a copy of the weights and of the keys and values takes, in the middle step."""
    source = torch.empty(COPIED if GPU else 1 << 20, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    ms = statistics.median(times(lambda: target.copy_(source), 9)) / (2 * len(source))
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * width * model.dtype.itemsize
    read = {id(p): p.nbytes for p in (*model.model.layers.parameters(), model.get_output_embeddings().weight)}
    return ms * (sum(read.values()) + setting.batch * (setting.prompt + setting.new // 2) * token)


def contend(name: str, setting: Setting) -> Row:
    """Return the figures of a contestant's whole generation."""
    torch.manual_seed(0)
    contestant = CONTESTANTS[name]
    with torch.device(DEVICE):
        dtype = torch.bfloat16 if GPU else torch.float32
        model = AutoModelForCausalLM.from_config(MODELS[setting.model].config, dtype=dtype).eval()
    contestant.prepare(model)
    row: Row = {"floor_ms": floor_ms(model, setting)}
    generate, new = contestant.generate(model, setting), setting.new
    row["cold_s"], _ = seconds(generate, new)
    generate(1)
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    whole, told = sorted((seconds(generate, new) for _ in range(CALLS)), key=itemgetter(0))[CALLS // 2]
    first = statistics.median(seconds(generate, 1)[0] for _ in range(CALLS))
    row |= {"tokens": setting.batch * new / whole, "first_s": first, "ms": (whole - first) / (new - 1) * 1e3} | told
    if GPU:
        row["gib"] = torch.cuda.max_memory_allocated() / 2**30
        steps = min(PROFILED, new - 1)
        row["gpu_ms"] = (gpu_seconds(generate, new) - gpu_seconds(generate, new - steps)) / steps * 1e3
    return row


def time_generation(setting: Setting, names: Iterable[str], timeout: float) -> dict[str, Row]:
    """Return a row for each contestant, each in a process of its own."""
    rows = {}
    for name in names:
        remote = Remote(contend, name, setting, timeout=timeout)
        rows[name] = attempt(remote.row)
        remote.end()
        print(f"{setting.text()}, {name}: {rows[name]}", flush=True)
    return rows


def _shape(text: str) -> Shape:
    return Shape(*map(int, text.split("x")))


def _argument(shape: Shape) -> str:
    """Return the text that ``_shape`` reads."""
    numbers = [*map(str, shape)]
    return "x".join(numbers if shape.features != layers.D else numbers[: 3 if shape.latent else 2])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark generation")
    numbers = range(len(SETTINGS))
    listed = "; ".join(f"{i}: {setting.text()}" for i, setting in enumerate(SETTINGS))
    shapes = " ".join(map(_argument, SHAPES))
    known = [*dict.fromkeys([*layers.CONTESTANTS, *latents.CONTESTANTS, *CONTESTANTS])]
    parser.add_argument("--shapes", nargs="*", metavar="BxS[xL[xD]]", type=_shape, help=f"decode steps, of: {shapes}")
    parser.add_argument("--settings", nargs="*", type=int, choices=numbers, metavar="N", help=listed)
    parser.add_argument("--contestants", nargs="+", choices=known, default=known)
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds of a whole generation's contestant")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, printed only; needs no GPU")
    parser.add_argument("--report", action="store_true", help="only write the report of results/; needs no GPU")
    options = parser.parse_args()
    if options.report:
        write_report()
        return
    if not GPU and not options.quick:
        parser.error("needs a GPU (all but --quick and --report)")
    if options.shapes is None and options.settings is None:
        options.shapes, options.settings = SHAPES, [*numbers]
    if unknown := set(options.shapes or ()) - {*SHAPES}:
        parser.error(f"--shapes: none is called {', '.join(map(_argument, unknown))}")
    result = environment("transformers") | {"parts": {}}
    settings = [QUICK] if options.quick else [SETTINGS[i] for i in options.settings or ()]
    cases: list[Any] = [*(QUICK_SHAPES if options.quick else options.shapes or ()), *settings]
    for case in cases:
        whole = isinstance(case, Setting)
        names = [name for name in (CONTESTANTS if whole else contestants_of(case)) if name in options.contestants]
        rows = time_generation(case, names, options.timeout) if whole else time_layers(case, names)
        result["parts"][case.text()] = rows
        if not options.quick:
            update(rounded(result), "generation", ORDER)
        print(tables(merged({}, rounded({**result, "parts": {case.text(): rows}}), ORDER)), flush=True)
    if not options.quick:
        write_report()
