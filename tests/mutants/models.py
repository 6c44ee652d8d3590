"""Models of transformers: exchanged forward passes, deferred logits, probes, and heads as modules."""

from tests.mutants.mutant import of_file

TEST_EVERY = "tests/models/test_every_model.py -k test_head"
TEST_EXCHANGE = "tests/models/test_exchange.py"
TEST_HEADS = "tests/models/test_head_modules.py"
TEST_PATCH = "tests/models/test_patch.py"
HEAD_VIEW = "engine/head_view.py"
EXCHANGE = "models/exchange.py"
LOGITS = "models/logits.py"
PATCH = "models/patch.py"

MUTANTS = [
    *of_file(
        HEAD_VIEW,
        "tests/trl_integration/test_sharded.py",
        ("views under FSDP2", "unviewed", "x.clone()", "x"),
        prefix="models: ",
    ),
    *of_file(
        EXCHANGE,
        TEST_PATCH,
        ("an instance's forward is lost", "exchange", 'module.__dict__.pop("forward", None)', "None"),
        ("accelerate takes ours off", "_exchanged_class", "del exchanged_forward.__wrapped__", "pass"),
        prefix="models: ",
    ),
    *of_file(
        EXCHANGE,
        TEST_EXCHANGE,
        ("a copy runs the original", "_deepcopy", "copy.deepcopy(self.__dict__, memo)", "self.__dict__"),
        ("a file needs us", "_reduce_as_stock", "(_stock(type(self)),)", "(type(self),)"),
        ("an undone exchange goes on", "_exchanged_class", "if not entry.live:", "if False:"),
        prefix="models: ",
    ),
    *of_file(
        LOGITS,
        TEST_EVERY,
        ("a scale is dropped", "DeferredLogits.__mul__", "gain=self.gain * factor", "gain=self.gain"),
        ("a division multiplies", "DeferredLogits.__truediv__", "1 / divisor", "divisor"),
        ("a cap stays 1", "DeferredLogits.__mul__", "self.cap * factor", "self.cap"),
        ("padding counts", "DeferredLogits.view_now", "view = view.first(self.rows)", "pass"),
        prefix="models: ",
    ),
    *of_file(
        LOGITS,
        TEST_PATCH,
        ("positions are not sliced", "DeferredLogits.__getitem__", "self.hidden[tuple(rows)]", "self.hidden"),
        ("classes in another dimension", "DeferredLogits.cross_entropy", "self.dim() != 2 or", ""),
        ("flattened into one row", "DeferredLogits.view", "len(shape) < 2 or", ""),
        ("the head stays deferred", "deferred", "deferral.asked = False", "pass"),
        ("a head that was not called", "deferred", 'deferral.seen, "model"', 'True, "model"'),
        ("replicas share", "deferred", "not replica", "True"),
        ("compiled unchecked", "deferred", 'known, "model"', 'True, "model"'),
        ("the head is never checked", "_answer", "deferral.checked = True", "pass"),
        ("read outside the head's call", "DeferredLogits.computed", "if partitioned else", "if False else"),
        ("smoothing is dropped", "DeferredLogits.cross_entropy", "label_smoothing}", "0.0}"),
        (
            "an adapter inside stays exchanged",
            "undeferred",
            "model.modules()",
            "[model.get_output_embeddings()]",
        ),
        prefix="models: ",
    ),
    *of_file(
        PATCH,
        TEST_PATCH,
        ("positional labels", "_forward", "len(args) > at and args[at] is not None", "False"),
        ("aligned labels alone", "_forward", 'kwargs["labels"] = kwargs["shift_labels"]', "pass"),
        ("no probe of the loss", "_check", "all(map(_is_here, model.parameters()))", "False"),
        ("a plan of the probe", "_check", "patch.last_plan = None", "pass"),
        ("an offloaded head", "_check", "not offloaded", "True"),
        ("a refused model stays exchanged", "patch_model", "        undeferred(base)\n", ""),
        prefix="models: ",
    ),
    *of_file(
        "models/probes.py",
        TEST_PATCH,
        (
            "random numbers are used up",
            "undisturbed",
            "torch.random.fork_rng(devices=devices)",
            "torch.no_grad()",
        ),
        ("modes are lost", "undisturbed", "m.training = training", "pass"),
        ("heads may differ", "check_head", "error <= most", "True"),
        ("losses may differ", "check_call", "abs(ours - theirs) <= most", "True"),
        prefix="models: ",
    ),
    *of_file(
        "models/views.py",
        TEST_HEADS,
        ("a scale of hidden states", "_told", "logits.gain * factor[0, 0, 0].item()", "1.0"),
        prefix="models: ",
    ),
    *of_file(
        "models/peft_heads.py",
        TEST_HEADS,
        ("the original in place of the copy", "view_of", "head.disable_adapters else", "True else"),
        prefix="models: ",
    ),
    *of_file(
        HEAD_VIEW,
        TEST_HEADS,
        (
            "an adapter's scale",
            "HeadView.operands",
            "* columns.scale).to(hidden.dtype)",
            ").to(hidden.dtype)",
        ),
        ("hooks are left out", "view_of", "not hooked, argument", "True, argument"),
        ("any subclass is a Linear", "view_of", "cls is not nn.Linear", "not issubclass(cls, nn.Linear)"),
        ("the bias is left out", "view_of", "HeadView(head.weight, head.bias)", "HeadView(head.weight)"),
        prefix="heads: ",
    ),
    *of_file(
        "models/heads.py",
        f"{TEST_PATCH}::test_models_without_a_head",
        ("no head", "find_head", "isinstance(found, nn.Module)", "True"),
        prefix="heads: ",
    ),
    *of_file(
        HEAD_VIEW,
        f"{TEST_HEADS}::test_quantized_heads_of_models_are_refused_by_name",
        ("quantized heads by another name", "view_of", "REMEDIES.get(package,", "str("),
        prefix="heads: ",
    ),
    *of_file(
        "losses/several_ids.py",
        f"{TEST_HEADS}::test_several_ids_of_a_head_module",
        ("several ids need a tensor", "IdsNumbers.numbers", "if is_head(weight):", "if False:"),
        prefix="heads: ",
    ),
    *of_file(
        "losses/heads.py",
        TEST_HEADS,
        ("two biases", "taken_apart", "bias is None", "True"),
        ("the model's options are dropped", "taken_apart", "if view.of_model:", "if False:"),
        ("options that contradict", "_with_options", "own == default, name", "True, name"),
        ("an adapter of several positions", "without_adapter", "not columns", "True"),
        prefix="heads: ",
    ),
    *of_file(
        "losses/kto.py",
        TEST_HEADS,
        (
            "narrow unrelated completions",
            "KTOLoss.__call__",
            'kl_hidden=unrelated["hidden"]',
            'kl_hidden=kl["kl_hidden"]',
        ),
        prefix="heads: ",
    ),
]
