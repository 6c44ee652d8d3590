"""The integration with TRL's trainers."""

from tests.mutants.mutant import of_file

FOLDER = "tests/trl_integration/"
EVERY = FOLDER + "test_every_trainer.py"
BAD = FOLDER + "test_bad_trainers.py"
BESIDE = FOLDER + "test_beside.py"
OFFLOADING = "test_activation_offloading_leaves_the_losss_own_tensors"
BY_NAME = "test_a_trainer_that_is_not_covered_is_refused_by_name"
MEANING = "test_smoothing_that_has_no_meaning_is_refused"
FUSED = FOLDER + "test_fused_flag.py"
EXISTING, SFT = FOLDER + "test_existing.py", FOLDER + "test_sft.py"
PREFERENCE = FOLDER + "test_log_prob_trainers.py"
ADAPTER = "trl_integration/adapter.py"

MUTANTS = [
    *of_file(
        "trl_integration/layers.py",
        FUSED,
        ("teachers keep their layers", "MODELS", '"ref_model", "teacher_model"', '"ref_model"'),
        ("layers stay fused", "_fuse", "undo.callback(fused)", "pass"),
        ("the line stays", "_fuse", "undo.callback(trainer.remove_callback, line)", "pass"),
        ("a fused model is refused", "_fuse", "withdraw(module, KEY)", "pass"),
        ("beside Liger's layers", "_fuse", "not liger", "True"),
        ("the loss stays on", "switch_on", "undo.callback(enable(", "(enable("),
        ("two lines", "FirstStep.on_step_end", ' and "chunked_loss" not in vars(self.trainer)', ""),
        prefix="fused flag: ",
    ),
    *of_file(
        "trl_integration/pairs.py",
        FUSED,
        (
            "ignored without a word",
            "ChunkedLossConfigMixin.place_model_on_device",
            '("use_chunked_loss", "use_fused_layers")',
            '("use_chunked_loss",)',
        ),
        (
            "layers bring the loss",
            "ChunkedLossTrainerMixin.__init__",
            "self.adapter if config.use_chunked_loss else None",
            "self.adapter",
        ),
        prefix="fused flag: ",
    ),
    *of_file(
        ADAPTER,
        f"{EVERY}::test_a_loss_that_is_computed_elsewhere_is_noticed[ORPO]",
        ("an unused loss passes", "ChunkedLoss._end", '[] if computed else ["the chunked loss"]', "[]"),
        ("an unused seam passes", "ChunkedLoss._end", "place not in self.used", "place in self.used"),
        ("steps are never checked", "ChunkedLoss._train", 'self._end("train", loss, self.trained)', "pass"),
        prefix="trainers: ",
    ),
    *of_file(
        ADAPTER,
        f"{EVERY}::test_flag_off_and_apply_to[ORPO] {EVERY}::test_under_lora[SFT]",
        ("no line in the log", "ChunkedLoss._end", "logger.info(self.describe())", "pass"),
        ("methods stay exchanged", "enable", "undo.callback(trainer.__dict__.pop, name, None)", "pass"),
        ("heads stay", "enable", "undo.callback(detach)", "pass"),
        prefix="trainers: ",
    ),
    *of_file(
        ADAPTER,
        BAD,
        ("checks are skipped", "enable", "check(trainer)", "pass"),
        ("encoder-decoders", "any_loss", "not trainer.model.config.is_encoder_decoder", "True"),
        ("DataParallel", "any_loss", "args.n_gpu <= 1", "True"),
        ("a loss function of logits", "any_loss", "own is None", "True"),
        ("own methods are dropped", "ChunkedLoss.methods", "expect(not own,", "expect(True,"),
        ("moved methods", "ChunkedLoss.methods", "if stock is None:", "if False:"),
        prefix="trainers: ",
    ),
    *of_file(
        ADAPTER,
        f"{BESIDE}::test_liger_s_layers_without_its_loss {BESIDE}::{OFFLOADING}",
        ("Liger's loss", "any_loss", "expect(not liger,", "expect(True,"),
        ("offloaded gradients", "ChunkedLoss.saving", "if not getattr", "if True or not getattr"),
        prefix="trainers: ",
    ),
    *of_file(
        ADAPTER,
        f"{BESIDE}::test_evaluation_and_predictions[GKD]",
        ("predictions without logits", "ChunkedLoss._evaluate", "self.adapter.predicts and logits", "False"),
        prefix="trainers: ",
    ),
    *of_file(
        ADAPTER,
        FOLDER + "test_online_trainers.py -k precision",
        (
            "a reference without autocast",
            "ChunkedLoss.attach",
            'hasattr(model, "_original_forward")',
            "False",
        ),
        prefix="trainers: ",
    ),
    *of_file(
        "trl_integration/apply.py",
        f"{EXISTING}::test_what_apply_to_does_not_take {EXISTING}::{BY_NAME}",
        ("apply_to twice", "apply_to", "not (wanted and name in trainer.__dict__)", "True"),
        ("smoothing in a plain trainer", "no_smoothing", "not found", "True"),
        ("any TRL trainer is covered", "adapter_of", "name in ADAPTERS", "True"),
        prefix="trainers: ",
    ),
    *of_file(
        "trl_integration/sft.py",
        f"{SFT}::test_gradient_accumulation {SFT}::test_label_smoothing {SFT}::{MEANING}",
        ("dft twice", "compute_loss", 'loss_type="nll"', "loss_type=trainer.args.loss_type"),
        ("smoothing twice", "compute_loss", "label_smoother=None", "label_smoother=trainer.label_smoother"),
        ("smoothing dropped", "heads", "label_smoothing=args.label_smoothing_factor,", ""),
        ("dft smoothed", "smoothing_is_defined", 'args.loss_type != "dft" or not smoothing', "True"),
        prefix="trainers: ",
    ),
    *of_file(
        "trl_integration/preference.py",
        f"{PREFERENCE}::test_orpo {PREFERENCE}::test_cpo {PREFERENCE}::test_orpo_with_a_router_loss",
        (
            "ORPO's NLL without prompts",
            "pairs_forward",
            "torch.where(attention == 1, ids, -100)",
            "completions",
        ),
        ("sums for means", "pairs_forward", "logps = logps / completions.sum(-1)", "pass"),
        ("router loss dropped", "pairs_forward", "(*found, out.aux_loss)", "(*found, 0 * out.aux_loss)"),
        prefix="trainers: ",
    ),
    *of_file(
        "trl_integration/distillation.py",
        FOLDER + "test_distillation_trainers.py",
        (
            "GKD unshifted",
            "gkd_heads",
            "torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)",
            "labels",
        ),
        ("items forgotten", "gkd_loss", 'getattr(given, "num_items_in_batch", None)', "None"),
        ("no temperature", "chunked_divergence", "temperature=given.temperature,", ""),
        prefix="trainers: ",
    ),
    *of_file(
        "trl_integration/per_token.py",
        f"{PREFERENCE}::test_grpo",
        ("GRPO without temperature", "per_token_score", "temperature=temperature,", ""),
        ("entropy without gradient", "per_token_score", "(differentiable or ", "("),
        prefix="trainers: ",
    ),
]
