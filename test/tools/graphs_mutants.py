"""Bugs, as in mutants.py, in steps as CUDA graphs and in the masks of documents, which every layer makes."""

BESIDE, MASKS = "graphs.py", "patches/attention.py"

GRAPHS = [
    (
        BESIDE,
        "(p.data_ptr(), p.shape, p.requires_grad)",
        "(p.data_ptr(), p.requires_grad)",
        "a part of a weight is the weight",
    ),
    (
        BESIDE,
        "            kept[p], p.grad = p.grad, None",
        "            kept[p], p.grad = None, None",
        "memory is read after it is freed",
    ),
    (
        BESIDE,
        "            self._beside.wait_stream(torch.cuda.current_stream())\n            with",
        "            with",
        "an update does not wait for its gradients",
    ),
    (
        BESIDE,
        "            torch.cuda.current_stream().wait_stream(self._beside)\n        if late",
        "            pass\n        if late",
        "the step ends before its updates",
    ),
    (
        BESIDE,
        "            with torch.cuda.stream(self._beside):\n",
        "            if True:\n",
        "updates run after products, not beside them",
    ),
    (
        BESIDE,
        "            if sum(p.numel() for p in part) >= PART:",
        "            if False:",
        "updates wait for the whole backward",
    ),
    (
        BESIDE,
        "            loss = self._backward(*args, **kwargs)\n            update()",
        "            loss = self._backward(*args, **kwargs)",
        "the last weights are not updated",
    ),
    (
        BESIDE,
        "            torch.autograd.graph.increment_version(list(part))",
        "            list(part)",
        "a backward reads an updated weight",
    ),
    (
        BESIDE,
        "            elif ordinary and p in fresh:",
        "            elif False:",
        "a weight without a gradient is updated by zeros",
    ),
    (BESIDE, "            if p in kept:", "            if False:", "a weight is updated by each part of its gradient"),
    (
        BESIDE,
        "        hooks.append(register_module_forward_pre_hook(look))\n",
        "",
        "a checkpoint reads an updated weight",
    ),
    (BESIDE, "                hook.remove()", "                pass", "updates go on in later backwards"),
    (
        BESIDE,
        "        self._beside.wait_stream(torch.cuda.current_stream())  #",
        "        #",
        "an error before the first update breaks the capture",
    ),
    (
        BESIDE,
        "work == self._step and self.max_norm is None and _updates",
        "work == self._step and _updates",
        "parts of the weights are clipped apart",
    ),
    (
        BESIDE,
        "self.max_norm is None and _updates_separately(self.optimizer)",
        "self.max_norm is None",
        "any optimizer is run in parts",
    ),
    (
        BESIDE,
        "    hooked = hooked or _global_optimizer_pre_hooks or _global_optimizer_post_hooks\n",
        "",
        "hooks of all optimizers hear of parts",
    ),
    (BESIDE, " or optimizer._optimizer_step_post_hooks", "", "a hook after an update hears of parts"),
    (BESIDE, "optimizer._optimizer_step_pre_hooks or ", "", "a hook before an update hears of parts"),
    (
        BESIDE,
        "type(optimizer) in SEPARATE",
        "isinstance(optimizer, SEPARATE)",
        "an optimizer of unknown code is run in parts",
    ),
    (BESIDE, " and not replaced", "", "a step that was replaced is run in parts"),
    (
        BESIDE,
        ' and not getattr(optimizer.step, "_wrapped_by_lr_sched", False)',
        "",
        "a scheduler keeps updates after the backward",
    ),
    (
        BESIDE,
        "                return self._capture(self._step_beside, args, kwargs)\n            self._drop_gradients()\n",
        "                return self._capture(self._step_beside, args, kwargs)\n",
        "a failed capture leaves gradients",
    ),
    (BESIDE, "self._launched[kind] += self._setup == setup", "self._launched[kind] += 1", "a capture makes state"),
    (
        BESIDE,
        "            if self._launched[kind] < LAUNCHES:\n",
        "            if self._launched[kind] < LAUNCHES:\n                self._launched[kind] += 1\n",
        "a call that raised counts, and the capture makes gradients",
    ),
    (MASKS, "cu_q[1:], right=True)", "cu_q[1:])", "the first row of a document belongs to the one before"),
    (
        MASKS,
        "torch.cat((cu_k, cu_k[-1:]))",
        "torch.cat((cu_k, cu_k[:1]))",
        "rows after the last document have a span that ends at 0",
    ),
    (
        MASKS,
        "        ends = ends - key.shape[2] *",
        "        ends = ends - query.shape[2] *",
        "keys of a second row are counted as queries",
    ),
]
