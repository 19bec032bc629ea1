"""Bugs, as in mutants.py, in the patches: file, old, new, why."""

EXPERTS = "patches/experts.py"
VIEWS = "patches/config_views.py"

PATCHES = [
    (EXPERTS, '"gate_up_bias": module.gate_up_proj_bias, ', "", "the bias of gate and up is left out"),
    (
        EXPERTS,
        '"transposed": module.is_transposed',
        '"transposed": not module.is_transposed',
        "the layout of the weights is taken for the other one",
    ),
    (
        EXPERTS,
        "interleaved=pattern == scaled_interleaved.__name__",
        "interleaved=False",
        "gate and up that take turns are taken for halves",
    ),
    (EXPERTS, '("limit", gate.limit), ', "", "the live limit of the gate is left out"),
    (EXPERTS, ', ("alpha", gate.alpha)', "", "the live alpha of the gate is left out"),
    (EXPERTS, "or not use_kernel(hidden_states) ", "", "experts run the op where no kernel can run"),
    (
        EXPERTS,
        " or (gate.act and not runs(gate.kernel, getattr(module, gate.act)))",
        "",
        "an activation of experts that changed after patching is not seen",
    ),
    (EXPERTS, "torch.is_grad_enabled() or ", "", "a few rows are trained by batched_mm"),
    (EXPERTS, "top_k_index.numel() > module.num_experts", "True", "decoding never runs batched_mm"),
    (
        EXPERTS,
        "top_k_index.numel() > module.num_experts",
        "len(top_k_index) > 512",
        "batched_mm copies the weights of more rows than there are experts",
    ),
    (
        EXPERTS,
        '"grouped_mm" if name == NAME else name',
        "name",
        "a config that names ours without a patch calls itself",
    ),
    (
        EXPERTS,
        'getattr(module.config, "_liger_like_original", module.config)._experts_implementation',
        '"grouped_mm"',
        "where no kernel can run, the user's implementation is forgotten",
    ),
    (
        EXPERTS,
        '.get("experts_interface") is ALL_EXPERTS_FUNCTIONS',
        '.get("experts_interface") is not 1',
        "experts of another interface are taken for known",
    ),
    (EXPERTS, "if not module.has_gate:", "if False:", "experts without a gate are taken for gated"),
    (
        EXPERTS,
        'if getattr(module, "has_post_expert_norm", False):',
        "if False:",
        "experts with a norm behind them are taken for known",
    ),
    (EXPERTS, " or weight.dtype not in DTYPES", "", "quantised experts are taken for known"),
    (
        EXPERTS,
        "type(weight) not in (Tensor, nn.Parameter, DTensor) or ",
        "",
        "experts with packed weights are taken for known",
    ),
    (EXPERTS, ' or (role == "limit" and number <= 0)', "", "a limit of zero is taken for one that clamps"),
    (
        EXPERTS,
        '.__code__.co_names and getattr(module.config, self.implementation) == "eager"',
        ".__code__.co_names",
        "a family's choice of fp32 cannot be undone",
    ),
    (
        EXPERTS,
        '"float32" in _eager(cls).__code__.co_names and ',
        "False and ",
        "experts in fp32 are run in half precision",
    ),
    (
        EXPERTS,
        'return [] if foreign_forward(module).startswith("transformers.") else [module]',
        "return [module]",
        "experts in expert parallelism are left alone",
    ),
    (
        EXPERTS,
        'return [] if foreign_forward(module).startswith("transformers.") else [module]',
        "return []",
        "a forward of experts that another library replaced is not seen",
    ),
    (EXPERTS, '({part["limit"]: 1.0} if "limit" in part else {})', "{}", "the trial's limit clamps nothing"),
    (EXPERTS, 'state = ("_liger_like_gate",)', "state = ()", "unpatching leaves the gate of experts behind"),
    (VIEWS, "a in below", "True", "a config above is named by attributes that no part of it has"),
    (VIEWS, " | {*_named(config)}", "", "a second patch forgets what the first one named"),
    (VIEWS, "(*others, attribute) if name == NAME else others", "others", "a user cannot choose ours by its name"),
    (
        VIEWS,
        "        if name != NAME:\n            vars(self)[attribute] = name\n",
        "",
        "the user's choice does not outlive the view",
    ),
    (VIEWS, "    experts.register()\n", "", "no implementation of experts is registered"),
    ("patches/trials.py", "if not error <= bound", "if error > bound", "a replacement that gives NaN is accepted"),
    ("patches/trials.py", "4 * torch.finfo(dtype).eps", "1e9 * torch.finfo(dtype).eps", "any replacement is accepted"),
    (
        "patching.py",
        "if row.status == PATCHED and config in others",
        "if False",
        "modules of one config are patched one by one",
    ),
]
