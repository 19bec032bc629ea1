"""Bugs, as in mutants.py, in the plans by which ops repeat their launches."""

FILE, RECORDING = "runtime/replay.py", "runtime/recording.py"
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
    (
        FILE,
        "if plan is True and several else",
        "if plan is True else",
        "a plan of a tensor in two places serves two tensors",
    ),
    (FILE, "and not any(plan.hooks)", "", "a plan forgets the hooks of a kernel"),
    (FILE, "and not any(node.plan.hooks)", "", "a node forgets the hooks of a kernel"),
    (
        FILE,
        "function, torch.are_deterministic_algorithms_enabled(), ",
        "function, ",
        "a node that need not repeat serves one that must",
    ),
    (FILE, "enabled(), *kwargs, *key", "enabled(), *key", "a node of one keyword serves another"),
    (FILE, "if len(_watched.applied) != 1:", "if not _watched.applied:", "a node of the first of two functions"),
    (FILE, " or None in take", "", "a node has no argument that the function made"),
    (FILE, " or (results is not found and None in picked)", "", "a node returns what the function changes"),
    (
        FILE,
        "pick = None if results is found else",
        "pick = None if True else",
        "a node returns results in another order",
    ),
    (
        FILE,
        'vars(_watched).update({"tensors": None, "applied": []} | before)',
        "pass",
        "functions are watched for ever",
    ),
    (FILE, "key: list[Any] = [casts, ", "key: list[Any] = [", "a plan of products serves autocast"),
    (FILE, "hooked or launcher._recorded is not None", "launcher._recorded is not None", "profilers see no launch"),
    (FILE, " or support._reasons is not None", "", "explain hears no reason"),
    (FILE, "launcher._recorded is not None or ", "", "a record of launches misses those of plans"),
    (FILE, "watched or machine.current is not None", "watched", "a trace of a pretended GPU follows plans"),
    (RECORDING, "offset + _start(out) - _start(args[0])", "offset", "a view starts where its tensor does"),
    (FILE, ", *fallback.BROKEN", "", "a plan launches kernels that others have found broken"),
    (RECORDING, "func.decompose(*args, **kwargs)", "NotImplemented", "inference mode records no copy that is none"),
    (
        RECORDING,
        "t.storage_offset() * t.element_size()",
        "t.data_ptr()",
        "an empty view is before 0",
    ),
    (
        RECORDING,
        "_ATEN.alias.default,",
        "_ATEN.alias.default, _ATEN.as_strided.default,",
        "a place in memory is a view",
    ),
    (FILE, "*arg, *map(type, arg)", "*map(type, arg), *arg", "a plan for [5] serves [], 5"),
    (RECORDING, "return made if _layout(made) == _layout(t) else None", "return made", "a view is returned whole"),
    (RECORDING, "if place < self.inputs or offset:", "if place < 0 or offset:", "an input is returned as memory"),
    (
        RECORDING,
        "else:\n            self.refuse()\n        return out",
        "elif not out.shape:\n            self.refuse()\n        return out",
        "an op of torch is left out",
    ),
    (RECORDING, "base=_Memory(pointers[place])", "base=_Memory(pointers[0])", "a descriptor has the memory of another"),
    (
        RECORDING,
        "_layout(step[-1]) == _layout(step[0][0])",
        "step[-1].shape == step[0][0].shape",
        "a call gets a tensor, not its view",
    ),
    (
        RECORDING,
        "func in _CALLS) and all(map(self._knows, tensors))",
        "func in _CALLS)",
        "a call changes memory from outside",
    ),
    (
        RECORDING,
        "lambda tensors: [part(tensors) for part in parts]",
        "lambda tensors: arg",
        "a call changes tensors of an earlier call",
    ),
    (RECORDING, "steps[::-1], read, spots", "steps, read, spots", "a plan launches backwards"),
    (RECORDING, "if i in pointed or id(maker[0]) in read", "if True", "a plan allocates what nobody reads"),
    (RECORDING, "and id(t) not in read}", "}", "results take the memory of kernels"),
    (RECORDING, "places[i] = place, size", "places[i] = place, 0", "two tensors of kernels share memory"),
    (RECORDING, "nbytes() <= SMALL", "nbytes() >= 0", "large memory is allocated at once"),
    (
        RECORDING,
        "make.func is torch.empty_strided and",
        "make.func is not _same and",
        "zeros of kernels are not filled",
    ),
    (RECORDING, "return t\n\n\ndef _start", "return t.clone()\n\n\ndef _start", "a kernel writes its flag elsewhere"),
    (
        "ops/attention/__init__.py",
        "@together\n",
        "",
        "each backward of attention prepares its launches",
    ),
    (RECORDING, ", _ATEN.new_zeros.default}", "}", "the sum of dq keeps attention's backward on Hopper from a plan"),
    (
        "ops/losses/chunks.py",
        "call.x.shape[0] <= min(FREE",
        "call.x.shape[0] < min(FREE",
        "the host reads the count of one chunk",
    ),
    (
        "ops/losses/chunks.py",
        "min(FREE_TOKENS, _chunks(call, False)[0])",
        "_chunks(call, False)[0]",
        "ignored tokens of a large chunk are computed",
    ),
    (
        "ops/losses/chunks.py",
        "min(FREE_TOKENS, _chunks(call, False)[0])",
        "FREE_TOKENS",
        "the host never reads the count",
    ),
    (
        "ops/losses/last_chunk.py",
        "map(int, chunk_bounds[1:])",
        "chunk_bounds[1:].tolist()",
        "a plan has the bounds of another call",
    ),
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
    (
        RECORDING,
        "d and _described(*d, pointers)",
        "_described(*d, pointers)",
        "a plan has no room for an absent descriptor",
    ),
    (
        "runtime/launcher.py",
        "        _told.recording.refuse()\n",
        "        pass\n",
        "a plan without the launches by Triton",
    ),
    ("runtime/launcher.py", "class _Told(threading.local)", "class _Told", "a plan has launches of other threads"),
    ("runtime/registry.py", "repeat if is_forward_only() else", "repeat if True else", "plans lose gradients"),
    ("runtime/registry.py", "is_compiling() and not _is_heard():", "is_compiling():", "modes do not see a plan"),
    ("runtime/registry.py", "is_compiling() or _is_heard() else", "is_compiling() else", "modes do not see a backward"),
]
