"""TRL's trainers on tiny models, with a tokenizer and data made here."""

import functools
import types

import datasets
import trl
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

from liger_like.patches import trl_code
from liger_like.patches import trl_trainers as plans

PAIRS = [
    {"prompt": "w3 w4", "chosen": " w5 w6 w7", "rejected": " w8"},
    {"prompt": "w9", "chosen": " w10", "rejected": " w11 w12"},
]
LABELLED = [
    {"prompt": "w3 w4", "completion": " w5 w6 w7", "label": True},
    {"prompt": "w9", "completion": " w10 w11", "label": False},
]
PROMPTS = [{"prompt": "w3 w4"}, {"prompt": "w5 w6 w7"}]
TEXTS = [{"text": "w3 w4 w5 w6 w7"}, {"text": "w8 w9"}]
CHATS = [{"messages": [{"role": "user", "content": "w3 w4"}, {"role": "assistant", "content": "w5 w6"}]}] * 2
TRIPLES = [{**pair, "reference": " w13 w14"} for pair in PAIRS]
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


def tokenizer():
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(101)}, unk_token="w1"))
    words.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w1", eos_token="w2")
    made.chat_template = TEMPLATE
    return made


def reward(completions, **kwargs):
    """Reward that differs between the completions of a prompt."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def experimental(name):
    """Return the trainer and its arguments from ``trl.experimental``."""
    from importlib import import_module

    folder = import_module(f"trl.experimental.{name.lower()}")
    return getattr(folder, f"{name}Trainer"), getattr(folder, f"{name}Config")


SAMPLED = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 5}
# data, arguments of the config, and whether the trainer takes reward functions, a reference or a teacher
KINDS = {
    "SFT": (TEXTS, {}, ()),
    "SFT dft": (TEXTS, {"loss_type": "dft"}, ()),
    "DPO": (PAIRS, {"use_weighting": True}, ("ref_model",)),
    "KTO": (LABELLED, {}, ("ref_model",)),
    "GRPO": (PROMPTS, {**SAMPLED, "temperature": 0.8, "num_iterations": 2}, ("reward_funcs",)),
    "RLOO": (PROMPTS, {**SAMPLED, "beta": 0.0}, ("reward_funcs",)),
    "GMPO": (PROMPTS, SAMPLED, ("reward_funcs",)),
    "Distillation": (PROMPTS, {"max_completion_length": 5, "beta": 0.5}, ("teacher_model",)),
    "ORPO": (PAIRS, {"max_length": 32}, ()),
    "CPO": (PAIRS, {"max_length": 32, "loss_type": "simpo", "cpo_alpha": 0.5}, ()),
    "GKD": (CHATS, {"lmbda": 0.0, "max_new_tokens": 4}, ("teacher_model",)),
    "TPO": (TRIPLES, {}, ()),
}


def make(kind, model, folder, other=None, callbacks=(), adapters=None, **arguments):
    """Return a trainer of three steps; ``other`` is the reference or the teacher; adapters need no reference."""
    data, settings, takes = KINDS[kind]
    name = kind.split()[0]
    if hasattr(trl, f"{name}Trainer"):
        cls, config = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    else:
        cls, config = experimental(name)
    common = {"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1}
    common |= {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 0}
    common |= {"gradient_checkpointing": False, **settings, **arguments}
    given = {"reward_funcs": reward, "ref_model": None if adapters else other, "teacher_model": other}
    given["peft_config"] = adapters
    return cls(
        model=model,
        args=config(str(folder), **common),
        train_dataset=datasets.Dataset.from_list(data * 6),
        processing_class=tokenizer(),
        callbacks=[*callbacks],
        **{name: given[name] for name in (*takes, *["peft_config"] * bool(adapters))},
    )


def spy(monkeypatch):
    """Return counts of the calls on models made here: ours with their options, and TRL's."""
    counts = types.SimpleNamespace(ours=[], theirs=0)

    def spy_on(module, name):
        function = getattr(module, name)

        def noted(x, *args, **options):
            if x.shape[-1] == 32:  # not the trial
                counts.ours.append(options)
            return function(x, *args, **options)

        monkeypatch.setattr(module, name, noted)

    def spy_on_theirs(cls):
        forward = cls.forward

        @functools.wraps(forward)
        def noted(ctx, hidden, *args):
            counts.theirs += hidden.shape[-1] == 32
            return forward(ctx, hidden, *args)

        monkeypatch.setattr(cls, "forward", staticmethod(noted))

    spy_on(trl_code, "fused_linear_logprobs")
    spy_on(plans, "fused_linear_divergence")
    spy_on_theirs(ChunkedLogProbFunction)
    spy_on_theirs(ChunkedDivergenceFunction)
    return counts
