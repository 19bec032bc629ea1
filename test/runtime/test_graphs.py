"""GraphedStep trains as an ordinary loop does: without a GPU by ordinary steps, on a GPU by replays of graphs."""

import copy
from contextlib import nullcontext

import peft
import pytest
import torch
from tiny_models import CONFIG, Mean, batch, tiny
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from liger_like import GraphedStep, patch, unpatch
from liger_like.graphs import LAUNCHES
from liger_like.runtime import support

pytestmark = pytest.mark.usefixtures("references")
ROUNDS = (
    2 * LAUNCHES + 2
)  # the first step makes the optimizer's state, which makes a new kind; then captures and replays
each_optimizer = pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=str)


def llama(device, dtype=None, **config):
    """A patched model and its twin."""
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    model = tiny("Llama", device, dtype, hidden_size=64, intermediate_size=128, head_dim=16, **config)
    patch(model, strict=True)
    return model, copy.deepcopy(model)


def adamw(model, device, lr=1e-2, **options):
    return torch.optim.AdamW(model.parameters(), lr=lr, capturable=device == "cuda", **options)


class Loop:
    """The ordinary loop with the calls of a GraphedStep. On a GPU the learning rate is a tensor, as in a graph."""

    def __init__(self, model, optimizer, max_norm=None, autocast=nullcontext):
        self.model, self.optimizer, self.max_norm, self.autocast = model, optimizer, max_norm, autocast
        self.grad_norm = None

    def accumulate(self, **inputs):
        with self.autocast():
            loss = self.model(**inputs).loss
        loss.backward()
        return loss.detach()

    def __call__(self, **inputs):
        loss = self.accumulate(**inputs)
        if self.max_norm is not None:
            self.grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        (group,) = self.optimizer.param_groups
        rate = group["lr"]
        group["lr"] = torch.tensor(rate, device="cuda") if loss.is_cuda else rate
        self.optimizer.step()
        group["lr"] = rate
        self.optimizer.zero_grad()
        return loss


def assert_same(model, twin):
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q), name


@each_optimizer
@pytest.mark.parametrize("autocast", [False, True])
def test_trains_as_a_loop(options, autocast, device, poisoned):
    """Two shapes, a scheduler, clipping and accumulation; all losses and norms are looked at after the last step."""
    model, twin = llama(device, torch.float32 if autocast else None)
    mixed = lambda: torch.autocast(device, torch.bfloat16, enabled=autocast)  # noqa: E731
    steps = (
        GraphedStep(model, adamw(model, device, **options), max_norm=0.5),
        Loop(twin, adamw(twin, device, **options), 0.5, mixed),
    )
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(step.optimizer, 3 * ROUNDS) for step in steps]
    seen = [], []
    for _ in range(ROUNDS):
        short, long = batch(device), batch(device, rows=1, length=30)
        items = torch.tensor(40, device=device)
        for step, scheduler, results, context in zip(steps, schedulers, seen, (mixed, nullcontext), strict=True):
            with context():  # around the whole step
                for only in (short, long):
                    results += (step(**only), step.grad_norm)
                    scheduler.step()
                with mixed(), torch.no_grad():  # autocast keeps casts of the weights until its outermost block ends
                    results.append(step.model(**short).loss)
                results.append(step.accumulate(**short, num_items_in_batch=items))
                results.append(step.accumulate(**long, num_items_in_batch=items))
                results += (step(**short, num_items_in_batch=items), step.grad_norm)
                scheduler.step()
        assert all(p.grad is None for p in model.parameters())
    assert_same(model, twin)
    assert torch.equal(*(torch.stack([t.float() for t in results]) for results in seen))
    # each shape alone, the micro-batches of each shape, and the update after these
    assert len(steps[0]._captured) == (5 if device == "cuda" else 0)


def eval_mode(model, optimizer):
    model.eval()


def freeze(model, optimizer):
    model.model.layers[0].requires_grad_(False)


def decay(model, optimizer):
    optimizer.param_groups[0]["weight_decay"] = 0.5


def load(model, optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    for one in state["state"].values():
        one["exp_avg"].neg_()
    optimizer.load_state_dict(state)


def replace(model, optimizer):
    weight = model.model.norm.weight
    weight.data = weight.detach() * 2


def unpatched(model, optimizer):
    unpatch(model)


def other_attention(model, optimizer):
    model.set_attn_implementation("sdpa")


def leave_out(model, optimizer):
    optimizer.param_groups[0]["params"].pop()


each_change = pytest.mark.parametrize(
    "change", [eval_mode, freeze, decay, load, replace, unpatched, other_attention, leave_out]
)


@each_change
def test_trains_as_a_loop_after_a_change(change, device, poisoned):
    # "eager" copies a number from the host in each forward. In a capture transformers 5.17 passes a mask to sdpa, and
    # with it repeats shared keys, whose gradients then round before they are summed: each query head has its own keys
    model, twin = llama(device, attn_implementation="sdpa", num_key_value_heads=4)
    steps = GraphedStep(model, adamw(model, device)), Loop(twin, adamw(twin, device))
    for i in range(2 * ROUNDS):
        inputs = batch(device)
        for step in steps:
            if i == ROUNDS:
                change(step.model, step.optimizer)
            with sdpa_kernel(SDPBackend.MATH):  # the others may sum in another order each time
                step(**inputs)
    assert_same(model, twin)
    assert len(steps[0]._captured) == (2 if device == "cuda" else 0)


@each_change
def test_a_change_makes_a_new_kind(change):
    """On a CPU nothing is captured, but the keys are the same."""
    model, _ = llama("cpu")
    optimizer = adamw(model, "cpu")
    step = GraphedStep(model, optimizer)
    inputs = batch()
    step(**inputs)
    step(**inputs)
    kinds = {step._kind(step._step, (), inputs)}
    optimizer.param_groups[0]["lr"] = 0.5
    step(**batch())
    kinds.add(step._kind(step._step, (), batch()))
    assert len(kinds) == 1
    change(model, optimizer)
    step(**inputs)
    kinds.add(step._kind(step._step, (), inputs))
    assert len(kinds) == 2


@pytest.mark.parametrize("work", ["_step", "_backward"])
def test_a_weight_that_becomes_a_part_of_itself_makes_a_kind(work):
    model, _ = llama("cpu")
    step = GraphedStep(model, torch.optim.SGD(model.parameters(), lr=0.5))
    inputs, kinds = batch(), set()
    for words in (CONFIG["vocab_size"], CONFIG["vocab_size"] - 1):
        inputs = {name: t.clamp(max=words - 1) for name, t in inputs.items()}
        weight, model.config.vocab_size = model.lm_head.weight, words
        weight.data = weight.detach()[:words]
        model.lm_head.out_features = words
        step.accumulate(**inputs)
        step(**inputs)
        assert len(weight) == words
        kinds.add(step._kind(getattr(step, work), (), inputs))
    assert len(kinds) == 2


def test_adapters_make_a_kind():
    model = peft.get_peft_model(llama("cpu")[0], peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    step = GraphedStep(model, torch.optim.SGD(model.parameters()))
    setups = []

    def look():
        step._inspect()
        setups.append(step._setup)

    look()
    model.merge_adapter()
    look()
    model.unmerge_adapter()
    look()
    with model.disable_adapter():
        look()
    model.set_adapter("other")
    look()
    model.base_model.model.model.layers[0].self_attn.q_proj.scale_layer(2.0)
    look()
    assert [setups.index(setup) for setup in setups] == [0, 1, 0, 3, 4, 5]


def test_arguments_make_a_kind():
    step = GraphedStep(nn.Linear(2, 1), torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
    t = torch.zeros(2, 3)
    calls = [
        ((), {"x": t}), ((t,), {}), ((), {"y": t}), ((), {"x": t[:1]}), ((), {"x": t.long()}), ((), {"x": [t]}),
        ((), {"x": {"a": t}}), ((), {"x": t, "n": 1}), ((), {"x": t, "n": 1.0}), ((), {"x": t, "n": True}),
        ((), {"x": t, "n": None}), ((), {"x": t, "n": "1"}), ((), {"x": (t,)}), ((), {"x": t, "n": []}),
    ]  # fmt: skip
    assert len({step._kind(step._step, *call) for call in calls}) == len(calls)
    step._inspect()
    kind = step._kind(step._step, (), {"x": t})
    assert step._kind(step._step, (), {"x": t + 1}) == kind
    assert step._kind(step._backward, (), {"x": t}) != kind
    with torch.autocast("cpu", torch.bfloat16):
        step._inspect()
        assert step._kind(step._step, (), {"x": t}) != kind
    backward = step._kind(step._backward, (), {"x": t})
    step.max_norm = 1.0
    step._inspect()
    assert step._kind(step._step, (), {"x": t}) != kind
    assert step._kind(step._backward, (), {"x": t}) != backward  # autocast is off again
    backward = step._kind(step._backward, (), {"x": t})
    step.max_norm = 2.0
    step._inspect()
    assert step._kind(step._backward, (), {"x": t}) == backward


def test_a_parameter_without_a_gradient_keeps_its_value(device):
    """AdamW skips it in a loop, also after micro-batches: a gradient of zeros would decay it."""
    model = Mean(device)
    step = GraphedStep(model, torch.optim.AdamW(model.parameters(), weight_decay=0.5, capturable=device == "cuda"))
    for _ in range(ROUNDS):
        step.accumulate(torch.randn(3, 4, device=device))
        step(torch.randn(2, 4, device=device))
    assert model.unused.eq(1).all()
    assert model.unused not in step.optimizer.state


class Chosen(nn.Module):
    """A model whose batch chooses the layer that it runs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))

    def forward(self, x, chosen):
        return self.layers[int(chosen)](x).square().mean()


def test_weights_that_only_some_micro_batches_use():
    """AdamW skips a layer that no micro-batch of this update has chosen, though earlier ones of the kind had."""
    model = Chosen()
    twin = copy.deepcopy(model)
    one, optimizer = (torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.5) for each in (model, twin))
    step = GraphedStep(model, one)
    for first, second in ((0, 1), (1, 2), (1, 1), (2, 0)):
        x = torch.randn(2, 4)
        step.accumulate(x, torch.tensor(first))
        step(x, torch.tensor(second))
        for chosen in (first, second):
            twin(x, chosen).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, twin)


def test_micro_batches_in_another_dtype(device):
    model = Mean(device)
    step = GraphedStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        x = torch.randn(3, 4, device=device, dtype=dtype)
        step.accumulate(x)
        assert step._grads[model.first.weight].dtype == dtype
        step(x)


def test_autocast_ends_before_the_backward(device):
    model, seen = Mean(device), []
    model.first.weight.register_hook(lambda grad: seen.append(torch.is_autocast_enabled(device)))
    step = GraphedStep(model, torch.optim.AdamW(model.parameters(), capturable=device == "cuda"))
    with torch.autocast(device, torch.bfloat16):
        step(torch.randn(3, 4, device=device))
        assert torch.is_autocast_enabled(device)
    assert seen == [False]


def test_gradients_may_be_dropped_before_the_update(device):
    model = Mean(device)
    twin = copy.deepcopy(model)
    x = torch.randn(3, 4, device=device)
    for this, discards in ((model, True), (twin, False)):
        step = GraphedStep(this, torch.optim.AdamW(this.parameters(), capturable=device == "cuda"))
        for _ in range(ROUNDS):
            if discards:
                step.accumulate(x)
                this.zero_grad()
            step.accumulate(x)
            step(x)
    assert_same(model, twin)


@pytest.mark.gpu
def test_ignored_labels_of_several_chunks_and_padding(poisoned):
    """The ordinary steps run the kernels of the graph: nothing is compiled in the capture, and no bit differs."""
    model, twin = llama("cuda", vocab_size=40000)
    steps = GraphedStep(model, adamw(model, "cuda")), Loop(twin, adamw(twin, "cuda"), autocast=support.as_in_graph)
    for _ in range(ROUNDS):
        tokens = torch.randint(3, 40000, (48, 64), device="cuda")  # 3072, in two chunks; 1024 of them count, in one
        labels = tokens.where(torch.arange(48, device="cuda")[:, None] < 16, -100)
        mask = (torch.arange(64, device="cuda") < torch.randint(9, 65, (48, 1), device="cuda")).long()
        inputs = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        assert torch.equal(*(step(**inputs) for step in steps))
    assert_same(model, twin)
    assert len(steps[0]._captured) == 1


@pytest.mark.gpu
def test_close_to_a_loop_that_reads_the_host():
    """Padding and ignored labels: a loop leaves them out, a graph computes them."""
    model, twin = llama("cuda", vocab_size=40000)
    steps = GraphedStep(model, adamw(model, "cuda", 1e-3)), Loop(twin, adamw(twin, "cuda", 1e-3))
    for i in range(ROUNDS):
        tokens = torch.randint(3, 40000, (48, 64), device="cuda")
        mask = torch.ones_like(tokens)
        mask[:, 40:] = i % 2
        labels = tokens.where((mask == 1) & (torch.rand(tokens.shape, device="cuda") < 0.5), -100)
        inputs = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        got, expected = (step(**inputs) for step in steps)
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=0)
    assert len(steps[0]._captured) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_learning_rate_may_change(kind):
    model = Mean("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=kind(0.0), capturable=True)
    step = GraphedStep(model, optimizer)
    before = copy.deepcopy(model)
    for _ in range(ROUNDS):
        step(torch.randn(3, 4, device="cuda"))
    assert_same(model, before)
    optimizer.param_groups[0]["lr"] = kind(1e-2)
    step(torch.randn(3, 4, device="cuda"))
    assert not torch.equal(model.first.weight, before.first.weight)
    assert len(step._captured) == 1


@pytest.mark.gpu
def test_a_graph_that_makes_the_state_of_the_optimizer_does_not_run_again():
    model, twin = llama("cuda", attn_implementation="sdpa")
    steps = GraphedStep(model, adamw(model, "cuda", fused=True)), Loop(twin, adamw(twin, "cuda", fused=True))
    for i in range(10):
        inputs = batch("cuda")
        for step in steps:
            if i % 2 == 0:
                step.optimizer.state.clear()
            with sdpa_kernel(SDPBackend.MATH):
                step(**inputs)
    assert_same(model, twin)


@pytest.mark.gpu
def test_dropout_draws_new_numbers():
    model = Mean("cuda", dropout=0.5)
    step = GraphedStep(model, torch.optim.AdamW(model.parameters(), lr=0.0, capturable=True))
    x = torch.randn(64, 4, device="cuda")
    for _ in range(ROUNDS):
        step(x)
    assert step._captured
    losses = []
    for _ in range(2):
        torch.manual_seed(1)
        losses.append(torch.stack([step(x) for _ in range(5)]))
    assert losses[0].unique().numel() == 5
    assert torch.equal(*losses)


@pytest.mark.gpu
@pytest.mark.parametrize("preserve", [True, False])
def test_checkpointed(preserve):
    model, twin = llama("cuda")
    step, loop = GraphedStep(model, adamw(model, "cuda")), Loop(twin, adamw(twin, "cuda"))
    for this in (model, twin):
        this.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": preserve})
    for _ in range(ROUNDS):
        inputs = batch("cuda")
        step(**inputs)
        loop(**inputs)
    assert_same(model, twin)
    assert step._captured


class CheckpointedDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4096, device="cuda"))

    def forward(self):
        return checkpoint(nn.functional.dropout, self.weight, use_reentrant=False).sum()


@pytest.mark.gpu
def test_a_checkpoint_with_dropout():
    """A checkpoint draws the numbers of the forward again in the backward: each gradient is that of the loss."""
    model = CheckpointedDropout()
    step = GraphedStep(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=True))
    for _ in range(ROUNDS):
        with torch.no_grad():
            model.weight.fill_(1)
        loss = step()
        torch.testing.assert_close((1 - model.weight).sum(), loss)
    assert step._captured


@pytest.mark.gpu
def test_a_compiled_model():
    model, twin = llama("cuda")
    model.compile(dynamic=False)
    steps = GraphedStep(model, adamw(model, "cuda", 1e-3)), Loop(twin, adamw(twin, "cuda", 1e-3))
    for _ in range(ROUNDS):
        inputs = {**batch("cuda"), "use_cache": False}
        got, expected = (step(**inputs) for step in steps)
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=0)
    assert steps[0]._captured
