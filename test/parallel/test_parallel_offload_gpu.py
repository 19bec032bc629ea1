"""Checkpoints on the host by true copies, on a GPU."""

import pytest
import torch
from test_parallel_offload import SIZE, Net, gradients, same

from liger_like.parallel import host_memory, offload_checkpoints

pytestmark = pytest.mark.gpu
SLEEP = 20_000_000  # cycles, 10 ms: more than a copy of 4 MiB takes


@pytest.mark.parametrize("late", ["", "copies", "products"])
def test_late_streams(late, monkeypatch):
    """Gradients are right, and the time that was waited is known, whichever stream is late."""
    monkeypatch.setattr(host_memory, "SLAB", 8 << 20)
    start = host_memory.Copies.start

    def sleep(stream):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP)

    def delayed(self, pairs, owner):
        if late:
            sleep(self.stream if late == "copies" else self.current())
        end = start(self, pairs, owner)
        if late == "products":
            sleep(self.current())  # work that hides the copy
        return end

    monkeypatch.setattr(host_memory.Copies, "start", delayed)
    net = Net(8).cuda()
    x = torch.randn((1 << 16) + 5, SIZE, device="cuda", requires_grad=True)  # more than 4 MiB
    expected = gradients(net, x)
    host, seconds = offload_checkpoints(host_gib=20 / 1024), 0.0
    for _ in range(3):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        with host:
            got = gradients(net, x)
        after.record()
        same(got, expected)
        seconds += before.elapsed_time(after) / 1e3
        torch.full((8, 1 << 20), torch.nan, device="cuda")  # into memory that is free
    assert host.out == host.back == 3 * 4 * x.numel() * 4  # five pages each of 20, so four layers
    assert host.host_gib == 20 / 1024
    if late:  # a share of the time, since other processes may use the GPU; else nothing hides the copies of such layers
        assert (host.seconds_waited > seconds / 2) == (late == "copies")
