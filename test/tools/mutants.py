"""Plants one bug at a time in a copy of the tree and runs the tests there: each bug must fail one of them.

    python test/tools/mutants.py [WORD ...]      # only the bugs whose file or reason holds one of the words
    python test/tools/mutants.py --cpu           # as where there is no GPU: in as many processes as there are cores
    python test/tools/mutants.py --workers 32 --limit 600    # processes; seconds for the tests of one bug
    python test/tools/mutants.py --rest          # those that MUTANTS.md does not have as caught

Exit code 1: a planted bug survived. A bug that only a GPU shows is planted where there is one. The fate of each goes to
MUTANTS.md as soon as it is known; those of bugs that were not planted now stay there.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import torch
from attention_backward_mutants import ATTENTION_BACKWARD
from attention_mutants import ATTENTION
from divergence_mutants import CHUNKS, DIVERGENCE, OP, ROWS, SHARDS, TOPK
from divergence_mutants import PARALLEL as DIVERGENCE_PARALLEL
from exact_mutants import EXACT
from experts_mutants import EXPERTS
from generation_mutants import GENERATING
from graphs_mutants import GRAPHS
from hooks_mutants import HOOKS
from hopper_mutants import HOPPER, HOPPER_TESTS
from logprobs_mutants import LOGPROBS
from long_context_mutants import LONG_CONTEXT
from mutants_report import CAUGHT, NEEDS_GPU, SURVIVED, TIMED_OUT, Fate, keep, known
from ops_mutants import OPS
from paged_mutants import PAGED
from parallel_mutants import PARALLEL
from patches_mutants import PATCHES
from planning_mutants import PLANNING
from projections_mutants import PROJECTIONS
from replay_mutants import REPLAY
from rich.progress import track
from router_mutants import ROUTERS
from tensor_mutants import TENSOR
from trl_mutants import TRL
from vocab_mutants import VOCAB

ROOT = Path(__file__).parents[2]
PACKAGE = "liger_like"
FILES = (
    "test/runtime/test_graphs.py",
    "test/runtime/test_graphs_beside.py",
    "test/runtime/test_graphs_replayed.py",
    "test/runtime/test_replay.py",
    "test/runtime/test_replay_ops.py",
    "test/runtime/test_replay_values.py",
    "test/runtime/test_dispatch.py",
    "test/project/test_cli.py",
    "test/ops/test_experts.py",
    "test/ops/test_experts_lora.py",
    "test/patches/test_patches_experts_report.py",
    "test/patches/test_patching_recognition.py",
    "test/patches/test_patches_routers.py",
    "test/patches/test_patches_balance.py",
    "test/patches/test_patches_experts.py",
    "test/patches/test_patches_experts_lora.py",
    "test/patches/test_patches_own_experts.py",
    "test/patches/test_patches_separate_experts.py",
    "test/patches/test_patches_every_expert.py",
    "test/patches/test_patches_attention.py",
    "test/patches/test_patches_hooks.py",
    "test/ops/test_few_rows.py",
    "test/ops/test_glu_linear.py",
    "test/ops/test_tiled_mlp.py",
    "test/patches/test_patches_mlp.py",
    "test/patches/test_patches_norms.py",
    "test/patches/test_patches_projections.py",
    "test/patches/test_patches_qk_norm_rope.py",
    "test/patches/test_patches_unpacked.py",
    "test/patches/test_doctor.py",
    "test/patches/test_patches_lora.py",
    "test/patches/test_rewriting.py",
    "test/parallel/test_parallel_host_memory.py",
    "test/parallel/test_parallel_offload.py",
    "test/parallel/test_parallel_offload_results.py",
    "test/parallel/test_parallel_context.py",
    "test/parallel/test_parallel_context_models.py",
    "test/parallel/test_parallel_groups.py",
    "test/parallel/test_parallel_stages.py",
    "test/parallel/test_parallel_stepping.py",
    "test/ops/test_token_loss.py",
    "test/ops/test_ignored_tokens.py",
    "test/ops/test_chunked_loss.py",
    "test/ops/test_weight_gradient.py",
    "test/ops/test_losses.py",
    "test/ops/test_post_training_losses.py",
    "test/ops/test_logprobs.py",
    "test/ops/test_topk_divergence.py",
    "test/ops/test_divergence.py",
    "test/ops/test_logprob_routes.py",
    "test/ops/test_unstored_logits.py",
    "test/ops/test_norms_and_rope.py",
    "test/ops/test_router.py",
    "test/ops/test_router_logits.py",
    "test/ops/test_moe_modules.py",
    "test/runtime/test_tiles.py",
    "test/attention/test_attention_check.py",
    "test/attention/test_attention_decode.py",
    "test/attention/test_attention_extremes.py",
    "test/attention/test_attention_long.py",
    "test/attention/test_attention_programs.py",
    "test/attention/test_attention_varlen.py",
    "test/attention/test_attention_spans.py",
    "test/attention/test_attention_paged_write.py",
    "test/attention/test_attention_paged.py",
    "test/attention/test_attention_latent.py",
    "test/attention/test_attention.py",
    "test/ops/test_ops.py",
    "test/ops/test_errors.py",
    "test/ops/test_compiled.py",
    "test/attention/test_attention_hopper_backward.py",
    "test/attention/test_attention_hopper_drawn.py",
    "test/attention/test_attention_hopper.py",
    "test/ops/test_experts_hopper.py",
    "test/ops/test_gpu.py",
    "test/patches/test_generation_latents.py",
    "test/patches/test_generation_managers.py",
    "test/patches/test_latents_recognised.py",
    "test/patches/test_generation_caches.py",
    "test/patches/test_generation_graphs.py",
    "test/patches/test_generation_plain_steps.py",
    "test/patches/test_generation.py",
    "test/patches/test_tokens.py",
    "test/patches/test_trl.py",
    "test/patches/test_trl_edges.py",
    "test/patches/test_trl_online.py",
    "test/parallel/test_parallel_trl.py",
    "test/parallel/test_parallel_moe.py",
    "test/parallel/test_parallel_divergence.py",
    "test/parallel/test_parallel_logprobs.py",
    "test/planning/test_planning_allocator.py",
    "test/planning/test_planning_clock.py",
    "test/planning/test_planning_command.py",
    "test/planning/test_planning_savings.py",
    "test/planning/test_planning_replicas.py",
    "test/planning/test_planning_stages.py",
    "test/planning/test_planning_layers.py",
    "test/planning/test_planning.py",
)  # the quickest tests come first


class Mutant(NamedTuple):
    """A bug: ``old`` occurs once in ``file``, which is below liger_like/.

    ``gpu_tests``: where only a GPU shows it, pytest's -k for the tests there that it must fail, instead of the file's.
    """

    file: str
    old: str
    new: str
    why: str
    gpu_tests: str = ""

    def tests(self) -> str:
        """pytest's -k for the tests that it must fail."""
        return self.gpu_tests or TESTS[self.file]


RUNTIME = ("autograd", "blocks", "launcher", "layout", "support")
LINEAR = (
    "linear_cross_entropy or test_losses or test_chunked_loss or test_weight_gradient or few or test_ignored_tokens"
)
# file -> the -k of pytest that selects the tests which must catch the bugs in the file
TESTS = {
    **{f"runtime/{file}.py": "test_ops or test_tiles or compiled_graph" for file in RUNTIME},
    **{file: "test_replay or test_ops or test_tiles or compiled_graph" for file, *_ in REPLAY},
    **dict.fromkeys(("runtime/replay.py", "runtime/recording.py"), "test_replay"),
    **dict.fromkeys(
        ("runtime/autograd.py", "runtime/checks.py", "runtime/registry.py", "runtime/support.py"),
        "dispatch or test_ops or test_tiles or compiled_graph",
    ),
    "runtime/tiles.py": "test_ops or test_tiles",
    "ops/rms_norm.py": "rms_norm or norms",
    "ops/layer_norm.py": "layer_norm or norms",
    "ops/rope.py": "rope or compiled_graph",
    "ops/qk_norm_rope.py": "qk_norm_rope or compiled_graph",
    "ops/glu.py": "glu",
    "ops/few_rows.py": "few_rows or test_patches_projections",
    "ops/glu_linear.py": "glu or gated or few_rows",
    "ops/router.py": "moe_route or test_router",
    "ops/router_logits.py": "router_logits",
    "ops/load_balancing.py": "load_balancing or test_router",
    "nn.py": "test_moe_modules or modules",
    "cli.py": "test_cli",
    "losses.py": "test_post_training_losses",
    "_loss_checks.py": "test_post_training_losses",
    TOPK: "test_topk_divergence",
    ROWS: "test_divergence",
    OP: "test_divergence or other_sizes",
    CHUNKS: "test_divergence or test_parallel_divergence or test_unstored_logits",
    **dict.fromkeys((SHARDS, DIVERGENCE_PARALLEL), "test_parallel_divergence"),
    "ops/losses/rows.py": "cross_entropy or test_losses or test_errors or test_logprobs or few_tokens",
    "ops/losses/row_kernels.py": "cross_entropy or test_losses or logprob or test_unstored_logits",
    "ops/losses/cross_entropy.py": "cross_entropy or test_losses",
    "ops/losses/linear_cross_entropy.py": LINEAR,
    "ops/losses/operands.py": LINEAR,
    "ops/losses/gradients.py": LINEAR,
    "_token_losses.py": "test_post_training_losses or test_token_loss",
    "ops/losses/linear_logprobs.py": "logprob",
    "ops/losses/linear_token_loss.py": "token_loss",
    "ops/losses/steps.py": "test_losses or test_chunked_loss or test_weight_gradient or logprob or token_loss",
    "ops/losses/products.py": "test_losses or test_chunked_loss or test_weight_gradient or logprob",
    "ops/losses/chunks.py": f"{LINEAR} or logprob or test_token_loss or count or last_chunk or test_unstored_logits",
    "ops/losses/slices.py": f"{LINEAR} or logprob or test_unstored_logits",
    "ops/losses/units.py": "test_losses",
    "ops/losses/unstored.py": "test_unstored_logits",
    "ops/losses/exponentials.py": "test_unstored_logits",
    "ops/losses/last_chunk.py": LINEAR,
    "ops/losses/dw_sum/__init__.py": "test_weight_gradient",
    "ops/losses/dw_sum/portable.py": "test_weight_gradient",
    **{file: "attention or compiled_graph" for file, *_ in (*ATTENTION, *ATTENTION_BACKWARD)},
    **{file: "paged or attention_latent" for file, *_ in PAGED},
    **{file: "test_generation" for file, *_ in GENERATING},
    "patches/decode_graphs.py": "test_generation_graphs or plain_steps",
    **{file: "patches" for file, *_ in PATCHES},
    "graphs.py": "test_graphs_beside or test_graphs_replayed or only_some_micro_batches or a_part_of_itself",
    **dict.fromkeys(
        ("patches/own_experts.py", "patches/separate_experts.py"), "experts or test_patches_every_expert or hooks"
    ),
    "patches/attention.py": (
        "default_device or test_generation or spans_of_documents or test_patches_unpacked or read_earlier_tokens"
    ),
    "patches/unpacked.py": "test_patches_unpacked",
    "patches/attention_source.py": "test_patches_unpacked or joins_its_masks or get_a_bias",
    "patches/routers.py": "test_patches_routers",
    "patches/balance.py": "test_patches_balance or what_one_process_does or nothing_has_gradients",
    **{file: "test_tokens or trl" for file, *_ in TRL},
    "patches/lm_head.py": "test_patches_balance or test_tokens or trl or breaks_no_compiled_graph",
    "patches/forms.py": "recognition",
    "patches/heads.py": "test_patches_projections or test_patches_hooks",
    "patches/projections.py": "test_patches_projections",
    "patches/rewriting.py": "test_rewriting",
    "patches/norm.py": "test_patches_norms",
    "patches/rms_norm.py": "test_patches_norms or guards_no_class or after_compiling",
    **dict.fromkeys(("doctor/__init__.py", "doctor/tiny.py"), "test_doctor"),
    **{file: "test_parallel_moe" for file, *_ in PARALLEL},
    **{
        f"parallel/{file}.py": "(test_parallel_offload or test_parallel_host_memory) and not fsdp2"
        for file in ("offload", "host_memory", "checkpoint")
    },
    "parallel/stages.py": "test_planning_stages and not holds_what or test_parallel_stages",
    **dict.fromkeys(("parallel/tensor_parallel.py", "parallel/tokens.py"), "test_parallel_stages"),
    "parallel/context_parallel.py": "test_one_process or read_earlier or what_one_process_does or see_other_tokens",
    "parallel/_spread_attention.py": "test_one_process",
    "planning/_stages.py": "test_planning_stages and not holds_what or hold_what_is_planned",
    "planning/_clock.py": "test_planning_clock or send_all_but",
    "planning/_trace.py": "test_planning_clock",
    "planning/_allocator.py": "test_planning_allocator",
    "planning/_command.py": "doctor_s_step or given_once or one_line_and",
    "planning/_models.py": "configs_that_are_refused or adapters_of_a_folder or holds_what_the_trace or errors_later",
    "planning/_replicas.py": "what_is_sent or buckets_are or hold_what_is_planned",
    "planning/_stand_ins.py": "test_planning_clock or torch_does_not_log",
    "planning/_layers.py": "test_planning_layers or no_gpus_share",
    "planning/_prediction.py": "time_of_a_pipeline",
    "planning/_report.py": "the_table_and or words_that_start or the_example_takes or share_a_line or commands_that",
    "planning/_search.py": "test_planning_command and not errors or savings_are_tried",
    "planning/_settings.py": "settings_that_contradict",
    "planning/_tracer.py": "states_are or moments_belong or peak_of_a_step or adapted_layers_run or at_least or host_s",
    "parallel/groups.py": "test_parallel_groups and not fsdp2",
    "parallel/stepping.py": "test_parallel_stepping and not fsdp2",
    "ops/tiled_mlp.py": "test_tiled_mlp",
    "patches/glu_mlp.py": "test_patches_mlp",
    "patches/lora.py": "test_patches_lora",
    "ops/losses/vocab_shards.py": "test_parallel_logprobs or test_parallel_divergence",
    "parallel/vocab_parallel.py": "test_parallel_logprobs",
    **{file: "experts and not patches" for file, *_ in EXPERTS},
    "runtime/blocks.py": "test_ops or test_tiles or compiled_graph or test_experts",
    "ops/attention/choice.py": "attention",
    "ops/attention/softmax.py": "attention or compiled_graph",
    "ops/attention/portable/bias.py": "attention and (bias or parts or position) or compiled_graph",
    "ops/attention/tiles.py": "attention_programs or attention_long or attention_decode",
    "ops/attention/hopper/buffers.py": "descriptors or products_take",
    "ops/attention/hopper/forward.py": "by_a_counter",
    "ops/attention/hopper/products.py": "parts_in_registers",
}
ON_HOPPER = [(file, *bug, HOPPER_TESTS[file]) for file, *bug in HOPPER]
MUTANTS = [
    Mutant(*bug)
    for bug in (
        *OPS,
        *LOGPROBS,
        *DIVERGENCE,
        *ROUTERS,
        *EXACT,
        *REPLAY,
        *EXPERTS,
        *ATTENTION,
        *ATTENTION_BACKWARD,
        *PAGED,
        *PATCHES,
        *GENERATING,
        *GRAPHS,
        *PARALLEL,
        *LONG_CONTEXT,
        *PLANNING,
        *PROJECTIONS,
        *HOOKS,
        *VOCAB,
        *TENSOR,
        *TRL,
        *ON_HOPPER,
    )
]


def plant(mutant: Mutant | None, folder: Path) -> None:
    """Copy the tree to ``folder`` with the bug in it."""
    shutil.copytree(
        ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
    )
    if mutant is None:
        return
    path = folder / PACKAGE / mutant.file
    source = path.read_text()
    if source.count(mutant.old) != 1:
        sys.exit(f"{mutant.file}: {mutant.old!r} occurs {source.count(mutant.old)} times, not once")
    path.write_text(source.replace(mutant.old, mutant.new))


def first_failure(tree: Path, words: str, limit: float, cpu: bool) -> str:
    """Run the tests that pytest's -k finds by ``words``, and return the first that fails, or nothing.

    ``cpu``: without a GPU, so that kernels are interpreted; what is written goes beside the tree, where no other tests
    write. On a GPU one bug follows the other, and what the compilers keep serves the next.
    """
    command = [sys.executable, "-m", "pytest", "-x", "--tb=no", "-p", "no:cacheprovider", *FILES, "-k", words]
    path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    if cpu:
        own = {"TMPDIR": str(tree.parent), "TRITON_CACHE_DIR": str(tree.parent / "triton")}
        env |= own | {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=limit)
    if run.returncode < 0:
        return "the process crashed"
    if run.returncode > 1:
        sys.exit(f"pytest could not run\n{run.stdout}{run.stderr}")
    return next(
        (line.split("::")[1].split(" - ")[0] for line in run.stdout.splitlines() if line.startswith("FAILED")), ""
    )


def hunt(mutant: Mutant | None, words: str, limit: float, cpu: bool) -> Fate:
    """The fate of a bug; without one, of the tests themselves."""
    if mutant and mutant.gpu_tests and cpu:
        return Fate(NEEDS_GPU)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        plant(mutant, tree)
        try:
            test = first_failure(tree, words, limit, cpu)
        except subprocess.TimeoutExpired:
            return Fate(TIMED_OUT)
    return Fate(CAUGHT, test) if test else Fate(SURVIVED)


def main() -> None:
    """Plant every bug that the command line names, and exit with 1 if one survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", default=[""])
    parser.add_argument("--cpu", action="store_true", default=not torch.cuda.is_available())
    parser.add_argument("--workers", type=int)
    parser.add_argument("--limit", type=float, default=1800, help="seconds")
    parser.add_argument("--rest", action="store_true", help="those that MUTANTS.md does not have as caught")
    args = parser.parse_args()
    caught = {key for key, fate in known().items() if args.rest and fate.fate == CAUGHT}
    mutants = [m for m in MUTANTS if any(word in m.file or word in m.why for word in args.words)]
    mutants = [m for m in mutants if (m.file, m.why) not in caught]
    tests = {m.tests(): None for m in mutants if not (m.gpu_tests and args.cpu)}
    workers = args.workers or (os.cpu_count() if args.cpu else 1)
    fates = []
    with ThreadPoolExecutor(workers) as pool:
        whole = {pool.submit(hunt, None, words, args.limit, args.cpu): words for words in tests}
        slowest_first = reversed(mutants)
        hunts = {pool.submit(hunt, m, m.tests(), args.limit, args.cpu): m for m in slowest_first}
        try:
            for future in track(as_completed([*whole, *hunts]), "planting", len(whole) + len(hunts)):
                fate = future.result()
                if mutant := hunts.get(future):
                    keep((mutant.file, mutant.why), fate, [(m.file, m.why) for m in MUTANTS])
                    fates.append(fate.fate)
                    print(mutant.file, mutant.why, *fate, sep=", ", flush=True)
                elif fate.fate == CAUGHT:
                    sys.exit(f"{fate.by} fails without a planted bug")
        finally:
            pool.shutdown(cancel_futures=True)
    print(*(f"{fates.count(fate)} {fate}" for fate in sorted({*fates})), sep=", ")
    sys.exit(SURVIVED in fates)


if __name__ == "__main__":
    main()
