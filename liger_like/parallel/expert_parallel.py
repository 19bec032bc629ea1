"""Expert parallelism: each process of a mesh holds some experts of every mixture, and has tokens of its own.

x, index and weights go to other processes, each runs its own experts on them, and each token's sums return to its
process (GShard, arXiv:2006.16668). By all-gather all tokens go to all processes: all sizes are known to the host, so
nothing waits for the GPU. By all-to-all a token goes to the processes that have experts of its own: fewer bytes and
less memory, but the host has to read the numbers of rows from the GPU.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from liger_like.nn import Experts
from liger_like.ops.experts import run_experts
from liger_like.ops.experts.checks import Gate, check_routing, checked_gate
from liger_like.runtime.autograd import once_differentiable
from liger_like.runtime.checks import require, require_choice, require_integer, require_type
from liger_like.runtime.support import autocast_dtype

ALL_GATHER, ALL_TO_ALL = EXCHANGES = "all_gather", "all_to_all"
PARAMETERS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
UNEQUAL = (
    "all processes of expert_parallel must have the same number of tokens: pass tokens=, the largest number of them"
)
_comms: Any = torch.ops._c10d_functional  # in contrast to torch.distributed's, these stay in a compiled graph


def expert_parallel(
    model: nn.Module, mesh: DeviceMesh, *, exchange: str | None = None, tokens: int | None = None
) -> set[nn.Parameter]:
    """Shard the experts of every mixture in ``model`` over ``mesh``, of one dimension, and return their parameters.

    Each of n processes keeps E / n experts of the modules that ``liger_like.patch`` has patched, except those of
    Llama 4, LongCat-Flash, Step-3.7, DBRX and JetMoE, and of ``liger_like.nn.Experts``. Their parameters become
    DTensors, with the values of the mesh's first process. Each process has tokens of its own, and the other parameters
    as in data parallelism: replicated, or sharded by FSDP.

    ``exchange`` is how tokens reach the experts: "all_gather" sends each to n - 1 processes, and nothing waits for the
    GPU; "all_to_all" sends it to those that have experts of its own, and waits for the GPU once in each forward of a
    mixture, to learn the numbers of rows. None chooses "all_to_all" where a token has fewer than n experts.

    ``tokens`` is the largest number of tokens that a process may have in a forward; processes then may have different
    numbers, as they may with "all_to_all". With "all_gather" alone they must have the same number, which each forward
    compares, in one more transfer of a number.

    A loss is the mean over its own process's tokens, and the mean over the processes is the loss of a single process.
    The gradients of experts are those of this mean, as DDP and FSDP make all other gradients. If you sum gradients
    over the processes instead, multiply those of experts by n. DDP ignores the returned parameters if it wraps
    ``model``; pass them to ``fully_shard`` as ``ignored_params``, or let it shard the experts' modules over another
    dimension of the mesh. The optimizer needs them in a group of their own.

    All processes must call the model equally often. Experts that are sharded stay so: ``unpatch`` raises.

    Raises TypeError if ``model`` is not a module, ``mesh`` not a DeviceMesh or ``tokens`` not an integer. Raises
    ValueError for an unknown ``exchange``, if the mesh has several dimensions or does not divide the number of experts,
    or if the model has no such modules or its experts are sharded or parametrised; the model is then unchanged. A
    forward raises ValueError for more than ``tokens`` tokens. By "all_gather" without ``tokens`` it raises
    RuntimeError, on a GPU a failed assertion, for unequal numbers.
    """
    require_type("model", model, nn.Module)
    require_type("mesh", mesh, DeviceMesh)
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, got {mesh.ndim}: take one by its name, as mesh['ep']")
    require_choice("exchange", exchange, (None, *EXCHANGES))
    if tokens is not None:
        require_integer("tokens", tokens, 1)
    found: dict[str, Any] = {name: module for name, module in model.named_modules() if _has_experts(module)}
    if not found:
        raise ValueError("expert_parallel found no experts: patch the model with liger_like.patch")
    for name, module in found.items():
        _check(name or type(module).__name__, module, mesh.size())
    ranks = Ranks(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size(), exchange, tokens)
    names = [*getattr(model, "_ddp_params_and_buffers_to_ignore", ())]
    sharded = set()
    for name, module in found.items():
        for own in PARAMETERS:
            if (parameter := getattr(module, own, None)) is not None:
                shard = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]), parameter.requires_grad)
                module.register_parameter(own, shard)
                sharded.add(shard)
                names.append(f"{name}.{own}" if name else own)
        module._liger_like_op = ranks
    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, names)
    return sharded


def _has_experts(module: nn.Module) -> bool:
    return isinstance(module, Experts) or "_liger_like_gate" in vars(module)


def _check(name: str, module: nn.Module, processes: int) -> None:
    """Raise ValueError unless the experts of ``module`` are whole and ``processes`` divides their number."""
    weight = module._parameters.get("gate_up_proj")
    # PEFT gives a module with adapters the name base_layer
    if weight is None or hasattr(module, "parametrizations") or name.endswith(".base_layer"):
        raise ValueError(f"the weights of {name} must be plain parameters: merge adapters (LoRA) first")
    if isinstance(weight, DTensor):
        raise ValueError(f"the experts of {name} are sharded: call expert_parallel once, and before fully_shard")
    if len(weight) == 0 or len(weight) % processes:
        raise ValueError(f"the mesh must divide the {len(weight)} experts of {name}, got {processes} processes")


class Ranks(NamedTuple):
    """Processes that share the experts; called in place of ``moe_experts``, on sharded experts.

    ``group`` is the name of their process group, and ``rank`` this process's number in it.
    """

    group: str
    rank: int
    size: int
    exchange: str | None
    tokens: int | None

    def __call__(
        self, x: Tensor, gate_up: Any, down: Any, index: Tensor, weights: Tensor, *, gate_up_bias: Any = None,
        down_bias: Any = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Return ``moe_experts`` of this process's x [..., H], index and weights [..., K] with the experts of all."""
        require("x", x)
        check_routing(x, index, weights)
        T = x.shape[:-1].numel()
        if self.tokens is not None and self.tokens < T:
            raise ValueError(f"tokens must be at least the number of tokens of a process, got {self.tokens} for {T}")
        experts = gate_up.to_local(), down.to_local()
        biases = tuple(None if t is None else t.to_local() for t in (gate_up_bias, down_bias))
        gate = checked_gate(**{"limit": None, "alpha": None} | options)
        dtype = autocast_dtype(experts[0]) or experts[0].dtype
        rows, index, weights = (t.reshape(T, t.shape[-1]) for t in (x.to(dtype), index, weights))
        by_gather = self.exchange == ALL_GATHER or (self.exchange is None and index.shape[1] >= self.size)
        run = self.by_all_gather if by_gather else self.by_all_to_all
        return run(rows, *experts, index, weights, gate, biases, x.dtype).view(x.shape)

    def by_all_gather(
        self, rows: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor, gate: Gate, biases: Any,
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """Return the outputs for this process's rows [T, H], in ``dtype``; all processes run all rows."""
        T = len(rows)
        if self.tokens is None:
            counts = self.gather(torch.full((1,), T, device=rows.device))
            torch._assert_async((counts == T).all(), UNEQUAL)
        else:
            more = (0, 0, 0, self.tokens - T)
            rows, index, weights = pad(rows, more), pad(index, more, value=-1), pad(weights, more)
        local = self.gather(index) - self.rank * len(gate_up)  # the ids of other processes' experts are out of range
        rows, weights = (_FromAll.apply(t, self) for t in (rows, weights))  # type: ignore[no-untyped-call]
        out = run_experts(rows, gate_up, down, local, weights, gate, biases)
        home: Tensor = _ToOwners.apply(out, self, dtype)  # type: ignore[no-untyped-call]
        return home[:T]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def by_all_to_all(
        self, rows: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor, gate: Gate, biases: Any,
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """Return the outputs for this process's rows [T, H], in ``dtype``; processes run rows of their experts.

        A compiled graph breaks here, since sizes depend on values.
        """
        E = len(gate_up)
        owners = index.div(E, rounding_mode="floor")
        owned = owners[..., None] == torch.arange(self.size, device=index.device)  # [T, K, n]
        sends = owned.any(1)
        counts = torch.stack((sends.sum(0), owned.sum((0, 1))), 1)  # of tokens and of choices, to each process
        others = _comms.wait_tensor(_comms.all_to_all_single(counts, [1] * self.size, [1] * self.size, self.group))
        (sent, _), (received, chosen) = torch.stack((counts, others)).mT.tolist()  # waits for the GPU
        token = torch.nonzero_static(sends.mT, size=sum(sent))[:, 1]
        way = Ways(self.group, self.size, token, sent, received, len(rows))
        local = way.gather(index) - self.rank * E
        rows, weights = (_FromAll.apply(t, way) for t in (rows, weights))  # type: ignore[no-untyped-call]
        out = run_experts(rows, gate_up, down, local, weights, gate, biases, S=sum(chosen))
        home: Tensor = _ToOwners.apply(out, way, dtype)  # type: ignore[no-untyped-call]
        return home

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows [n T, ...] of all processes."""
        out: Tensor = _comms.wait_tensor(_comms.all_gather_into_tensor(x.contiguous(), self.size, self.group))
        return out

    def reduce(self, x: Tensor) -> Tensor:
        """Return this process's rows [T, ...] of the sum of all processes' ``x`` [n T, ...], in fp32 or fp64.

        The rows travel in their own dtype, which a reduce-scatter in fp32 would double, and the order of the sum is
        fixed.
        """
        T = len(x) // self.size
        parts = _comms.all_to_all_single(x.contiguous(), [T] * self.size, [T] * self.size, self.group)
        parts = _comms.wait_tensor(parts).unflatten(0, (self.size, T))
        out: Tensor = parts.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))
        return out


class Ways(NamedTuple):
    """The rows of one all-to-all: ``token`` lists the tokens to send, for one process after the other.

    ``sent`` and ``received`` are the numbers of rows for and of each process; this process has T tokens.
    """

    group: str
    size: int
    token: Tensor
    sent: list[int]
    received: list[int]
    T: int

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows that other processes send, out of their ``x`` [T, ...]."""
        rows = _comms.all_to_all_single(x[self.token], self.received, self.sent, self.group)
        out: Tensor = _comms.wait_tensor(rows)
        return out

    def reduce(self, x: Tensor) -> Tensor:
        """Return for each token of this process the sum of its rows [T, ...], in fp32 or fp64."""
        rows = _comms.wait_tensor(_comms.all_to_all_single(x.contiguous(), self.sent, self.received, self.group))
        out: Tensor = rows.new_zeros(self.T, *x.shape[1:], dtype=torch.promote_types(x.dtype, torch.float32))
        for token, part in zip(torch.split(self.token, self.sent), torch.split(rows, self.sent), strict=True):
            out.index_add_(0, token, part.to(out.dtype))  # no token is in a part twice
        return out


# Between these two functions gradients are those of the mean loss of all processes, outside those of the own loss.
class _FromAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Any) -> Tensor:
        ctx.ranks = ranks
        out: Tensor = ranks.gather(x)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (ctx.ranks.reduce(grad) * ctx.ranks.size).to(grad.dtype), None


class _ToOwners(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Any, dtype: torch.dtype) -> Tensor:
        ctx.ranks, ctx.dtype = ranks, x.dtype
        out: Tensor = ranks.reduce(x).to(dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.ranks.gather((grad / ctx.ranks.size).to(ctx.dtype)), None, None
