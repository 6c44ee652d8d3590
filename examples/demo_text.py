"""Real text that every machine has: the source code of Python's standard library, and a tokenizer trained on
it."""

import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "ensurepip",
}
SPECIAL_TOKENS = PAD, END = "<pad>", "<eos>"


def source_files(limit: int) -> Iterator[str]:
    """The standard library's modules, in an order that is shuffled but the same on every call, up to `limit`
    characters."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts)
    )
    if not paths:
        raise SystemExit(
            f"stdlib: expected Python source files in {root}, got none; use a Python that has them."
        )
    random.Random(0).shuffle(paths)
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="ignore")
        yield text
        limit -= len(text)
        if limit <= 0:
            return


def train_tokenizer(files: list[str], vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        # rare words are merged too: there is just about enough text for the vocabulary
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(files, trainer)
    return tokenizer


def make_rows(count: int, width: int, vocab: int, corpus_chars: int, tokenizer_path: Path) -> torch.Tensor:
    """Trains the tokenizer, saves it, and cuts the text into `count` rows of `width` tokens."""
    files = list(source_files(corpus_chars))
    tokenizer = train_tokenizer(files, vocab)
    tokenizer.save(str(tokenizer_path))
    stream: list[int] = []
    for file in files:
        stream += [*tokenizer.encode(file).ids, tokenizer.token_to_id(END)]
        # more than is needed, so that a batch mixes files
        if len(stream) >= 8 * width * count:
            break
    rows = torch.tensor(stream[: len(stream) // width * width]).view(-1, width)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    # a long run reads the text more than once
    return rows[order.repeat(-(-count // len(rows)))[:count]]
