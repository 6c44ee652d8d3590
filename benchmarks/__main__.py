"""`python -m benchmarks`: the commands, in the order of `--help`, and their functions. Each measures one
thing, prints it, and writes it down as JSON."""

import typer

from benchmarks.layers import commands as layers
from benchmarks.losses import commands as losses
from benchmarks.models import commands as models
from benchmarks.pages import commands as pages
from benchmarks.proof import commands as proof
from benchmarks.regressions import commands as regressions

COMMANDS = {
    "ce": losses.ce,
    "ce-portable": losses.ce_portable,
    "distillation": losses.distillation,
    "speculators": losses.speculators,
    "preference": losses.preference,
    "policy": losses.policy,
    "orpo-batch": losses.orpo_batch,
    "dpo-length": losses.dpo_length,
    "distillation-length": losses.distillation_length,
    "medusa": losses.medusa,
    "tensor-parallel": losses.tensor_parallel,
    "topk": losses.topk,
    "sampler": losses.sampler,
    "given-logits": losses.of_given_logits,
    "rounding": losses.rounding,
    "compare": regressions.compare_two_trees,
    "counts": regressions.counts,
    "small": losses.small_calls,
    "profile": regressions.profile,
    "cpu": losses.cpu,
    "sweep": losses.sweep,
    "gemm": losses.gemm,
    "medians": pages.median_of_runs,
    "numbers": pages.list_numbers,
    "plot": pages.plot,
    "trl": models.trl,
    "step": models.whole_steps,
    "activations": models.activation_budgets_of_a_small_model,
    "usecase": models.whole_use_case,
    "recipes": models.recipes_of_steps,
    "lora": models.lora_steps,
    "fsdp": models.fully_sharded,
    "layers": layers.layer_operators,
    "layer-tiles": layers.tiles_of_layers,
    "convergence": proof.proof_on_trained_models,
    "convergence-data": proof.data_of_the_proof,
}

app = typer.Typer(help="Measure logitless beside its peers.", add_completion=False, no_args_is_help=True)
for name, command in COMMANDS.items():
    app.command(name)(command)

if __name__ == "__main__":
    app()
