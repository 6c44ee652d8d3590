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
CONTRACTS = FOLDER + "test_contracts_distillation.py"
ADAPTER, HEAD = "trl_integration/adapter.py", "trl_integration/head.py"

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
        ("heads stay", "enable", "undo.callback(attach(", "(attach("),
        prefix="trainers: ",
    ),
    *of_file(
        ADAPTER,
        BAD,
        ("checks are skipped", "enable", "check(trainer)", "pass"),
        ("encoder-decoders", "any_loss", "not trainer.model.config.is_encoder_decoder", "True"),
        ("DataParallel", "any_loss", "args.n_gpu <= 1", "True"),
        ("a loss function of logits", "any_loss", "not callable(own)", "True"),
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
        "trl_integration/versions.py",
        FOLDER + "test_versions.py",
        ("any version", "require_supported", "expect(fits,", "expect(True,"),
        prefix="trainers: ",
    ),
    *of_file(
        "engine/passes.py",
        f"{EVERY}::test_under_lora[SFT] {EVERY}::test_under_lora[DPO]",
        ("frozen heads cost as much", "plan_for", "(needs.hidden or needs.layers) + needs.weight", "2"),
        prefix="trainers: ",
    ),
    *of_file(
        HEAD,
        FOLDER + "test_online_trainers.py -k precision",
        ("a reference without autocast", "scored", "if prepared else", "if False else"),
        prefix="trainers: ",
    ),
    *of_file(
        HEAD,
        FOLDER + "test_teacher_distillation_trainers.py -k autocast",
        ("picks without autocast", "picking", "chunked.trainer.accelerator.autocast()", "nullcontext()"),
        prefix="trainers: ",
    ),
    *of_file(
        HEAD,
        f"{CONTRACTS}::test_picked_logits_do_what_trl_does_and_no_more",
        (
            "a log-softmax of another dimension",
            "PickedLogits.log_softmax",
            "if dim == -1 else",
            "if True else",
        ),
        ("divided after log_softmax", "PickedLogits.__mul__", "if self.normalized else", "if False else"),
        ("logits for log-probabilities", "PickedLogits.gather", "not self.normalized or", ""),
        ("a mean without its gradient", "PickedLogits.mean", "or learns", ""),
        prefix="trainers: ",
    ),
    *of_file(
        HEAD,
        FOLDER + "test_distributed.py -k iwopd",
        ("DDP finds no head", "_picked_forward", "lambda x: x.view_as(x)", "lambda x: x"),
        prefix="trainers: ",
    ),
    *of_file(
        "trl_integration/apply.py",
        f"{EXISTING}::test_what_apply_to_does_not_take {EXISTING}::{BY_NAME}",
        ("apply_to of a model", "apply_to", "isinstance(trainer, transformers.Trainer)", "True"),
        ("apply_to twice", "apply_to", "not (wanted and name in trainer.__dict__)", "True"),
        ("smoothing in a plain trainer", "no_smoothing", "not found", "True"),
        ("any TRL trainer is covered", "adapter_of", "name in ADAPTERS", "True"),
        prefix="trainers: ",
    ),
    *of_file(
        "trl_integration/per_token.py",
        f"{SFT}::test_gradient_accumulation {SFT}::test_label_smoothing {SFT}::{MEANING}",
        ("dft twice", "plain_loss", 'loss_type="nll"', "loss_type=trainer.args.loss_type"),
        ("smoothing twice", "plain_loss", "label_smoother=None", "label_smoother=trainer.label_smoother"),
        ("smoothing dropped", "summed_score", "label_smoothing=args.label_smoothing_factor,", ""),
        ("dft smoothed", "smoothing_is_defined", 'args.loss_type != "dft" or not smoothing', "True"),
        prefix="trainers: ",
    ),
    *of_file(
        "trl_integration/deferred.py",
        f"{PREFERENCE}::test_orpo {PREFERENCE}::test_cpo",
        ("prompts count", "sequence_logps", "given.labels[:, 1:]", "given.labels[:, 1:].clamp(min=0)"),
        ("sums for means", "sequence_logps", "if given.average_log_prob else", "if False else"),
        prefix="trainers: ",
    ),
    *of_file(
        HEAD,
        f"{PREFERENCE}::test_orpo_with_a_router_loss",
        ("router loss dropped", "_picked_forward", 'getattr(out, "aux_loss", None)', "None"),
        prefix="trainers: ",
    ),
    *of_file(
        "trl_integration/deferred.py",
        FOLDER + "test_distillation_trainers.py -k gkd",
        ("items forgotten", "chunked_jsd", "given.num_items_in_batch", "None"),
        prefix="trainers: ",
    ),
    *of_file(
        "trl_integration/deferred.py",
        FOLDER + "test_teacher_distillation_trainers.py -k gold",
        (
            "a student without temperature",
            "chunked_jsd",
            "given.student_logits / given.temperature",
            "given.student_logits",
        ),
        prefix="trainers: ",
    ),
    *of_file(
        "trl_integration/deferred.py",
        FOLDER + "test_self_distillation_trainers.py -k test_sdft",
        ("tokens that do not count", "counted_tokens", "found.loss_mask.bool()", "found.loss_mask >= 0"),
        ("every id for the best", "token_divergences", 'hasattr(given, "distillation_topk")', "False"),
        prefix="trainers: ",
    ),
    *of_file(
        "trl_integration/distillation.py",
        FOLDER + "test_distillation_trainers.py",
        ("no temperature", "chunked_divergence", "temperature=given.temperature", "temperature=1.0"),
        prefix="trainers: ",
    ),
    *of_file(
        "trl_integration/per_token.py",
        f"{PREFERENCE}::test_grpo",
        ("GRPO without temperature", "per_token_score", 'temperature=getattr(args, "temperature", 1.0),', ""),
        ("entropy without gradient", "per_token_score", 'bool(getattr(args, "entropy_coef", 0.0)) or ', ""),
        prefix="trainers: ",
    ),
]
