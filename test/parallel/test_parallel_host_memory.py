"""Memory of the host for a GPU's tensors, and who waits for whom when they are copied, on streams that note it."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from liger_like.parallel import host_memory

PAGE, SLAB = 64, 256  # bytes


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(host_memory, "PAGE", PAGE)
    monkeypatch.setattr(host_memory, "SLAB", SLAB)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host with 1000 kB, and a process in no cgroup."""
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:   1000 kB\n")
    (tmp_path / "own").write_text("")
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "folder", "limit", "usage", "none"),
    [
        ("0::/", "", "memory.max", "memory.current", "max"),
        ("0::/job/step", "job", "memory.max", "memory.current", "max"),  # the limit of a group around it
        ("4:cpu,memory:/job", "memory/job", "memory.limit_in_bytes", "memory.usage_in_bytes", str(1 << 62)),
    ],
)
def test_free_memory(line, folder, limit, usage, none, host, monkeypatch):
    """The kernel's figure, the cgroup's if less is left there, and a share of it for each process of the host."""
    assert host_memory.free_bytes() == 800 << 10
    (host / "own").write_text(f"1:name=systemd:/job\n{line}\n")
    place = host / folder
    place.mkdir(parents=True, exist_ok=True)
    (place / limit).write_text(f"{none}\n")
    (place / usage).write_text(f"{100 << 10}\n")
    assert host_memory.free_bytes() == 800 << 10
    (place / limit).write_text(f"{600 << 10}\n")
    assert host_memory.free_bytes() == 400 << 10
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host_memory.free_bytes() == 100 << 10
    (place / usage).write_text(f"{700 << 10}\n")  # more than the limit
    assert host_memory.free_bytes() == 0


def test_slabs_take_what_the_budget_allows():
    """Each is a power of two, since torch rounds pinned memory up to one."""
    budget = host_memory.Budget(2 * SLAB + 3 * PAGE + 5)
    assert [budget.slab() for _ in range(5)] == [SLAB, SLAB, 2 * PAGE, PAGE, 0]


def test_pages_come_back_in_one_step(monkeypatch):
    """Garbage collection in another thread may give pages back at any time: ``take`` must see the same list."""
    copies = SimpleNamespace(memory=lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setitem(host_memory.ENGINES, "cpu", lambda device: copies)
    pages = host_memory.Pages(torch.device("cpu"), host_memory.Budget(SLAB))
    free = pages.free
    assert pages.take(2 * PAGE) == [0, 1]
    assert pages.take(PAGE) == [2]
    pages.give([0, 1])
    assert pages.free is free
    assert pages.take(3 * PAGE) == [0, 1, 3]
    assert pages.take(1) is None


class Stream:
    """A stream that knows the ends of copies that its later work comes after."""

    def __init__(self, device=None):
        self.device, self.after = device, set()

    def wait_stream(self, other):
        self.after |= {other, *other.after}

    def record_event(self):
        return frozenset({self, *self.after})

    def wait_event(self, event):
        self.after |= event


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.stream = stream

    def query(self):
        return False


@pytest.fixture
def cuda(monkeypatch):
    """Stand for torch.cuda: ``current`` is the stream of the thread."""

    @contextlib.contextmanager
    def entered(stream):
        before, fake.current = fake.current, stream
        yield
        fake.current = before

    fake = SimpleNamespace(Stream=Stream, Event=Event, stream=entered, current=Stream(), capturing=False)
    fake.current_stream = lambda device: fake.current
    fake.is_current_stream_capturing = lambda: fake.capturing
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


class Tensor:
    """A tensor of the GPU that notes the stream of copies into it, and the streams that use it."""

    def __init__(self, cuda):
        self.cuda, self.copied, self.used = cuda, [], []

    def copy_(self, source, non_blocking):
        assert non_blocking
        self.copied.append((self.cuda.current, {*self.cuda.current.after}))

    def record_stream(self, stream):
        self.used.append(stream)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_who_waits_for_whom(elsewhere, cuda):
    """Copies come after what the owner and the current stream do; both come after the copies, on one stream or two."""
    copies, owner, tensor = host_memory.Copies(torch.device("cuda", 1)), cuda.current, Tensor(cuda)
    assert copies.stream.device == torch.device("cuda", 1)
    assert copies.current() is owner
    if elsewhere:
        cuda.current = Stream()
    starter = cuda.current
    end = copies.start([(tensor, None)], owner)
    assert tensor.copied == [(copies.stream, {owner, starter})]
    assert cuda.current is starter
    if elsewhere:
        cuda.current = Stream()
    copies.wait(end, tensor)
    for stream in (owner, cuda.current):
        assert copies.stream in stream.after
    assert tensor.used == [cuda.current] * elsewhere  # its memory is not used again while this stream reads it


def test_a_capture_is_refused(cuda):
    copies = host_memory.Copies(torch.device("cuda", 0))
    cuda.capturing = True
    with pytest.raises(RuntimeError, match="cannot run in a CUDA graph: capture the step without it"):
        copies.current()


def test_memory_is_the_hosts(cuda, monkeypatch):
    """Wherever torch creates tensors by default."""
    empty = torch.empty
    with torch.device("meta"):
        assert empty(0).is_meta  # the first call looks up the functions that take the device, for all later tests
        monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **options: empty(*size, **options))
        memory = host_memory.Copies(torch.device("cuda", 0)).memory(8)
    assert memory.device.type == "cpu"
