"""Bugs, as in mutants.py, in what long sequences need: file, old, new, why."""

OFFLOAD, MEMORY, POLICY = (f"parallel/{name}.py" for name in ("offload", "host_memory", "checkpoint"))
TILES, MLP = "ops/tiled_mlp.py", "patches/glu_mlp.py"

LONG_CONTEXT = [
    (
        OFFLOAD,
        "            kept.host.copies.wait(end)\n            kept.tensor = None",
        "            kept.tensor = None",
        "an input is freed before its copy is done",
    ),
    (
        OFFLOAD,
        "        kept.host.copies.wait(end)\n        return buffer",
        "        return buffer",
        "an input is used before its copy is done",
    ),
    (OFFLOAD, "> self.keep_last:", ">= self.keep_last:", "the last layer leaves, too"),
    (OFFLOAD, "self._fetch(before.alive())", "pass", "no copy comes a layer ahead"),
    (OFFLOAD, "elif not kept.needed:", "else:", "inputs are lost where the host is full"),
    (OFFLOAD, "        and tensor.untyped_storage().nbytes() == alone\n", "", "a part of larger memory leaves"),
    (OFFLOAD, "        frame = frame.f_back\n", "        pass\n", "inputs saved through a Function stay"),
    (OFFLOAD, "    if not _by_checkpoint():", "    if False:", "what the loss saves leaves"),
    (
        MEMORY,
        "taken, self.free = self.free[:count], self.free[count:]",
        "taken = self.free[:count]",
        "pages in use are taken",
    ),
    (MEMORY, "self.free = sorted(self.free + pages)", "pass", "pages are not used again"),
    (MEMORY, "(self.places[item[1]][0], item[1] - item[0])", "(0, item[1] - item[0])", "a piece runs across slabs"),
    (MEMORY, "min(SLAB, 1 << self.rest.bit_length() >> 1)", "min(SLAB, self.rest)", "a slab is no power of two"),
    (POLICY, "needed=False", "needed=True", "results stay on the GPU where the host is full"),
    (
        TILES,
        "addmm(self.dw, dout.t(), x, self.begun)",
        "addmm(self.dw, dout.t(), x, False)",
        "the last tile's gradient alone",
    ),
    (TILES, "min(start + rows, T))", "min(start + rows, T - 1))", "the last token is in no tile"),
    (
        TILES,
        "            of_gate.add(dgate, rows[tile])",
        "            of_gate.add(dgate, rows[tile])\n            of_gate.add(dgate, rows[tile])",
        "the gradient of a weight is summed twice",
    ),
    (TILES, "dx[tile].addmm_(dup, up)", "torch.mm(dup, up, out=dx[tile])", "the gradient of x lacks the gate's part"),
    (
        TILES,
        "wide = torch.promote_types(weight.dtype, torch.float32)",
        "wide = weight.dtype",
        "sums over tiles are rounded after each tile",
    ),
    (TILES, "self.db += ", "self.db = ", "the last tile's gradient of a bias alone"),
    (TILES, " and p.dtype == torch.float32 for p", " for p", "adapters in half precision are tiled"),
    (TILES, "local and all(map(unhooked, layers))", "local", "hooks run for each tile"),
    (MLP, "pattern in TILEABLE and ", "", "other forms are reported as tiled"),
]
