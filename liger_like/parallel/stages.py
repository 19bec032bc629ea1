"""Stages of a Llama under FSDP2, tensor, sequence and pipeline parallelism: what examples/parallel.py trains."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from liger_like.parallel.tensor_parallel import parallelize_layer, unknown_parts
from liger_like.parallel.vocab_parallel import VocabParallelHead
from liger_like.patches import NAME

LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
SCALES = "embedding_multiplier", "logits_scaling"  # of Granite, whose layers are a Llama's
PROJECTIONS = {
    "self_attn": {f"{name}_proj" for name in "qkvo"},
    "mlp": {f"{name}_proj" for name in ("gate", "up", "down")},
}


class _Embeddings(VocabParallelHead):
    """Plan of the embeddings: shards their words, and returns this process's part of the sequence."""

    @staticmethod
    def _returned(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.redistribute(placements=[Shard(1)]).to_local()


class Stage(nn.Module):
    """Pipeline stage with a part of a model's layers, which keep their numbers.

    The first stage has the embeddings, the last stage the norm, and the head for the loss. Stages exchange plain
    tensors: with sequence parallelism, the process's own part of the residual stream.
    """

    def __init__(self, model: Any, tp: int, index: int, stages: int) -> None:
        super().__init__()
        layers, last = model.model.layers, index == stages - 1
        cuts = [len(layers) * i // stages for i in (index, index + 1)]
        self.tp = tp
        self.embed_tokens = model.model.embed_tokens if index == 0 else None
        self.layers = nn.ModuleDict({str(i): layers[i] for i in range(*cuts)})
        self.norm: Any
        self.lm_head: Any
        self.norm, self.lm_head = (model.model.norm, model.lm_head) if last else (None, None)
        self.rotary_emb = model.model.rotary_emb

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """Return the hidden states after this stage, from token ids or from the previous stage's hidden states."""
        if position_ids.shape[1] % self.tp:
            raise ValueError(f"tp must divide the tokens of a sequence, {position_ids.shape[1]}, got {self.tp}")
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        embeddings = self.rotary_emb(x, position_ids=position_ids)
        for layer in self.layers.values():
            x = layer(x, position_embeddings=embeddings, attention_mask=None, position_ids=position_ids)
        return x if self.norm is None else self.norm(x)


def spread(model: Any, mesh: DeviceMesh, **options: Any) -> Stage:
    """Return this process's stage of ``model``, with its parameters sharded over the mesh by FSDP2 with ``options``.

    ``mesh`` has the dimensions "pp", "fsdp", "cp" and "tp". The model is patched, has the layers and the names of a
    Llama, and a head that is not tied to its embeddings. Raises ValueError for another model, and for a mesh that its
    sizes do not allow; the stage raises it for sequences whose tokens "tp" does not divide.
    """
    tp = mesh["tp"]
    if told := _refusal(model, tp.size(), mesh["pp"].size()):
        raise ValueError(told)
    stage = Stage(model, tp.size(), mesh["pp"].get_local_rank(), mesh["pp"].size())
    if tp.size() > 1:
        plan = {"embed_tokens": _Embeddings(), "norm": SequenceParallel(), "lm_head": VocabParallelHead()}
        parallelize_module(stage, tp, {name: style for name, style in plan.items() if getattr(stage, name) is not None})
        for layer in stage.layers.values():
            parallelize_layer(layer, tp)
    # processes with other tokens, from other rows or from the same rows, contribute to the same gradients
    options["mesh"] = mesh["fsdp", "cp"]._flatten("tokens")
    for layer in stage.layers.values():
        fully_shard(layer, **options)
    if stage.lm_head is not None:
        fully_shard([stage.norm, stage.lm_head], **options)
    fully_shard(stage, **options)
    return stage


def _children(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}


def _is_llamas(layer: nn.Module) -> bool:
    """Return True if ``layer`` has the modules of a Llama's layer, in attention perhaps more."""
    return _children(layer) == LAYER and all(own <= _children(getattr(layer, p)) for p, own in PROJECTIONS.items())


def _refusal(model: Any, tp: int, pp: int) -> str:
    """Return why ``model`` cannot be spread over ``tp`` x ``pp`` processes, or ""."""
    name, config = type(model).__name__, model.config
    layers = [*model.model.layers] if hasattr(getattr(model, "model", None), "layers") else []
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * (not getattr(config, "sliding_window", None))
    if not layers or not all(map(_is_llamas, layers)):
        return f"model must have the layers of a Llama to be spread, got {name}"
    if scaled := [field for field in SCALES if getattr(config, field, 1) != 1]:
        return f"model must not scale embeddings or logits to be spread, got {name} with {scaled[0]}"
    if {*kinds} != {"full_attention"}:
        return f"model must have full attention in each layer to be spread, got windows or other kinds in {name}"
    if tp > 1 and (unknown := set().union(*map(unknown_parts, layers))):
        return f"tp must be 1 for {name}, got {tp}: its {min(unknown)} would see some of the heads or features"
    if config._attn_implementation != NAME:
        return f"model must have patched attention to be spread, got {config._attn_implementation!r} in {name}"
    if config.tie_word_embeddings:
        return f"model must have a head of its own to be spread, got {name} with tie_word_embeddings"
    for field in ("num_key_value_heads", "vocab_size", "intermediate_size"):
        if getattr(config, field) % tp:
            return f"tp must divide {field}, {getattr(config, field)}, got {tp}"
    if pp > config.num_hidden_layers:
        return f"pp must be at most the model's {config.num_hidden_layers} layers, got {pp}"
    return ""
