"""Bugs, as in mutants.py, in the plans by which ops repeat their launches."""

FILE = "runtime/replay.py"
KEY = "arg.shape, arg.stride(), arg.dtype, arg.get_device(), pointer & 15, arg.requires_grad"

REPLAY = [
    *(
        (FILE, KEY, ", ".join(part for part in KEY.split(", ") if part != left), f"a signature without {left}")
        for left in KEY.split(", ")
        if left != "arg.get_device()"  # which needs two GPUs
    ),
    (FILE, "key += kind, arg\n        elif", "key += (arg,)\n        elif", "a plan for 1 serves True"),
    (FILE, "arg or str(arg)", "arg", "a plan for 0.0 serves -0.0"),
    (FILE, "key += kind, *arg, *map(type, arg)", "key += kind, *arg", "a plan for [1] serves [True]"),
    (FILE, "*launcher.OPTIONS.values(), ", "", "a plan with fused products serves without"),
    (FILE, "key = launch, *kwargs, *key", "key = launch, *key", "a plan of one keyword serves another"),
    (FILE, " or len({*map(id, tensors)}) < len(tensors)", "", "a plan of a tensor in two places serves two tensors"),
    (FILE, "and not any(plan.hooks)", "", "a plan forgets the hooks of a kernel"),
    (FILE, "hooked or launcher._recorded is not None", "launcher._recorded is not None", "profilers see no launch"),
    (FILE, " or support._reasons is not None", "", "explain hears no reason"),
    (FILE, "launcher._recorded is not None or ", "", "a record of launches misses those of plans"),
    (FILE, "watched or machine.current is not None", "watched", "a trace of a pretended GPU follows plans"),
    (FILE, "offset + steps * out.element_size()", "offset", "a view starts where its tensor does"),
    (FILE, ", *fallback.BROKEN", "", "a plan launches kernels that others have found broken"),
    (FILE, "func.decompose(*args, **kwargs)", "NotImplemented", "inference mode records no copy that is none"),
    (
        FILE,
        "offset + steps * out",
        "offset + out.data_ptr() - args[0].data_ptr() + 0 * out",
        "an empty view is before 0",
    ),
    (FILE, "_ATEN.alias.default,", "_ATEN.alias.default, _ATEN.as_strided.default,", "a place in memory is a view"),
    (FILE, "*arg, *map(type, arg)", "*map(type, arg), *arg", "a plan for [5] serves [], 5"),
    (FILE, "return place - self.inputs if same else None", "return place - self.inputs", "a view is returned whole"),
    (FILE, "if place < self.inputs:", "if place < 0:", "an input is returned as memory"),
    (
        FILE,
        "else:\n            self.refuse()\n        return out",
        "elif not out.shape:\n            self.refuse()\n        return out",
        "an op of torch is left out",
    ),
    (FILE, "base=_Memory(pointers[place])", "base=_Memory(pointers[0])", "a descriptor has the memory of another"),
    (FILE, "if len(PLANS) >= MOST:", "if False:", "plans pile up"),
    *(
        (
            f"ops/{name}.py",
            f"    replayed=True,\n)\ndef {op}(",
            f")\ndef {op}(",
            f"each call of {op} prepares its launches",
        )
        for name, op in (
            ("experts/routing", "moe_rows"),
            ("experts/forward", "moe_gate_up"),
            ("experts/backward", "moe_down_bwd"),
            ("experts/lora", "moe_low_rank"),
            ("router", "_moe_route_fwd"),
        )
    ),
    (
        "ops/experts/hopper/down_bwd.py",
        "ordered = weights.new_empty(S)",
        "ordered = weights.flatten()[row]",
        "a torch op keeps the backward from a plan",
    ),
    (FILE, "d and _described(*d, pointers)", "_described(*d, pointers)", "a plan has no room for an absent descriptor"),
    (
        "runtime/launcher.py",
        "        _told.recording.refuse()\n",
        "        pass\n",
        "a plan without the launches by Triton",
    ),
    ("runtime/launcher.py", "class _Told(threading.local)", "class _Told", "a plan has launches of other threads"),
    ("runtime/registry.py", "and is_forward_only() and not _is_heard()", "and not _is_heard()", "plans lose gradients"),
    ("runtime/registry.py", "is_forward_only() and not _is_heard()", "is_forward_only()", "modes do not see a plan"),
]
