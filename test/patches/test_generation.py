"""Generation by patched models: continuous batching reads and writes transformers' paged cache by our ops."""

import copy
import gc
import io
from collections import Counter

import peft
import pytest
import torch
from conftest import DEVICE
from tiny_models import batch, results, rows, tiny
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.configuration_utils import CompileConfig
from trl_trainers import make

from liger_like.patches import generation, paged
from liger_like.patching import patch, unpatch

pytestmark = pytest.mark.filterwarnings("error:liger_like")
PAGE = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
SETTINGS = {"num_blocks": 48, "max_batch_tokens": 32, PAGE: 16}
WINDOW = {"sliding_window": 12}
FAMILIES = {
    "Llama": {},
    "Qwen3": {},
    "Gemma2": {**WINDOW, "attn_logit_softcapping": 2.0},
    "Gemma3": {**WINDOW, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "GptOss": {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Mistral": WINDOW,
    "Phi": {},
    "Afmoe": {**WINDOW, "num_dense_layers": 2},  # calls view on the output of attention
    "Mixtral": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "experts_implementation": "eager",
    },
}
LENGTHS = 3, 41, 17  # a prompt comes in chunks


@pytest.fixture(autouse=True, scope="module")
def _little_garbage():
    """Let transformers collect young objects alone, twice for each manager: there are millions of older ones."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def model_of(family, **more):
    """Return a model in fp32 whose sequences never end by themselves."""
    ends = {"eos_token_id": None, "max_position_embeddings": 128, "attn_implementation": "eager"}
    return tiny(family, DEVICE, **FAMILIES[family] | ends | more).eval()


def prompts(*lengths):
    return [torch.randint(3, 101, (length,)).tolist() for length in lengths]


def options(**more):
    """Return greedy options; on a GPU transformers would compile the steps with a static cache."""
    more = {"max_new_tokens": 8, "disable_compile": True, **more}
    return GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, **more)


def eager(model, ids, **more):
    """Return the new tokens of each prompt by itself, none of which rounding could exchange for another."""
    config, tokens = options(output_logits=True, return_dict_in_generate=True, **more), []
    for prompt in ids:
        row = torch.tensor([prompt], device=DEVICE)
        made = model.generate(row, attention_mask=torch.ones_like(row), generation_config=config)
        first, second = torch.cat(made.logits).topk(2).values.T
        assert (first - second).min() > 1e-4
        tokens.append(made.sequences[0, len(prompt) :].tolist())
    return tokens


def outputs(model, ids, settings=(), generation_config=None, **how):
    """Return what continuous batching makes of all prompts."""
    config = ContinuousBatchingConfig(**SETTINGS | dict(settings))
    how = {"continuous_batching_config": config, "warmup": False, **how}
    made = [*model.generate_batch(ids, generation_config=generation_config or options(), **how).values()]
    assert [output.error for output in made] == [None] * len(made)
    return made


def batched(*args, **how):
    """Return the new tokens of all prompts by continuous batching."""
    return [output.generated_tokens for output in outputs(*args, **how)]


def assert_exact(model, ids, made):
    """Apply the comparison rule to the log-probabilities of generated tokens, against forwards of ``model``."""

    def forwards(model):
        for prompt, output in zip(ids, made, strict=True):
            tokens = torch.tensor([prompt + output.generated_tokens], device=DEVICE)
            with torch.no_grad():
                scores = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            yield scores.gather(-1, tokens[0, len(prompt) :, None]).flatten()

    got = torch.tensor([number for output in made for number in output.logprobs], device=DEVICE)
    same, exact = torch.cat([*forwards(model)]), torch.cat([*forwards(copy.deepcopy(model).double())])
    assert (got - exact).norm() <= 2 * (same - exact).norm() + 1e-6 * exact.norm()


@pytest.fixture
def ops(monkeypatch):
    """Return how often each op was called by the attention of continuous batching."""
    calls = Counter()

    def noted(function):
        def call(*args, **kwargs):
            calls[function.__name__, "tables" if args[3:4] and args[3].dim() == 2 else ""] += 1
            return function(*args, **kwargs)

        return call

    for name in ("flash_attention_paged", "flash_attention_varlen"):
        monkeypatch.setattr(paged, name, noted(getattr(paged, name)))
    return calls


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_eager_generate(family, references, ops):
    model, ids = model_of(family), prompts(*LENGTHS)
    expected, original = eager(model, ids), copy.deepcopy(model)
    report = patch(model)
    assert [row.status for row in rows(report, "generation")] == ["patched"]
    made = outputs(model, ids, {"return_logprobs": True})
    assert [output.generated_tokens for output in made] == expected
    assert_exact(original, ids, made)
    windows = "sliding_window" in FAMILIES[family] and FAMILIES[family]["sliding_window"]
    assert bool(ops["flash_attention_paged", "tables"]) != bool(windows)
    assert ops["flash_attention_paged", ""]
    padded = DEVICE == "cuda"  # as for CUDA graphs, where even new prompts have keys to read
    assert bool(ops["flash_attention_varlen", ""]) != padded


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_the_kernels_give_the_same_numbers(family):
    model, ids = model_of(family), prompts(20, 3)
    original = copy.deepcopy(model)
    patch(model, norm=False, rope=False, mlp=False, loss=False)
    settings = {"max_batch_tokens": 14, "return_logprobs": True}
    assert_exact(original, ids, outputs(model, ids, settings, options(max_new_tokens=4)))


def filled(caches):
    """Return the addresses of the slots in ``caches`` [N, P, Hk, D] that hold numbers; views may share some."""
    slots = set()
    for t in caches:
        places = (~t[..., 0, 0].isnan()).nonzero().tolist()
        slots |= {t.data_ptr() + t.element_size() * (i * t.stride(0) + j * t.stride(1)) for i, j in places}
    return slots


@pytest.mark.parametrize(("family", "requests"), [("Llama", 4), ("Gemma2", 3)])
def test_padded_batches(family, requests, monkeypatch):
    """Batches have the shapes of CUDA graphs: rows behind the last sequence, and sequences without rows up to the
    number of ``requests``. They write to one slot of a tensor at most, which nobody reads, as nobody reads NaN.
    """
    model, ids, caches, shapes = model_of(family), prompts(37, 3, 5), [], set()
    original = copy.deepcopy(model)
    patch(model, norm=False, rope=False, mlp=False, loss=False)
    make, attend = generation._with_our_cache, paged.flash_attention_paged

    def poisoned(*args):
        processor = make(*args)
        for layer in range(2):
            caches.extend(t.fill_(torch.nan) for t in paged._layer_of(processor.cache, layer).caches)
        return processor

    def noted(q, k_cache, v_cache, pages, lengths, **more):
        shapes.add((len(q), len(lengths) - 1))
        return attend(q, k_cache, v_cache, pages, lengths, **more)

    monkeypatch.setattr(generation, "_with_our_cache", poisoned)
    monkeypatch.setattr(paged, "flash_attention_paged", noted)
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)  # without a GPU compiled steps are padded
    settings = {"q_padding_interval_size": 16, "kv_padding_interval_size": 32, "max_requests_per_batch": requests}
    settings |= {"varlen_compile_config": CompileConfig(), "return_logprobs": True}
    settings |= {"use_async_batching": False}  # else, on a GPU, a step is queued before the last one's end is seen
    assert_exact(original, ids, outputs(model, ids, settings, options(max_new_tokens=4)))
    tables = {(4, 4)} if family == "Llama" else set()
    assert shapes >= {(32, requests), (16, requests)} | tables
    lengths = [len(prompt) + 4 - 1 for prompt in ids]
    tokens = sum(lengths) + sum(lengths if family == "Llama" else (min(12, length) for length in lengths))
    assert 0 <= len(filled(caches)) - 2 * tokens <= 4


def test_a_warm_up_samples_from_finite_scores(references, monkeypatch):
    """It reads keys that were never written, and 5.17 of transformers gives them memory that may hold NaN."""
    model, empty, multinomial, seen = model_of("Llama"), torch.empty, torch.multinomial, []
    patch(model)

    def poisoned(*shape, **options):
        made = empty(*shape, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    def noted(scores, **options):
        seen.append(scores.isfinite().all().item())
        return multinomial(scores.nan_to_num(1), **options)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "multinomial", noted)
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)  # without a GPU no graph warms up
    sampled = GenerationConfig(do_sample=True, eos_token_id=-1, pad_token_id=0, max_new_tokens=2)
    eager_steps = {"varlen_compile_config": CompileConfig(), "use_cuda_graph": False}  # a capture reads no number
    outputs(model, prompts(3), eager_steps, sampled, warmup=True)
    assert len(seen) > 2
    assert all(seen)


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_steps_are_compiled_as_asked(family, references, monkeypatch, caplog):
    """Decode steps are compiled where they have tables; else transformers says that it ignores the setting."""
    model, ids, compiled, compile_ = model_of(family), prompts(3, 41), [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **how: compiled.append(how) or compile_(*args, **how))
    expected = eager(model, ids)
    patch(model)
    torch.compiler.reset()
    asked = CompileConfig(backend="eager", mode="default", fullgraph=True)
    assert batched(model, ids, {"decode_compile_config": asked}) == expected
    tables = family == "Llama"
    assert [how["fullgraph"] for how in compiled] == [True] * tables
    assert ("Ignoring it" in caplog.text) != tables


def test_prefixes_forks_and_kept_managers(references, monkeypatch):
    """Prompts share pages; the sequences of one prompt share its pages; a manager is used again, then a new one."""
    model, clear, cleared = model_of("Llama"), paged.clear, []
    monkeypatch.setattr(paged, "clear", lambda cache: cleared.append(clear(cache)))
    (start,) = prompts(33)
    ids = [start + more for more in prompts(3, 9)]
    expected = eager(model, ids)
    patch(model)
    for _ in range(2):
        assert batched(model, ids, persistent_manager=True) == expected
        assert model.config._attn_implementation == "liger_like"
    assert len(cleared) == 1  # the kept cache has the keys of the prompts
    model.destroy_cached_continuous_batching_manager()
    assert batched(model, ids, {"max_blocks_per_request": 0}) == expected
    twice, made = options(), []
    twice.num_return_sequences = 2  # transformers refuses it for greedy decoding, in the constructor alone
    start = {"generation_config": twice, "continuous_batching_config": ContinuousBatchingConfig(**SETTINGS)}
    with model.continuous_batching_context_manager(**start, warmup=False) as manager:
        manager.add_requests(ids, max_new_tokens=8)
        while len(made) < 2 * len(ids):  # older versions of generate_batch leave the second sequences out
            made.append(manager.get_result(timeout=60).generated_tokens)
    assert sorted(made) == sorted(expected * 2)


def test_training_goes_on_between_rollouts(references):
    """The gradients after a rollout are those of a model that has not generated, and so are the tokens after a step."""
    model, ids, inputs = model_of("Gemma2"), prompts(*LENGTHS), batch(DEVICE, length=20)
    other = copy.deepcopy(model)
    for each in (model, other):
        patch(each)
    batched(model, ids)
    for each in (model, other):
        each.train()
        results(each, inputs)
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.sub_(parameter.grad)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    unpatch(other)
    assert batched(model, ids) == eager(other.eval(), ids)


class StepError(Exception):
    pass


def fail(*args, **kwargs):
    raise StepError("on purpose")


@pytest.mark.parametrize("place", ["step", "cache", "start"])
def test_an_exception_restores_the_name(place, references, monkeypatch):
    model, ids = model_of("Llama"), prompts(5)
    patch(model)
    if place == "step":
        monkeypatch.setattr(paged, "paged_write", fail)
    elif place == "cache":
        monkeypatch.setattr(generation, "_with_our_cache", fail)
    else:
        monkeypatch.setattr(generation, "_has_windows", fail)
    settings = {"generation_config": options(), "continuous_batching_config": ContinuousBatchingConfig(**SETTINGS)}
    if place == "step":
        (output,) = model.generate_batch(ids, **settings, warmup=False).values()
        assert output.error == "on purpose"
    else:
        with pytest.raises(StepError):
            model.generate_batch(ids, **settings, warmup=True)
    assert model.config._attn_implementation == "liger_like"
    assert results(model.train(), batch(DEVICE))


def test_a_manager_that_does_not_start_restores_the_name(references, monkeypatch):
    model = model_of("Llama")
    monkeypatch.setattr(type(model), "init_continuous_batching", fail)
    patch(model)
    with pytest.raises(StepError):
        model.init_continuous_batching(generation_config=options())
    assert model.config._attn_implementation == "liger_like"


def test_stop_and_unpatch_restore_the_name(references):
    model = model_of("Llama")
    original, cls, config = model.config, type(model), ContinuousBatchingConfig(**SETTINGS)
    start = {"generation_config": options(), "continuous_batching_config": config}
    for ends in ("stop", "unpatch"):
        patch(model)
        manager = model.init_continuous_batching(**start)
        assert model.config._attn_implementation == "liger_like"
        manager.start()
        manager.add_request([3, 4, 5])
        assert manager.get_result(timeout=60).error is None
        assert model.config._attn_implementation == paged.name()
        with pytest.raises(RuntimeError, match="in continuous batching: call stop"):
            model(torch.tensor([[3, 4]], device=DEVICE))
        if ends == "stop":
            manager.stop()
            assert model.config._attn_implementation == "liger_like"
            assert model.config._experts_implementation == original._experts_implementation
        unpatch(model)
        manager.stop()
        manager.destroy()
        assert model.config is original
        assert type(model) is cls
        assert original._attn_implementation == "eager"
        assert vars(model).keys() == vars(model_of("Llama")).keys()


def test_only_models_whose_attention_runs_kernels(references):
    model = model_of("Llama")
    assert not rows(patch(model, attention=False), "generation")
    assert type(model).init_continuous_batching is type(model_of("Llama")).init_continuous_batching
    assert [row.status for row in rows(patch(model), "generation")] == ["patched"]
    assert [row.status for row in rows(patch(model), "generation")] == ["already patched"]
    unpatch(model)
    model.model.layers[0].self_attn.attention_dropout = 0.5
    with pytest.warns(UserWarning, match="dropout"):
        (row,) = rows(patch(model), "generation")
    assert (row.status, row.reason) == ("skipped", "its attention runs no kernel")


@pytest.mark.parametrize("loss", [True, False])
def test_copies_and_pickles_generate(loss, references, ops):
    model, ids = model_of("Llama"), prompts(5)
    patch(model, loss=loss)
    expected = batched(model, ids)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        ops.clear()
        assert batched(other, ids) == expected
        assert ops["flash_attention_paged", "tables"]
        unpatch(other)
        assert type(other) is type(model_of("Llama"))


def test_a_later_patch_of_the_loss_keeps_generation(references):
    model = model_of("Llama")
    cls = type(model)
    patch(model, loss=False)
    patch(model)
    assert generation.is_hooked(type(model))
    assert hasattr(type(model), "_liger_like")
    unpatch(model)
    assert type(model) is cls


def test_adapters(references, ops):
    model, ids = model_of("Llama"), prompts(5, 20)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    expected = eager(adapted, ids)
    patch(adapted)
    assert batched(adapted, ids) == expected
    assert ops["flash_attention_paged", "tables"]


def test_trl_samples_by_it(references, ops, tmp_path):
    """GRPO takes two steps whose completions come from continuous batching, and trains the same object."""
    model = model_of("Llama")
    patch(model)
    before = copy.deepcopy(model.state_dict())
    arguments = {"transformers_continuous_batching_config": SETTINGS, "use_transformers_continuous_batching": True}
    arguments |= {"use_cpu": DEVICE == "cpu", "num_iterations": 1, "max_steps": 2}
    trainer = make("GRPO", model, tmp_path, **arguments)
    trainer.train()
    assert ops["flash_attention_paged", "tables"]
    assert model.config._attn_implementation == "liger_like"
    assert any(not torch.equal(before[name], t) for name, t in model.state_dict().items())
