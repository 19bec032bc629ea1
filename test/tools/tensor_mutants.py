"""Bugs, as in mutants.py, in layers under tensor parallelism and attention of one process: file, old, new, why."""

LAYER, TOKENS, STAGES = "parallel/tensor_parallel.py", "parallel/tokens.py", "parallel/stages.py"
CONTEXT, ATTENTION = "parallel/context_parallel.py", "parallel/_spread_attention.py"

TENSOR = [
    (
        STAGES,
        "set().union(*map(unknown_parts, layers))",
        "unknown_parts(layers[0])",
        "adapters of later layers count twice",
    ),
    (LAYER, "local if counts else 0 * local", "local", "each process adds the bias to the sum"),
    (LAYER, "[Partial()] if whole else", "[Replicate()] if whole else", "norms have the gradient of some tokens"),
    (LAYER, "vars(place.module).pop(place.name, None)", "pass", "local tensors stay on the modules"),
    (LAYER, "        finally:\n", "        except Exception:\n", "only exceptions give the parameters back"),
    (LAYER, 'LINEAR_END = {"split",', 'LINEAR_END = {"split_dropout",', "dropout of terms before they are summed"),
    (LAYER, "fused = cls is not", "fused = False and cls is not", "activation and projection are two ops"),
    (
        LAYER,
        "out.view(B, parts, S // parts, H).transpose(0, 1)",
        "out.view(parts, B, S // parts, H)",
        "tokens go to other processes",
    ),
    (
        LAYER,
        "nn.Parameter(sharded, parameter.requires_grad)",
        "nn.Parameter(sharded)",
        "frozen projections are trained",
    ),
    (LAYER, " if isinstance(modules.get(name), nn.Linear)", "", "any layer is a projection"),
    (LAYER, "(inside | {", "({", "modules without parameters are not looked at"),
    (
        LAYER,
        '(inside | {name.rpartition(".")[0] for name, _ in layer.named_parameters()})',
        "inside",
        "parameters of attention itself",
    ),
    (LAYER, "@functools.cache  # layers", "# layers", "each layer has graphs of its own"),
    (TOKENS, "return _summed(dx, ctx.group), None", "return dx[0], None", "gradients of tokens are not summed"),
    (STAGES, "if position_ids.shape[1] % self.tp:", "if False:", "tokens that tp does not divide"),
    (CONTEXT, "if self.shards.size > 1 else", "if True else", "one process sends to itself"),
    (CONTEXT, '{"conv", "hybrid"', '{"hybrid"', "a convolution sees the tokens of its process"),
    (CONTEXT, '"linear_attention", "mamba"}', '"mamba"}', "linear attention sees the tokens of its process"),
    (CONTEXT, "dist.all_reduce(chosen, group=self.shards.group)", "pass", "each process balances its own tokens"),
    (CONTEXT, "if more and visible is None:", "if False:", "tokens added to a row are balanced"),
    (CONTEXT, "mask = visible = mask.bool()", "mask = mask.bool()", "padding is balanced"),
    (CONTEXT, "self._visible.numel() != tokens", "False", "routers of other tokens than those of the batch"),
    ("patches/balance.py", "if layers and attention.context is not None:", "if False:", "a loss for each process"),
    ("patches/attention.py", "        context.require_attention(layer_types)\n", "", "hybrids compute a wrong loss"),
    (ATTENTION, "window=(left, -1)", "window=(-1, -1)", "one process has no windows"),
    (ATTENTION, "spans=None if starts is None else", "spans=None if True else", "one process has no documents"),
]
