"""Train a Llama under any combination of FSDP, tensor (and sequence), context and pipeline parallelism.

    torchrun --nproc-per-node 4 -m examples.parallel --fsdp 2 --tp 2
    torchrun --nproc-per-node 4 -m examples.parallel --cp 2 --pp 2 --checkpointing selective

The product of the sizes is the number of processes. Without GPUs a tiny model runs over gloo. The losses are the same
for every combination, up to rounding: all processes draw the model from one seed and share one global batch.
"""

import os
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import LlamaConfig, LlamaForCausalLM

import liger_like
from examples.train import CONFIGS, GPU, make_batches, read_tokens
from liger_like.parallel import checkpoint_policy, context_parallel, pipeline_loss
from liger_like.parallel.stages import Stage, spread

DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if GPU else torch.device("cpu")
LARGER = {
    "8b": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
}
PRECISION: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if GPU else {}
UNTIED = {"tie_word_embeddings": False}  # embeddings and head may be on different stages
MODELS = {name: LlamaConfig(**config.to_dict() | UNTIED) for name, config in (CONFIGS | LARGER).items()}


def step_of(stage: Stage, mesh: DeviceMesh, micro_batches: int, tokens: int) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the gradients of a global batch [B, S] and returns its loss.

    The loss is the mean over ``tokens``, the number of predicted tokens.
    """
    pp, fsdp, cp = (mesh[name] for name in ("pp", "fsdp", "cp"))
    first, last = pp.get_local_rank() == 0, pp.get_local_rank() == pp.size() - 1
    parts = fsdp.size() * cp.size()  # the loss is a sum of so many parts; FSDP takes the mean of their gradients
    # a schedule without a loss_fn would run no backward
    loss_fn = pipeline_loss(stage.lm_head, tokens / parts) if last else lambda *_: torch.zeros(())
    if pp.size() > 1:
        part = PipelineStage(stage, pp.get_local_rank(), pp.size(), DEVICE, group=pp.get_group())
        schedule = Schedule1F1B(part, micro_batches, loss_fn=loss_fn, scale_grads=False)

    def step(batch: Tensor) -> Tensor:
        rows = batch.chunk(fsdp.size())[fsdp.get_local_rank()]
        losses: list[Tensor] = []
        with context_parallel(cp) as context:
            own = context.shard({"input_ids": rows, "labels": rows})
            ids, positions, target = own["input_ids"], own["position_ids"], own["shift_labels"]
            if pp.size() > 1:
                outputs = {"target": target, "losses": losses} if last else {}
                schedule.step(*((ids,) if first else ()), position_ids=positions, **outputs)
            else:
                losses = [loss_fn(stage(ids, positions), target)]
                losses[0].backward()
        loss = sum(losses, torch.zeros((), device=DEVICE)).detach() / parts
        for name in ("fsdp", "cp", "pp"):
            dist.all_reduce(loss, group=mesh[name].get_group())
        return loss

    return step


def train(
    sizes: dict[str, int], config: LlamaConfig, batches: Tensor, checkpointing: str, lr: float, seed: int, zero: int = 3
) -> list[float]:
    """Train on ``batches`` [steps, B, S] and return the losses; ``sizes`` are the mesh dimensions by name.

    ``zero`` 2 keeps gathered parameters from a layer's forward to its backward, 3 gathers them twice.
    """
    mesh = dist.init_device_mesh(DEVICE.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(seed)
    with DEVICE:
        model = LlamaForCausalLM(config).train()
    report = liger_like.patch(model, strict=True)
    if checkpointing != "none":
        policy = {"context_fn": checkpoint_policy()} if checkpointing == "selective" else {}
        model.gradient_checkpointing_enable({"use_reentrant": False, **policy})
    stage = spread(model, mesh, **PRECISION, **({"reshard_after_forward": False} if zero == 2 else {}))
    del model
    step = step_of(stage, mesh, 2 * sizes["pp"], batches[0, :, 1:].numel())
    optimizer = torch.optim.AdamW(stage.parameters(), lr=lr, fused=GPU)
    chief, losses = dist.get_rank() == 0, []
    if chief:
        print(report)
    for batch in batches:
        start = time.perf_counter()
        loss = step(batch)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # synchronises, so the time is that of the whole step
        speed = batch.numel() / (time.perf_counter() - start)
        memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if GPU else ""
        if chief:
            print(f"step {len(losses)}: loss {losses[-1]:.4f}, {speed:,.0f} tokens/s{memory}")
    return losses


app = typer.Typer(add_completion=False)


@app.command()
def main(
    fsdp: Annotated[int, typer.Option(min=1, help="processes that shard the parameters, each with its own rows")] = 1,
    tp: Annotated[int, typer.Option(min=1, help="processes that split each layer's products")] = 1,
    cp: Annotated[int, typer.Option(min=1, help="processes that split each sequence")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="processes that split the layers")] = 1,
    size: Annotated[Literal["tiny", "1b", "8b"], typer.Option(help="of the Llama")] = "1b" if GPU else "tiny",
    steps: Annotated[int, typer.Option(min=1)] = 20 if GPU else 5,
    batch: Annotated[int, typer.Option(min=1, help="rows of the global batch")] = 8 if GPU else 4,
    seq: Annotated[int, typer.Option(min=2)] = 2048 if GPU else 32,
    checkpointing: Annotated[Literal["none", "full", "selective"], typer.Option()] = "none",
    zero: Annotated[int, typer.Option(min=2, max=3, help="2: parameters stay gathered until the backward")] = 3,
    lr: float = 3e-4 if GPU else 3e-3,
    seed: int = 0,
) -> None:
    """Train a patched Llama under torchrun, with as many processes as the product of the sizes."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if pp * fsdp * cp * tp != processes:
        raise typer.BadParameter(
            f"--fsdp, --tp, --cp and --pp must have the product {processes}, the number of processes, got "
            f"{pp * fsdp * cp * tp}"
        )
    if batch % fsdp or batch // fsdp % (2 * pp if pp > 1 else 1):
        raise typer.BadParameter("--batch must be a multiple of --fsdp, or with --pp above 1 of --fsdp x 2 x --pp")
    if GPU:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if GPU else "gloo")
    config = MODELS[size]
    batches = make_batches(read_tokens(None, None, config), steps, batch, seq, seed)
    train({"pp": pp, "fsdp": fsdp, "cp": cp, "tp": tp}, config, batches, checkpointing, lr, seed, zero)
    dist.destroy_process_group()


if __name__ == "__main__":
    app()
