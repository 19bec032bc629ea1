"""The kernels under torch.distributed: models and tensors that are sharded over processes."""

from liger_like.parallel.checkpoint import checkpoint_policy
from liger_like.parallel.context_parallel import context_parallel
from liger_like.parallel.expert_parallel import expert_parallel
from liger_like.parallel.gradients import finalize_partial_grads
from liger_like.parallel.groups import group_checkpoints
from liger_like.parallel.offload import offload_checkpoints
from liger_like.parallel.pipeline import pipeline_loss
from liger_like.parallel.stepping import step_in_backward
from liger_like.parallel.vocab_divergence import vocab_parallel_divergence
from liger_like.parallel.vocab_parallel import (
    VocabParallelHead,
    vocab_parallel_cross_entropy,
    vocab_parallel_logprobs,
    vocab_parallel_token_loss,
)

__all__ = [
    "VocabParallelHead",
    "checkpoint_policy",
    "context_parallel",
    "expert_parallel",
    "finalize_partial_grads",
    "group_checkpoints",
    "offload_checkpoints",
    "pipeline_loss",
    "step_in_backward",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_divergence",
    "vocab_parallel_logprobs",
    "vocab_parallel_token_loss",
]
