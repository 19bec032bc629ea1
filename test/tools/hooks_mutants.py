"""Bugs, as in mutants.py, in what a patched model must not miss: hooks and forwards of others, and what came before.

Each is (file, old, new, why).
"""

SUPPORT, HEADS, HEAD = "runtime/support.py", "patches/heads.py", "patches/lm_head.py"
EXPERTS, OWN, SEPARATE = "patches/experts.py", "patches/own_experts.py", "patches/separate_experts.py"

HOOKS = [
    (SUPPORT, "not any(HOOKS_OF_ALL) or all(", "True or all(", "hooks of all modules are passed by"),
    (SUPPORT, " or torch.nn.Linear.forward is not LINEAR_FORWARD", "", "a forward set on nn.Linear is passed by"),
    (HEADS, "if nn.Linear.forward is not LINEAR_FORWARD:", "if False:", "the fused loss passes such a forward by"),
    (HEADS, " if cls.forward is LINEAR_FORWARD else None", "", "a head of few rows passes such a forward by"),
    (SUPPORT, "not any(HOOKS_OF_ALL) or all(", "not any(HOOKS_OF_ALL) or False and all(", "a traced step is another"),
    (HEADS, "else changed(part) for part", "else hook_on(part) for part", "a new forward of the head gets the loss"),
    (HEADS, "if kind == TENSOR_PARALLEL else", "if False else", "the forward of a sharded head is in the way"),
    (HEAD, "@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]\n", "", "a warning breaks it"),
    (OWN, "(self.router, self.experts, experts)", "()", "hooks on Llama 4's router and experts see other rows"),
    (OWN, " or changed(self.identity_expert)", "", "hooks on LongCat's identity do not run"),
    (SEPARATE, " and not changed(part)", "", "hooks on the parts of DBRX or JetMoE do not run"),
    ("patches/decode_graphs.py", "[*map(len, hooks_of_all)]", "[]", "a graph does not see a hook of all modules"),
    (
        "patches/rms_norm.py",
        'methods["fused_arguments"] = lambda self: (getattr(self, weight), getattr(self, eps), *mode)',
        'methods["fused_arguments"] = torch.compiler.assume_constant_result(\n'
        "                lambda self: (getattr(self, weight), getattr(self, eps), *mode)\n"
        "            )",
        "a compiled graph keeps the norms that there were",
    ),
    ("patching.py", "torch.inference_mode(False)", "torch.enable_grad()", "inference mode refuses every trial"),
    ("patches/balance.py", "torch.inference_mode(False)", "torch.enable_grad()", "inference mode refuses the loss"),
    (EXPERTS, "(number > 0 if", "(number is not None if", "a limit of NaN is one"),
    (EXPERTS, "number > 0 if role", "number >= 0 if role", "a limit of zero is taken for one that clamps"),
    (EXPERTS, "fits(role, number) for", "True for", "a limit that is set later is not looked at"),
    (EXPERTS, "check_weights(module.gate_up_proj, module.down_proj, *biases)", "pass", "weights of any dtype"),
    (EXPERTS, "module.down_proj, *biases)", "module.down_proj)", "biases of any dtype"),
    (
        "patching.py",
        "        torch.default_generator.manual_seed(SEED)  # whether",
        "        # whether",
        "errors of a report depend on models that were patched before",
    ),
]
