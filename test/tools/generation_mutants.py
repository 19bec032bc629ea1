"""Bugs, as in mutants.py, in generation by patched models: file, old, new, why."""

GENERATION, PAGED_CACHE, GROWING = "patches/generation.py", "patches/paged.py", "patches/growing_cache.py"
ATTENTION = "patches/attention.py"

GENERATING = [
    (
        PAGED_CACHE,
        "k_cache, v_cache, slots, lengths, **more",
        "k_cache, v_cache, slots, lengths, **(more | {'k': None, 'v': None})",
        "a ring is read where new keys go: the sentinel",
    ),
    (
        PAGED_CACHE,
        "    longest: Any = ",
        '    paged_write(k, v, k_cache, v_cache, options["write_index"][group])\n    longest: Any = ',
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
        'rows, lengths = options["cu_seq_lens_q"], ',
        'rows, lengths = nn.functional.pad(options["cu_seq_lens_q"][:-1], (0, 1), value=q.shape[0]), ',
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
        "max_blocks_per_request = resolved.max_blocks_per_request",
        "max_blocks_per_request = 0",
        "decode steps have no block tables",
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
