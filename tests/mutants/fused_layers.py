"""Layers fused in a model that is there."""

from tests.mutants.mutant import of_file

REWRITE, BODIES = "tests/models/test_rewrite.py", "tests/models/test_bodies.py"
MODELS, FAMILIES = "tests/models/test_fused_models.py", "tests/models/test_fuse_layers.py"
FORWARDS = "models/fused_forwards.py"

MUTANTS = [
    *of_file(
        "models/statements.py",
        REWRITE,
        ("sums are also products", "sum_of", "isinstance(value.op, ast.Add)", "True"),
        ("any call is a norm's", "norm_call", "or call.func.attr not in known.norms", ""),
        ("any transposition", "norm_call", "or given != [1, 2]", ""),
        ("the norm before need not be the last", "norm_before", "call.target == name and ", ""),
        ("norms of another kind", "norm_before", " and call.norm in known.rms_norms", ""),
        (
            "halves in any order",
            "gate_of",
            "return call.func, call.args[0], b",
            "return call.func, b, call.args[0]",
        ),
        prefix="fused layers: ",
    ),
    *of_file(
        "models/rewrite.py",
        REWRITE,
        (
            "LayerNorm before an addition",
            "_Rewriter._norm_add",
            "call.norm not in self.known.rms_norms",
            "False",
        ),
        ("the norm's result lives on", "_Rewriter._norm_add", " or total[0] != call.target", ""),
        ("the sum has one name", "_Rewriter._add_norm", "if len(names) > 1:", "if False:"),
        ("another tensor is normalised", "_Rewriter._add_norm", "not is_name(call.argument, h)", "False"),
        ("factor forgotten", "_Rewriter._add_norm", '{"multiplier": right.right}', "{}"),
        ("halves live on", "_Rewriter._unpack", "if not all(", "if False and not all("),
        (
            "order of the sides",
            "_Rewriter.visit_BinOp",
            "if node.right is b else",
            "if node.right is not b else",
        ),
        ("transposition forgotten", "_Rewriter._rotate_normed", "if call_before.transpose:", "if False:"),
        ("class cell", "rewrite", "function.__code__.co_freevars or", ""),
        ("defaults", "_compiled", "= function.__defaults__, function.__kwdefaults__", "= None, None"),
        prefix="fused layers: ",
    ),
    *of_file(
        FORWARDS,
        REWRITE,
        ("hooks go unseen", "is_untouched", 'or own["_forward_hooks"]', ""),
        ("instance forwards are bypassed", "is_untouched", 'or "forward" in own', ""),
        (
            "compiled modules are bypassed",
            "is_untouched",
            'own.get("_compiled_call_impl") is not None',
            "False",
        ),
        ("any dtype", "_is_plain", " and x.dtype in DTYPES", ""),
        ("shapes that stretch", "_can_join", "and x.shape == residual.shape", ""),
        ("gates that stretch", "gate", " and a.shape == b.shape", ""),
        ("factors with a gradient", "add_norm", "type(factor) in (int, float) and", ""),
        ("fp32 under autocast", "add_norm", "and _widens_layer_norm(kind)", ""),
        ("norms see transposed heads", "Rotate.normed", "        if before:", "        if not before:"),
        prefix="fused layers: ",
    ),
    *of_file(
        FORWARDS,
        MODELS,
        ("compilers", "_is_transformed", "torch.compiler.is_compiling()", "False"),
        ("functorch", "_is_transformed", "torch._C._are_functorch_transforms_active()", "False"),
        prefix="fused layers: ",
    ),
    *of_file(
        FORWARDS,
        FAMILIES,
        ("eps", "_norm_with", "eps, weight = getattr(module, body.eps)", "eps, weight = 0.1"),
        ("rounding", "_norm_with", "rounding=body.rounding, multiplier=factor", "multiplier=factor"),
        (
            "rotation of normed heads",
            "Rotate.normed",
            '"interleaved": self.rotation.interleaved',
            '"interleaved": True',
        ),
        prefix="fused layers: ",
    ),
    *of_file(
        "models/bodies.py",
        BODIES,
        ("no trial of norms", "norm_of", "if not _norm_agrees(", "if False and not _norm_agrees("),
        ("no trial of rotations", "rotation_of", "and _rotation_agrees(function, rotation)", ""),
        ("weights of several dimensions", "norm_of", "len(shape) != 1", "False"),
        ("the trial draws numbers", "_random", "generator=generator, ", ""),
        prefix="fused layers: ",
    ),
    *of_file(
        "models/source.py",
        BODIES,
        ("what a body calls", "fingerprint", "waiting += _called(tree, each, owner)", "pass"),
        ("methods", "_called", "getattr(owner, node.attr, None)", "None"),
        prefix="fused layers: ",
    ),
    *of_file(
        "models/source.py",
        REWRITE,
        ("wrapped forwards", "forward_of", "not in HARMLESS_WRAPPERS", "is None"),
        ("lines of the file", "tree_of", "ast.increment_lineno(tree, start - 1)", "pass"),
        prefix="fused layers: ",
    ),
    *of_file(
        "models/fuse.py",
        MODELS,
        ("fused twice", "fuse_layers", "not again", "True"),
        ("nothing known", "fuse_layers", "bool(undos)", "True"),
        ("undo", "Fused.__call__", "undo()", "pass"),
        prefix="fused layers: ",
    ),
]
