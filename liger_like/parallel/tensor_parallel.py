"""Tensor-parallel layers of a Llama: parameters are DTensors, and what is computed with them are local tensors.

The residual stream is sharded along the sequence (Korthikanti et al., arXiv:2205.05198). Attention and MLP get the
tokens of all processes, compute some heads or features of them, and return sums over the processes. An op of DTensors
takes the host several times as long as the op itself, so a layer runs none but for the gradients of parameters: during
its forward, its modules have the local tensors of their parameters.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_module, distribute_tensor

from liger_like.parallel.tokens import gather_parts, sum_parts
from liger_like.patches import glu_mlp, original
from liger_like.patches.forms import match

COLUMNS = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"}
ROWS = {"self_attn.o_proj", "mlp.down_proj"}
LINEAR_END = {"split", "split_silu", "split_float"}  # MLPs that do nothing behind their last projection
NORMS = {"input_layernorm", "post_attention_layernorm"}


class Place(NamedTuple):
    """A parameter of a module, and the placements of its gradient.

    ``counts`` is False where another process adds the parameter to a sum over the processes.
    """

    module: nn.Module
    name: str
    gradient: Any
    counts: bool


def unknown_parts(layer: nn.Module) -> set[str]:
    """Return the names of the modules in ``layer`` whose computation would be wrong on some heads or features."""
    modules = dict(layer.named_modules())
    known = {name for name in COLUMNS | ROWS if isinstance(modules.get(name), nn.Linear)} | NORMS
    inside = {name for name in modules if name.startswith(("self_attn.", "mlp.")) and name != "mlp.act_fn"}
    return (inside | {name.rpartition(".")[0] for name, _ in layer.named_parameters()}) - known


def parallelize_layer(layer: Any, mesh: DeviceMesh) -> None:
    """Shard ``layer`` over ``mesh``: its inputs and outputs [B, S / R, H] are this process's part of the sequence."""
    distribute_module(layer, mesh, _shard)  # parameters that it leaves are replicated
    group, parts = mesh.get_group(), mesh.size()

    def to_attention(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        whole = gather_parts(kwargs["hidden_states"], group).transpose(0, 1).flatten(1, 2)
        return args, {**kwargs, "hidden_states": whole}

    def from_attention(_: nn.Module, args: Any, out: Tensor) -> Any:
        B, S, H = out.shape
        return sum_parts(out.view(B, parts, S // parts, H).transpose(0, 1), group)

    # an MLP does not mind the order of tokens: [R B, S / R, H] needs no copy
    def to_mlp(_: nn.Module, args: tuple[Tensor]) -> Any:
        return gather_parts(args[0], group).flatten(0, 1)

    def from_mlp(_: nn.Module, args: Any, out: Tensor) -> Any:
        return sum_parts(out.view(parts, len(out) // parts, *out.shape[1:]), group)

    layer.self_attn.register_forward_pre_hook(to_attention, with_kwargs=True)
    layer.self_attn.o_proj.register_forward_hook(from_attention)
    layer.mlp.register_forward_pre_hook(to_mlp)
    _end_of(layer.mlp).register_forward_hook(from_mlp)
    cls: Any = type(layer)
    layer._places, layer.__class__ = _places(layer, mesh), _on_local_parameters(cls)


def _shard(path: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the parameters of a projection: its outputs, or its inputs if its outputs are sums over processes."""
    for name, parameter in [*module.named_parameters(recurse=False)]:
        if path in COLUMNS or (path in ROWS and name == "weight"):
            sharded = distribute_tensor(parameter, mesh, [Shard(0 if path in COLUMNS else 1)])
            module.register_parameter(name, nn.Parameter(sharded, parameter.requires_grad))


def _end_of(mlp: Any) -> nn.Module:
    """Return the module whose outputs are summed: the last projection, or a patched MLP that does no more behind it.

    A patched MLP runs activation and projection as one op, if the projection has no hook.
    """
    cls = original(type(mlp))
    fused = cls is not type(mlp) and match(cls.forward, cls, glu_mlp.PATTERNS)[0] in LINEAR_END
    end: nn.Module = mlp if fused else mlp.down_proj
    return end


def _places(layer: nn.Module, mesh: DeviceMesh) -> list[Place]:
    first, places = mesh.get_local_rank() == 0, []
    for path, module in layer.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            own: Any = parameter.placements
            whole = own == (Replicate(),)  # each process has the gradient of some tokens
            places.append(Place(module, name, [Partial()] if whole else own, first or not (whole and path in ROWS)))
    return places


@torch.compiler.disable  # type: ignore[untyped-decorator]  # else each parameter would have a graph of its own
def _show(places: list[Place]) -> None:
    """Hide the parameters, which FSDP2 has gathered, behind their local tensors."""
    for module, name, gradient, counts in places:
        parameter: Any = module._parameters[name]
        local = parameter.to_local(grad_placements=gradient)
        vars(module)[name] = local if counts else 0 * local


@functools.cache  # layers of one class share the new one, and what is compiled for it
def _on_local_parameters(cls: Any) -> Any:
    """Return a subclass of ``cls`` whose modules have the local tensors of their parameters while the forward runs.

    A local tensor stands in the module's ``__dict__``, which hides the parameter of its name from the module's code,
    but not from FSDP2, optimizers and checkpoints. Hooks of the layer would not do: transformers recomputes its
    forward alone.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            _show(self._places)
            return cls.forward(self, *args, **kwargs)
        finally:
            for place in self._places:
                vars(place.module).pop(place.name, None)

    return type(cls.__name__, (cls,), {"forward": forward})
