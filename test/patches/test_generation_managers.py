"""Managers of continuous batching that outlive a batch, each other or the patch."""

import pytest
from conftest import DEVICE
from test_generation import SETTINGS, batched, eager, model_of, options, prompts
from tiny_models import batch, results
from transformers.generation import ContinuousBatchingConfig

from liger_like.patches import generation, paged
from liger_like.patching import patch, unpatch

pytestmark = [pytest.mark.filterwarnings("error:liger_like"), pytest.mark.usefixtures("references")]
LENGTHS = 5, 21, 9


@pytest.fixture(autouse=True)
def _stopped():
    """Stop the managers that a failed test leaves running: their threads would keep the process alive."""
    yield
    for manager in [*generation._managers]:
        if manager.is_running():
            manager.stop(hard_stop=True)


def manager_of(model):
    return model.init_continuous_batching(
        generation_config=options(), continuous_batching_config=ContinuousBatchingConfig(**SETTINGS)
    )


def ask(manager, ids):
    """Return the new tokens of each prompt."""
    asked = [manager.add_request(prompt, max_new_tokens=8) for prompt in ids]
    return delivered(manager, asked)


def delivered(manager, asked):
    made = {}
    while len(made) < len(asked):
        output = manager.get_result(timeout=60)
        assert output.error is None
        made[output.request_id] = output.generated_tokens
    return [made[name] for name in asked]


@pytest.fixture
def rollout():
    """Return a model, prompts and the tokens that it generates."""
    model, ids = model_of("Llama"), prompts(*LENGTHS)
    return model, ids, eager(model, ids)


def test_a_manager_starts_again(rollout):
    model, ids, expected = rollout
    patch(model)
    manager = manager_of(model)
    for _ in range(2):
        manager.start()
        assert ask(manager, ids) == expected
        manager.stop()
        assert model.config._attn_implementation == "liger_like"


def test_requests_that_wait_when_it_stops(rollout):
    """The config has its name back once the last of them has its tokens."""
    model, ids, expected = rollout
    patch(model)
    manager = manager_of(model)
    manager.start()
    asked = manager.add_requests(ids, max_new_tokens=8)
    thread = manager._generation_thread
    manager.stop(block=False)
    assert delivered(manager, asked) == expected
    thread.join(60)
    assert model.config._attn_implementation == "liger_like"


def test_two_managers_at_a_time(rollout):
    model, ids, expected = rollout
    patch(model)
    first, second = manager_of(model), manager_of(model)
    first.start()
    assert ask(first, ids[:1]) == expected[:1]
    second.start()
    assert ask(second, ids[1:2]) == expected[1:2]
    first.stop()
    assert model.config._attn_implementation == paged.name()
    assert ask(second, ids[2:]) == expected[2:]
    second.stop()
    assert model.config._attn_implementation == "liger_like"


@pytest.mark.parametrize("warm", [False, True])
def test_a_manager_that_nobody_starts(rollout, warm):
    model, ids, expected = rollout
    patch(model)
    manager = manager_of(model)
    if warm:
        manager.warmup()
    assert eager(model, ids) == expected
    manager.stop()
    assert results(model.train(), batch(DEVICE))


@pytest.mark.parametrize("change", ["patch", "unpatch", "attention=False", "sdpa"])
def test_a_kept_manager_of_another_attention(rollout, change):
    """Its cache has other keys, or says in another way which of them a query sees."""
    model, ids, expected = rollout
    model.set_attn_implementation("sdpa")
    if change != "patch":
        patch(model)
    assert batched(model, ids, persistent_manager=True) == expected
    kept = vars(model)[generation.KEPT]
    if change in ("unpatch", "attention=False"):
        unpatch(model)
        assert generation.KEPT not in vars(model)
    if change == "sdpa":
        model.set_attn_implementation("sdpa")
    elif change != "unpatch":
        patch(model, attention=change == "patch")
    assert batched(model, ids, persistent_manager=True) == expected
    assert vars(model)[generation.KEPT] is not kept
    model.destroy_cached_continuous_batching_manager()


@pytest.mark.parametrize("change", [unpatch, lambda model: model.set_attn_implementation("sdpa")])
def test_attention_that_changes_while_it_runs(rollout, change):
    model, ids, expected = rollout
    patch(model)
    manager = manager_of(model)
    manager.start()
    assert ask(manager, ids[:1]) == expected[:1]
    change(model)
    manager.add_request(ids[1])
    assert "attention of the model has changed" in manager.get_result(timeout=60).error
    manager.stop()
    unpatch(model)
    assert eager(model, ids) == expected
