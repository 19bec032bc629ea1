"""Log-probabilities of tokens from a patched model, without its logits."""

from typing import Any

from torch import Tensor, nn

from liger_like.ops.losses.linear_logprobs import TokenOutputs
from liger_like.patches.lm_head import TOKENS, fuses_loss


def token_logprobs(
    model: nn.Module,
    *args: Any,
    labels: Tensor,
    outputs: tuple[str, ...] = ("logprob",),
    temperature: float = 1.0,
    **kwargs: Any,
) -> TokenOutputs:
    """Return log-probabilities of ``labels`` [B, S] under a patched ``model``, and other numbers of each token.

    ``args`` and ``kwargs`` are those of the model, such as ``input_ids`` [B, S] and ``attention_mask``. The results are
    [B, S - 1]: number t belongs to label t + 1, which the model predicts from the tokens up to t. Labels of -100 do not
    count. ``outputs`` and ``temperature`` are as in ``fused_linear_logprobs``. It runs in the forward of the model:
    wrappers (DDP, PEFT) and hooks that gather or move weights run as usual. ``model.training`` does not matter.

    Raises TypeError or ValueError for invalid arguments or if the loss of ``model`` is not patched, RuntimeError if its
    head has a hook, changed after patching, or makes logits of another form than a scale and a softcap.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(labels, Tensor) or labels.dim() != 2:
        raise TypeError(f"labels must be a tensor [B, S], got {getattr(labels, 'shape', type(labels).__name__)}")
    if not fuses_loss(model):
        raise ValueError("model must be patched, with its loss: call liger_like.patch(model) first")
    asked = {"outputs": outputs, "temperature": temperature}
    numbers: TokenOutputs = model(*args, labels=labels, **kwargs, **{TOKENS: asked})
    return numbers
