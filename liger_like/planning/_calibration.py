"""Rates of the GPU at hand, measured in half a minute and kept in a file, for the clock of a plan.

Products, attention and copies run for seconds first: under load the clock of a GPU falls to where a step runs.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from liger_like.ops import flash_attention
from liger_like.parallel.host_memory import ENGINES
from liger_like.planning._clock import OURS, risen
from liger_like.planning._machine import GPU, GPUS, keep
from liger_like.runtime.support import architecture

LOAD = 2.0  # seconds under load before the first measurement
TIMES = 9  # measurements of each rate, of which the median counts
ROUND = 16  # calls between two events: the host's time does not count
PRODUCT = 8192, 4096, 14336  # tokens, width and intermediate size of an 8B model
TOKENS, HEADS, WIDTH = 8192, 16, 128
COPIED = 1 << 30  # bytes of a copy


def calibrated() -> GPU:
    """Measure the current GPU, keep its rates and return it. Raises ValueError without a GPU."""
    if not torch.cuda.is_available():
        raise ValueError("calibrate needs a GPU that torch can use, got none")
    device = torch.device("cuda", torch.cuda.current_device())
    properties: Any = torch.cuda.get_device_properties(device)
    kind = architecture(device)
    sheet = GPUS[{8: "a100", 9: "h200", 10: "b200"}.get(kind, "h200")]
    found = GPU(
        name=properties.name,
        architecture=kind,
        multiprocessors=properties.multi_processor_count,
        l2=properties.L2_cache_size,
        shared_memory=properties.shared_memory_per_block_optin,
        memory=properties.total_memory,
        link=sheet.link,  # which a single GPU cannot measure
        calibrated=True,
        **rates(device),
    )
    keep(found)
    return found


def rates(device: torch.device) -> dict[str, float]:
    """Return the rates of ``GPU``: of products, attention over an H200's, a copy, and a copy to the host."""
    tokens, width, wide = PRODUCT
    x, weight = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in ((tokens, width), (width, wide)))
    q, k, v = (torch.randn(1, TOKENS, HEADS, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(3))
    upstream = torch.randn_like(q)
    for t in (q, k, v):
        t.requires_grad_()
    source = torch.randint(256, (COPIED,), device=device, dtype=torch.uint8)
    target, engine = torch.empty_like(source), ENGINES["cuda"](device)
    memory = engine.memory(COPIED)
    forward = 2 * TOKENS**2 * HEADS * WIDTH  # FLOPs of causal attention; the backward has 2.5 times as many
    at = [rate * 1e12 * risen(TOKENS / 2, bool(i)) for i, rate in enumerate(OURS[WIDTH])]
    on_h200 = forward / at[0] + 2.5 * forward / at[1]

    def attention() -> None:
        torch.autograd.grad(flash_attention(q, k, v, causal=True), (q, k, v), upstream)

    def out() -> None:
        engine.wait(engine.start([(memory, source)], engine.current()), source)

    end = time.monotonic() + LOAD
    while time.monotonic() < end:
        seconds(lambda: torch.mm(x, weight))
    return {
        "tflops": 2 * tokens * width * wide / seconds(lambda: torch.mm(x, weight)) / 1e12,
        "attention": on_h200 / seconds(attention),
        "bandwidth": 2 * COPIED / seconds(lambda: target.copy_(source)) / 1e12,
        "pcie": COPIED / seconds(out) / 1e9,
    }


def seconds(step: Callable[[], object]) -> float:
    """Return the GPU's time of a ``step``, the median of several rounds."""
    step()
    found: list[float] = []
    for _ in range(TIMES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(ROUND):
            step()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / ROUND / 1e3)
    return statistics.median(found)
