"""Bugs, as in mutants.py, in generation by patched models: file, old, new, why."""

GENERATION, PAGED_CACHE, GROWING = "patches/generation.py", "patches/paged.py", "patches/growing_cache.py"
ATTENTION, LATENTS = "patches/attention.py", "patches/latents.py"

GENERATING = [
    (
        PAGED_CACHE,
        "k_cache, v_cache, slots, lengths, **more",
        "k_cache, v_cache, slots, lengths, **(more | {'k': None, 'v': None})",
        "a ring is read where new keys go: the sentinel",
    ),
    (
        PAGED_CACHE,
        '    slots = options["read_index"][group]',
        '    paged_write(k, v, k_cache, v_cache, options["write_index"][group])\n'
        '    slots = options["read_index"][group]',
        "a ring is written before it is read",
    ),
    (
        PAGED_CACHE,
        "allocator._kv_page_views[index]",
        "[*allocator._kv_page_views.values()][0]",
        "the first layer's cache serves all layers of its kind",
    ),
    (PAGED_CACHE, "window - 1, 0)", "window, 0)", "a window sees a key too many"),
    (
        PAGED_CACHE,
        "    rows, lengths, longest = _counts(options, window)",
        "    rows, lengths, longest = _counts(options, window)\n"
        "    rows = nn.functional.pad(rows[:-1], (0, 1), value=q.shape[0])",
        "padding behind the last sequence belongs to it",
    ),
    (
        PAGED_CACHE,
        "paged_write(k, v, k_cache, v_cache, pages=table, lengths=lengths)",
        "paged_write(k, v, k_cache, v_cache, pages=table.clamp(min=0), lengths=lengths.diff().clamp(min=1))",
        "a padded row of a decode step is written to the first page",
    ),
    (
        GENERATION,
        "if (ours := paged.cache_class(cls)) is not cls:",
        "if ours := paged.cache_class(cls):",
        "a manager that is used again loses the keys of shared prompts",
    ),
    (
        GENERATION,
        'manager._original_attn_impl = {**names, "": NAME}',
        "manager._original_attn_impl = None",
        "stop() leaves the name",
    ),
    (
        GENERATION,
        "        finally:\n            _rename(self, NAME)",
        "        finally:\n            pass",
        "an exception before the first step leaves the name",
    ),
    (
        GENERATION,
        "            manager._original_attn_impl = None",
        "            pass",
        "stop() after unpatch names our attention again",
    ),
    (
        GENERATION,
        "    except BaseException:\n        _rename(model, NAME)\n",
        "    except BaseException:\n",
        "an exception at the start leaves the name",
    ),
    (
        GENERATION,
        "setattr(settings, name, getattr(resolved, name))",
        "pass",
        "decode steps have no block tables",
    ),
    (
        GENERATION,
        "asked.decode_compile_config = None",
        "asked.decode_compile_config = resolved.decode_compile_config = None",
        "decode steps are not compiled as asked",
    ),
    (
        GENERATION,
        "m.kv_b_proj.in_features + m.qk_rope_head_dim",
        "m.kv_b_proj.in_features",
        "a page has no room for it",
    ),
    (GENERATION, "setattr(config, name, before[name])", "pass", "the sizes of a cache of latents stay in the config"),
    (PAGED_CACHE, "keys.stride(0), 2 * half, 2 * half", "keys.stride(0), half, half", "rows of latents overlap"),
    (
        PAGED_CACHE,
        "    paged_write(k, v, rotated, latents, options",
        "    if slots.shape[0]:\n        paged_write(k, v, rotated, latents, options",
        "the latents of new prompts are not kept",
    ),
    (
        PAGED_CACHE,
        "        return decode(module, q, rotated, latents, table",
        "        lengths = lengths - torch.arange(len(lengths), device=lengths.device).int()\n"
        "        return decode(module, q, rotated, latents, table",
        "a decode step does not see its own latent",
    ),
    (
        LATENTS,
        'torch.einsum("thn,hnl->thl", q[..., :nope]',
        'torch.einsum("thn,hnl->thl", q[..., -nope:]',
        "rotated features of the query meet latents",
    ),
    (LATENTS, "*map(_version, (mask.padding, mask.spans))", "", "a layer reads the mask of another before it changed"),
    (LATENTS, " or id(module) in last.layers:", ":", "a step reads the mask of another before it changed"),
    (GENERATION, "if layers and _has_windows(config):", "if False:", "a ring forgets latents that attention sees"),
    (GENERATION, 'f"{cls.__module__}.{cls.__qualname__}"', "cls.__name__", "an adapter is called Linear"),
    (GENERATION, '"a bias": linear.bias is not None', '"a bias": False', "an nn.Linear is refused for nothing"),
    (LATENTS, '{"scale": q.shape[-1] ** -0.5} |', '{"scale": None} |', "the default scale is that of latents"),
    (
        LATENTS,
        "{name: x for name, x in options.items() if x is not None}",
        '{"scale": q.shape[-1] ** -0.5}',
        "options of the scores are dropped",
    ),
    (LATENTS, "tokens = (B - 1) * room + S", "tokens = B * room", "the view of a cache ends behind its memory"),
    (LATENTS, "last.mask is not mask or ", "", "a layer takes the padding of another mask"),
    (
        LATENTS,
        "type(linear) is nn.Linear\n",
        "isinstance(linear, nn.Linear)\n",
        "a quantised weight is taken for the map",
    ),
    (LATENTS, "        and unhooked(linear)\n", "", "a hook on kv_b_proj does not run"),
    (LATENTS, "if torch.is_grad_enabled() or self", "if self", "a step with gradients meets latents"),
    (
        LATENTS,
        "method is not None and _passes_on(cls) and _is_known(cls)",
        "method is not None and _passes_on(cls)",
        "any expand_kv is taken for the known map",
    ),
    (
        LATENTS,
        "method is not None and _passes_on(cls) and _is_known(cls)",
        "method is not None and _is_known(cls)",
        "keys may be cached or read",
    ),
    (
        ATTENTION,
        'options.get("dropout") or options.get("output_attentions")\n    if asked',
        'options.get("dropout")\n    if asked',
        "a decode step over latents returns no attention weights",
    ),
    (
        GROWING,
        "memory.used is held and writable",
        "writable",
        "changed keys are taken for those in memory",
    ),
    (GROWING, 'if name != "_memory"', "if name", "copies of a layer write over each other"),
    (GROWING, "        used.copy_(held)", "        pass", "a layer that grows loses its keys"),
    (GROWING, "layer.__class__ = GrowingLayer", "pass", "each step copies the cache"),
    (
        ATTENTION,
        "torch.stack((starts, positions + 1))",
        "torch.stack((starts, positions + 2))",
        "a static cache shows a key that is not filled",
    ),
    (
        ATTENTION,
        "first = padding.int().argmax(-1, keepdim=True)",
        "first = padding.int().argmax(-1, keepdim=True) * 0",
        "a static cache reads the padding on the left",
    ),
]
