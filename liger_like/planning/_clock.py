"""Time of a traced step by a roofline: for each op the larger of FLOPs and bytes over their rates.

The rates are those of kernels measured alone on an H200, those of attention on an H100, which has the same, scaled by
data sheets for other GPUs. The host gives the GPU one op after the other; an op begins once it is given and the one
before has ended. Copies between GPU and host are counted beside. Collectives of FSDP2 count as if nothing hid them.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from liger_like.planning._machine import GPU
from liger_like.runtime.registry import LAUNCHERS

_aten = torch.ops.aten
# TFLOP/s of attention's forward and backward by width of heads: ours where queries see many keys, half of that at RISE
# keys; by least squares from the grid of attention, times 0.93, since long steps run at the limit of power
OURS = {64: (530, 524), 80: (552, 489), 96: (653, 518), 128: (735, 595), 192: (800, 519), 256: (832, 506)}
RISE = 360, 450
TORCHS = {64: (416, 365), 96: (449, 365), 128: (567, 446), 192: (575, 429), 256: (622, 354)}
MASKED = 0.35  # of these rates: the memory-efficient kernel, which computes all pairs
# shares of the rate of products and of a copy
LOSS, TRITON, TORCH, ADAM = 0.89, 0.90, 0.78, 0.66
SENT = "sent"  # the bytes among the times
SETTLED = 2  # repetitions until each takes as long as the one before
LAUNCH = 2e-6  # seconds of the GPU for each kernel
# seconds of the host for a view, an op of torch's, and an op of ours
VIEW, OP, OWN = 7e-6, 22e-6, 110e-6
MODE = 12e-6  # for an op that the mode of a selective checkpoint sees, even one that it leaves out
STEP = 6 * OP  # Python of an optimizer's step, whose ops count beside: so many times an op of torch's on a CPU
TURN = 2 * OP  # bitsandbytes waits for the GPU after each parameter, so the GPU waits for the next update
DTENSOR = 250e-6  # for an op of DTensors: layouts are looked up and local tensors unwrapped, whose ops count beside
VIEWS = {
    *("detach", "alias", "view", "_unsafe_view", "t", "transpose", "expand", "slice", "select", "unsqueeze", "squeeze"),
    *("permute", "as_strided", "split", "split_with_sizes", "chunk", "narrow", "unbind", "reshape", "lift_fresh"),
    *("empty", "empty_like", "new_empty", "empty_strided", "is_same_size"),
}


def moved(*trees: Any) -> int:
    """Return the bytes of the distinct tensors in ``trees``."""
    sizes: dict[Any, int] = {}
    for t in tree_leaves(trees):
        if isinstance(t, Tensor):
            storage = t.untyped_storage()
            sizes[storage._cdata, t.storage_offset(), t.shape] = min(t.numel() * t.element_size(), storage.nbytes())
    return sum(sizes.values())


def risen(keys: float, backward: bool) -> float:
    """Return the share of its highest rate at which attention runs where a query sees so many ``keys``."""
    return keys / (keys + RISE[backward])


def _after(at: tuple[float, float], ops: list[tuple[float, float]]) -> tuple[float, float]:
    """Return when the last of ``ops`` is given and done, from when the op before was."""
    given, done = at
    for host, gpu in ops:
        given += host
        done = max(given, done) + gpu if gpu else done
    return given, done


class Clock:
    """Seconds of the GPU by group, of the host, FLOPs, and bytes sent to the host's memory."""

    def __init__(self, gpu: GPU) -> None:
        self.groups: dict[str, float] = defaultdict(float)
        self.ops: list[tuple[float, float]] = []  # seconds of the host and of the GPU for each op, in their order
        self.again = 0, 0, 0  # ops from one to another that happen so many more times
        self.sent, self.flops, self.calibrated = 0.0, 0, gpu.calibrated
        self.products, self.copy, self.link = gpu.tflops * 1e12, gpu.bandwidth * 1e12, gpu.link * 1e9
        self.pcie = gpu.pcie * 1e9
        self.attention = gpu.attention

    def __call__(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an op."""
        packet, space, name = func._overloadpacket, func.namespace, func._schema.name.partition("::")[2]
        before, host = self.gpu, 0.0
        if space in ("c10d", "_c10d_functional"):
            self._collective(name, args, out)
        elif name in VIEWS or space in ("prim", "profiler"):
            host = VIEW
        elif func in LAUNCHERS:
            host = OWN
            self._own(packet, name, args, kwargs, out)
        else:
            host = OP
            self._torchs(packet, name, args, kwargs, out)
        self.ops.append((host, self.gpu - before))

    def add(self, group: str, seconds: float) -> None:
        """Count ``seconds`` of the GPU, fewer than none for what it need not do, at the end of the step."""
        self.groups[group] += seconds
        self.ops.append((0.0, seconds))

    def repeat(self, begin: int, end: int, times: dict[str, float], count: int) -> None:
        """Count the ops from ``begin`` to ``end``, which take ``times``, ``count`` more times."""
        self.again = begin, end, count
        for group, seconds in times.items():
            if group == SENT:
                self.sent += count * seconds
            else:
                self.groups[group] += count * seconds

    def listen(self, seconds: float = MODE) -> None:
        """Count the host's time of a mode that sees an op, or ``seconds`` of other Python."""
        self.ops.append((seconds, 0.0))

    @property
    def gpu(self) -> float:
        """Return the seconds of the GPU, without those in which it waits."""
        return sum(self.groups.values())

    @property
    def host(self) -> float:
        """Return the seconds of the host."""
        begin, end, count = self.again
        return sum(host for host, _ in self.ops) + count * sum(host for host, _ in self.ops[begin:end])

    @property
    def seconds(self) -> float:
        """Return the time of the step, at least that of the copies."""
        begin, end, count = self.again
        before = at = _after((0.0, 0.0), self.ops[:end])
        for _ in range(few := min(count, SETTLED)):
            before, at = at, _after(at, self.ops[begin:end])
        at = at[0] + (count - few) * (at[0] - before[0]), at[1] + (count - few) * (at[1] - before[1])
        return max(*_after(at, self.ops[end:]), self.copies)

    @property
    def copies(self) -> float:
        """Return the time of the copies to the host and back."""
        return 2 * self.sent / self.pcie

    def _products(self, group: str, flops: float, bytes_moved: int, rate: float) -> None:
        self.flops += int(flops)
        self.groups[group] += max(flops / rate, bytes_moved / self.copy) + LAUNCH

    def _own(self, packet: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        size = moved(args, kwargs, out)
        if name == "linear_cross_entropy_last":
            return  # counted with the first
        if packet not in flop_registry:
            self.groups["memory"] += size / (TRITON * self.copy) + LAUNCH
            return
        flops = flop_registry[packet](*args, **kwargs, out_val=out)
        if name.startswith("linear_"):
            self._products("loss", flops, 0, LOSS * self.products)
        elif name.startswith("attention_"):
            backward = name != "attention_fwd"
            q = args[1] if backward else args[0]
            whole = [arg for arg in args if isinstance(arg, int) and not isinstance(arg, bool)]
            rows, keys, (left, right) = *whole[:2], whole[-2:]
            # the last query sees the last key, so fewer queries than keys see more than half
            seen = 1.0 if right else keys / 2 / rows if rows > keys else 1 - rows / 2 / keys
            if 0 <= left < keys:
                seen = min(seen, (left + 1) / keys * (1 - left / 2 / keys))
            rate = self._attention(OURS, q.shape[-1], backward) * risen(keys * seen, backward)
            self._products("attention", flops * seen, 0, rate)
        else:
            self._products("products", flops, size, self.products)

    def _torchs(self, packet: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        size = moved(args, kwargs, out)
        if "scaled_dot_product" in name:
            backward, causal = "backward" in name, "efficient" not in name
            q, k = args[1:3] if backward else args[:2]
            flops = (
                4 * q.shape[:3].numel() * k.shape[2] * q.shape[3] * (2.5 if backward else 1) * (0.5 if causal else 1)
            )
            rate = self._attention(TORCHS, q.shape[-1], backward) * (1 if causal else MASKED)
            self._products("attention", flops, 0, rate)
        elif name.removeprefix("_").startswith(("fused_adam", "fused_sgd")):  # parameters and moments are written, too
            self.groups["optimizer"] += (size + moved(args[0], args[2:4])) / (ADAM * self.copy)
            self.groups["optimizer"] += TURN * (name == "fused_adamw8bit_")
        elif packet is _aten._grouped_mm or packet in flop_registry:
            known = flop_registry.get(packet)
            # of rows [T, K] with [E, K, N], or of [N, T] with [T, K]: torch's registry lacks grouped products
            args = [arg for arg in args if not isinstance(arg, torch.dtype)]  # of a result in fp32
            flops = known(*args, **kwargs, out_val=out) if known else 2 * args[0].numel() * args[1].shape[-1]
            self._products("products", flops, size, self.products)
        else:
            self.groups["memory"] += size / (TORCH * self.copy) + LAUNCH

    def _attention(self, rates: dict[int, tuple[int, int]], width: int, backward: bool) -> float:
        found = min((w for w in rates if w >= width), default=256)
        return rates[found][backward] * 1e12 * self.attention

    def _collective(self, name: str, args: Any, out: Any) -> None:
        """Count all but this GPU's own part of an all-gather or a reduce-scatter."""
        kind = name.replace("_", "")
        if "allgather" in kind or "reducescatter" in kind:
            sizes = sorted((moved(args[0]), moved(args[1]) or moved(out)))  # functional ones take no output
            self.groups["network"] += (sizes[1] - sizes[0]) / self.link
