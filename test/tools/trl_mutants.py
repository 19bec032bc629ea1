"""Bugs, as in mutants.py, in the hooks of TRL and in the log-probabilities of patched models: file, old, new, why."""

CODE, HEAD = "patches/trl_code.py", "patches/trl_head.py"
PAIRS, TRAINERS = "patches/trl_pairs.py", "patches/trl_trainers.py"
FOREIGN, LM_HEAD, TRAINER = "patches/foreign.py", "patches/lm_head.py", "trainer.py"

TRL = [
    (HEAD, "weight is head.weight", "True", "a copy of a model runs on the head of the model it was made from"),
    (HEAD, "copied.function.__wrapped__ = ", "unused = ", "TRL's function keeps the patched forward it wraps"),
    (HEAD, "(not patched or obstacle(head))", "False", "an adapter that came after patching is left out"),
    (HEAD, " and not hook_in(head)", "", "a hook of the head sees no logits but their numbers"),
    (
        CODE,
        'is_of_trl(function) and "fused_lm_head" in function.__code__.co_varnames',
        "is_of_trl(function)",
        "another function of TRL is taken for its head",
    ),
    (CODE, "if found != PARAMETERS:", "if not found:", "a function of other arguments is taken for known"),
    (CODE, "if not difference <= 1e-5:", "if difference < 0:", "a function of other results is taken for known"),
    (CODE, "with torch.inference_mode(False),", "with torch.enable_grad(),", "inference mode refuses the head"),
    (CODE, ', "dtype": torch.float32', "", "a default dtype of bf16 refuses the head"),
    (CODE, "weight, bias = operands(x, weight, bias)", "weight, bias = weight, bias", "operands of two dtypes"),
    (CODE, 'grad_placements=[Partial("avg")] * t.device_mesh.ndim', "", "a shard of a head learns from one process"),
    (CODE, 'Partial("avg")', "Partial()", "the gradient of a sharded head is the sum over processes"),
    (HEAD, "        weight, bias = gathered(weight, bias)\n", "", "a sharded head with a hook is not gathered"),
    (HEAD, '        "DTensor": (),  # isinstance(weight, ()) is False\n', "", "TRL gathers a sharded head itself"),
    (FOREIGN, "cell.cell_contents = bound", "pass", "after unpatch TRL calls the patched class"),
    (FOREIGN, "if links and not kept else", "if links else", "a forward below TRL's is taken for the class's"),
    (
        LM_HEAD,
        'hooked(self, value) if name == "forward" else value',
        "value",
        "a head that TRL sets later keeps TRL's op",
    ),
    (LM_HEAD, "else each[..., :-1] for", "else each[..., 1:] for", "numbers of the tokens before"),
    (LM_HEAD, "labels if shifted else", "labels if not shifted else", "labels are shifted where they are"),
    (PAIRS, 'if self.loss_type in ("ipo", "simpo"):', "if True:", "CPO takes the mean over tokens"),
    (PAIRS, "attended[:chosen, 1:] == 1", "counted[:chosen]", "ORPO's likelihood leaves the prompt out"),
    (PAIRS, "mean_logit[:chosen, :-1]", "mean_logit[:chosen]", "ORPO's mean of logits counts the last position"),
    (
        TRAINERS,
        "with torch.inference_mode(False),",
        "with torch.enable_grad(),",
        "inference mode refuses the divergence",
    ),
    (TRAINERS, '"super" not in code.co_names', "False", "a method that is overridden is taken for called"),
    (TRAINERS, '"super" not in code.co_names', "True", "a method that is called by super is not seen"),
    (TRAINERS, "compares and trainer.teacher_model is not None", "compares", "a teacher on a server has no head"),
    (TRAINERS, "own = gathered(student_lm", "own = (student_lm", "a student's sharded head is not gathered"),
    (TRAINERS, "others = gathered(teacher_lm", "others = (teacher_lm", "a teacher's sharded head is not gathered"),
    (TRAINERS, "beta=beta", "beta=0.0", "any divergence is taken for the forward KL"),
    (TRAINER, '== "nll"', '== "dft"', "DFT expects equal gradients"),
    (TRAINER, '("model", "ref_model", "teacher_model")', '("model",)', "the reference is not patched"),
    (TRAINER, "        return None", "        return self", "a callback without a Trainer raises"),
    (TRAINER, "if name not in HEAD_OPTIONS", "", "a callback without a Trainer passes unknown options"),
    (TRAINER, "vars(self.trainer).pop(name, None)", "pass", "unpatch leaves the method of the trainer"),
    (TRAINER, "        report.unpatch()\n", "", "strict=True raises and leaves the models patched"),
]
