"""Files of tokens, as other programs write them, and texts by bytes, as windows of one sequence.

    X.bin with X.idx     Megatron's MMapIndexedDataset, by the path of either or by X
    X.bin                raw uint16 or uint32 (nanoGPT), or with the header of llm.c
    X.npy                integers
    others, folders      UTF-8 texts: a token is a byte, and END follows each document

A pattern as 'fineweb_train_*.bin' is all files that match, in the order of their names. Token files
are mapped into memory and not copied.
"""

import glob
import pathlib
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maxbench.config.errors import UserError
from maxbench.config.run import Run

END = 256  # token at the end of a text's document
LLM_C_HEADER = 1024  # bytes: 256 int32, magic number, version, tokens
LLM_C_DTYPES = {20240520: np.uint16, 20240801: np.uint32}  # by magic number
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEADER = 34  # bytes: magic, version, dtype, numbers of sequences and of documents
MEGATRON_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CHECKED = 1 << 26  # tokens of a file that are checked at the start; each window is, when it is read


class Part(NamedTuple):
    """The tokens of a file, or of the texts of a folder."""

    path: str
    tokens: np.ndarray  # integers [tokens]
    form: str  # in words
    documents: int = 0  # 0: unknown
    skipped: int = 0  # files of a folder that are no UTF-8 text


class Windows(Sequence[np.ndarray]):
    """Sequences of a data set, each int32 [length], which overlap by length - stride tokens.

    Args:
      path: of a file or folder, or a pattern.
      vocab: token ids are below it.

    Raises:
      UserError: there is no such file, or its contents are invalid; no sequence is as long.
    """

    def __init__(self, path: str, vocab: int, length: int, stride: int):
        self.path, self.vocab, self.length, self.stride = path, vocab, length, stride
        self.parts = [_part(file, vocab) for file in _files(path)]
        overlap = length - stride
        counts = [max(0, (part.tokens.size - overlap) // stride) for part in self.parts]
        self.ends = np.cumsum(counts)
        self.tokens = sum(part.tokens.size for part in self.parts)
        if not len(self):
            raise UserError(
                f"{path!r} has {self.tokens:,} tokens, and a sequence needs {length:,}: "
                "train.seq and its targets; give a longer file, or a smaller --seq"
            )
        for part in (part for part in self.parts if part.tokens.size):
            self._check(part, part.tokens[:CHECKED], 0)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, i):
        """Sequence i.

        Raises:
          UserError: a token is not below vocab.
        """
        i = range(len(self))[i]
        which = int(np.searchsorted(self.ends, i, side="right"))
        part, before = self.parts[which], int(self.ends[which - 1]) if which else 0
        start = (i - before) * self.stride
        tokens = part.tokens[start : start + self.length]
        self._check(part, tokens, start)
        return tokens.astype(np.int32)

    def _check(self, part: Part, tokens: np.ndarray, start: int) -> None:
        """Raises UserError if one of some tokens, which begin at `start`, is no id."""
        if tokens.min() >= 0 and tokens.max() < self.vocab:
            return
        at = int(np.argmax((tokens < 0) | (tokens >= self.vocab)))
        hint = "" if tokens[at] < 0 else f"; use --config.model.vocab={tokens.max() + 1} or more"
        raise UserError(
            f"{part.path!r}, {part.form}: token {start + at:,} is {tokens[at]}, and "
            f"model.vocab={self.vocab} has ids from 0 to {self.vocab - 1}{hint}"
        )

    def fingerprint(self) -> list[int]:
        """Numbers that are equal for equal data and windows; of the tokens, the first and the last
        sequences are compared."""
        ends = b"".join(self[i].tobytes() for i in (0, -1))
        return [self.tokens, len(self), self.length, zlib.crc32(ends)]

    def describe(self) -> str:
        """'data/train.bin: 301,966 tokens, raw uint16; 4,718 sequences'."""
        forms = " and ".join(dict.fromkeys(part.form for part in self.parts))
        documents = sum(part.documents for part in self.parts)
        skipped = sum(part.skipped for part in self.parts)
        texts = [f"{self.path}: {self.tokens:,} tokens, {forms}"]
        texts += [f"{len(self.parts)} files"] * (len(self.parts) > 1)
        texts += [f"{documents:,} document{'s' * (documents > 1)}"] * (documents > 0)
        texts += [f"left out as no UTF-8 text: {skipped}"] * (skipped > 0)
        return f"{', '.join(texts)}; {len(self):,} sequences"


def of_run(run: Run, setting: str = "data") -> Windows:
    """The sequences of the files of train.data, each with its targets (step/data.py).

    Args:
      setting: another field of Train that is a path.

    Raises:
      UserError: as Windows().
    """
    t, m = run.train, run.model
    try:
        return Windows(getattr(t, setting), m.vocab, t.seq + 1 + m.mtp_layers, t.seq)
    except UserError as e:
        raise UserError(f"{setting}={e}") from None


def held_out(run: Run) -> tuple[Windows, int]:
    """The sequences of train.eval_data, and the number of batches of an evaluation.

    Raises:
      UserError: as of_run(); the files have fewer batches than train.eval_steps.
    """
    files, gbs = of_run(run, "eval_data"), run.layout.gbs
    count = run.train.eval_steps or max(1, len(files) // gbs)
    if count * gbs > len(files):
        raise UserError(
            f"eval_data={files.path!r} has {len(files):,} sequences, and {count} "
            f"batch{'es' * (count > 1)} of gbs={gbs} are {count * gbs:,}; give longer files, a "
            "smaller --eval_steps or --gbs"
        )
    return files, count


def _files(path: str) -> list[pathlib.Path]:
    """The files of a data set, or its folder. The files of Megatron are named by their .bin."""
    if pathlib.Path(f"{path}.idx").is_file():
        return [pathlib.Path(f"{path}.bin")]
    if pathlib.Path(path).exists():
        return [_bin_of(pathlib.Path(path))]
    found = sorted({_bin_of(pathlib.Path(name)) for name in glob.glob(path)})
    if not found:
        raise UserError(
            f"{path!r} does not exist; give uniform, bigram, a token file (.bin, .npy), a "
            "text file or folder, or a pattern as 'train_*.bin'"
        )
    return found


def _bin_of(file: pathlib.Path) -> pathlib.Path:
    return file.with_suffix(".bin") if file.suffix == ".idx" else file


def _part(file: pathlib.Path, vocab: int) -> Part:
    """Raises UserError if a file is invalid or cannot be read."""
    try:
        if file.is_dir():
            return _texts(file, sorted(p for p in file.rglob("*") if _is_visible(p, file)))
        if file.suffix == ".bin":
            return _megatron(file) if file.with_suffix(".idx").exists() else _raw(file, vocab)
        return _npy(file) if file.suffix == ".npy" else _texts(file, [file])
    except OSError as e:
        raise UserError(f"{str(file)!r} cannot be read: {e.strerror or e}") from None


def _is_visible(file: pathlib.Path, folder: pathlib.Path) -> bool:
    names = file.relative_to(folder).parts
    return file.is_file() and not any(name.startswith(".") for name in names)


def _texts(path: pathlib.Path, files: Sequence[pathlib.Path]) -> Part:
    texts = [text for file in files if (text := _utf8(file)) is not None]
    if not texts:
        raise UserError(
            f"{str(path)!r} is neither UTF-8 text nor a token file, which end in .bin or .npy"
        )
    as_tokens = lambda text: np.append(np.frombuffer(text, np.uint8), np.uint16(END))
    tokens = np.concatenate([as_tokens(text) for text in texts])
    return Part(str(path), tokens, "UTF-8 bytes", len(texts), len(files) - len(texts))


def _utf8(file: pathlib.Path) -> bytes | None:
    """The bytes of a text; None if it is no UTF-8 text."""
    text = file.read_bytes()
    try:
        text.decode()
    except UnicodeDecodeError:
        return None
    return text


def _npy(file: pathlib.Path) -> Part:
    try:
        tokens = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as e:
        raise UserError(f"{str(file)!r} is no .npy file of numbers: {e}") from None
    if tokens.dtype.kind not in "ui" or not tokens.ndim:
        raise UserError(
            f"{str(file)!r} has {tokens.dtype} {list(tokens.shape)}; give an array of integers"
        )
    return Part(str(file), tokens.reshape(-1), f".npy of {tokens.dtype}")


def _raw(file: pathlib.Path, vocab: int) -> Part:
    head = np.fromfile(file, np.int32, 3).tolist()
    if head and head[0] in LLM_C_DTYPES:
        dtype, count = np.dtype(LLM_C_DTYPES[head[0]]), (*head, 0, 0)[2]
        return Part(str(file), _map(file, dtype, count, LLM_C_HEADER), f"llm.c's {dtype}")
    dtype = np.dtype(np.uint32 if _has_32_bits(file, vocab) else np.uint16)
    count = -(-file.stat().st_size // dtype.itemsize)
    return Part(str(file), _map(file, dtype, count), f"raw {dtype}")


def _has_32_bits(file: pathlib.Path, vocab: int) -> bool:
    """Whether a file without a header has tokens of 32 bits: the upper halves of the first of them
    are then those of ids below vocab."""
    halves = np.fromfile(file, np.uint16, CHECKED >> 6)
    upper = halves[1::2]
    return bool(halves.any()) and bool((upper <= (vocab - 1) >> 16).all())


def _megatron(file: pathlib.Path) -> Part:
    index = file.with_suffix(".idx")
    with index.open("rb") as f:
        head = f.read(MEGATRON_HEADER)
    if not head.startswith(MEGATRON_MAGIC) or len(head) < MEGATRON_HEADER:
        raise UserError(f"{str(index)!r} is no index of Megatron's MMapIndexedDataset")
    code, (sequences, documents) = head[17], np.frombuffer(head, np.uint64, 2, 18).tolist()
    if code not in MEGATRON_DTYPES:
        raise UserError(f"{str(index)!r} has dtype code {code}, which is of no integers")
    size, needed = index.stat().st_size, MEGATRON_HEADER + sequences * 12 + documents * 8
    if size < needed:
        raise UserError(f"{str(index)!r} is cut off: {size:,} bytes, and it needs {needed:,}")
    lengths = np.fromfile(index, np.int32, sequences, offset=MEGATRON_HEADER)
    dtype = np.dtype(MEGATRON_DTYPES[code])
    tokens = _map(file, dtype, int(lengths.sum(dtype=np.int64)))
    return Part(str(file), tokens, f"Megatron's {dtype}", documents - 1)


def _map(file: pathlib.Path, dtype: np.dtype, count: int, offset: int = 0) -> np.ndarray:
    """The tokens of a file.

    Raises:
      UserError: the file does not end after them.
    """
    size, needed = file.stat().st_size, offset + count * dtype.itemsize
    if size != needed:
        raise UserError(
            f"{str(file)!r} has {size:,} bytes, and its {count:,} {dtype} tokens need "
            f"{needed:,}; it is cut off, or of another dtype"
        )
    return np.memmap(file, dtype, "r", offset, count) if count else np.zeros(0, dtype)
