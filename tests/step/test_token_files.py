"""Token files of every format, and the errors for invalid ones."""

import re
import struct

import numpy as np
import pytest

from maxbench.config.errors import UserError
from maxbench.step.token_files import Windows

TOKENS = np.arange(1000) * 7 % 500


def megatron(path, tokens, dtype=np.uint16, code=8, lengths=(400, 600), magic=b"MMIDIDX\0\0"):
    """Writes a .bin and its .idx, as Megatron's IndexedDatasetBuilder does; returns the former."""
    size, starts = np.dtype(dtype).itemsize, np.cumsum([0, *lengths[:-1]])
    head = magic + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    parts = np.int32(lengths), np.int64(starts * size), np.arange(len(lengths) + 1)
    path.with_suffix(".idx").write_bytes(head + b"".join(x.tobytes() for x in parts))
    path.write_bytes(tokens.astype(dtype).tobytes())
    return path


def llm_c(path, tokens, magic, dtype):
    head = np.zeros(256, np.int32)
    head[:3] = magic, 1, len(tokens)
    path.write_bytes(head.tobytes() + tokens.astype(dtype).tobytes())
    return path


def raw(path, tokens, dtype):
    path.write_bytes(tokens.astype(dtype).tobytes())
    return path


def npy(path, tokens):
    np.save(path, tokens)
    return path


FORMS = {
    "raw uint16": lambda p: raw(p / "x.bin", TOKENS, np.uint16),
    "raw uint32": lambda p: raw(p / "x.bin", TOKENS, np.uint32),
    "llm.c's uint16": lambda p: llm_c(p / "x.bin", TOKENS, 20240520, np.uint16),
    "llm.c's uint32": lambda p: llm_c(p / "x.bin", TOKENS, 20240801, np.uint32),
    ".npy of int64": lambda p: npy(p / "x.npy", TOKENS.reshape(10, 100)),
    "Megatron's uint16, 2 documents": lambda p: megatron(p / "x.bin", TOKENS),
    "Megatron's int32, 2 documents": lambda p: megatron(p / "x.bin", TOKENS, np.int32, 4),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_same_tokens(form, tmp_path):
    path = FORMS[form](tmp_path)
    windows = Windows(str(path), 500, length=65, stride=64)
    assert windows.describe() == f"{path}: 1,000 tokens, {form}; 15 sequences"
    read = np.stack(windows)
    assert read.dtype == np.int32
    np.testing.assert_array_equal(read[:, :-1].ravel(), TOKENS[:960])
    np.testing.assert_array_equal(read[:, -1], TOKENS[64:961:64])  # the targets of the last tokens


def test_megatron_files_are_found_by_any_of_their_names(tmp_path):
    megatron(tmp_path / "x.bin", TOKENS)
    for name in ("x", "x.idx", "x.bin", "*.idx"):
        assert len(Windows(str(tmp_path / name), 500, 65, 64)) == 15


def test_a_raw_file_of_a_large_vocabulary_has_the_width_of_its_tokens(tmp_path):
    for dtype in (np.uint16, np.uint32):  # GPT-2's tokens and those of Llama 3
        path = raw(tmp_path / "x.bin", TOKENS * 100, dtype)
        np.testing.assert_array_equal(Windows(str(path), 128_256, 65, 64)[0], TOKENS[:65] * 100)


def test_a_pattern_is_its_files_in_order_and_no_sequence_crosses_two(tmp_path):
    for i in range(3):
        llm_c(tmp_path / f"train_{i}.bin", TOKENS[: 100 + i] + i, 20240520, np.uint16)
    windows = Windows(str(tmp_path / "train_*.bin"), 512, length=33, stride=32)
    assert [int(w[0]) for w in windows] == [TOKENS[j] + i for i in range(3) for j in (0, 32, 64)]
    assert "303 tokens, llm.c's uint16, 3 files; 9 sequences" in windows.describe()


def test_texts_are_bytes_with_an_end_of_each(tmp_path):
    (tmp_path / "b").mkdir()
    for name, text in {"a.txt": "né", "b/c.md": "x", ".hidden": "z", "image": "\udcff"}.items():
        (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    windows = Windows(str(tmp_path), 257, length=6, stride=6)
    assert windows[0].tolist() == [*"né".encode(), 256, *b"x", 256]
    assert windows.describe().endswith(
        "6 tokens, UTF-8 bytes, 2 documents, left out as no UTF-8 text: 1; 1 sequences"
    )


REFUSED = {
    "does not exist; give uniform, bigram, a token file": lambda p: p / "bigramm",
    "needs 65: train.seq and its targets": lambda p: raw(p / "x.bin", TOKENS[:64], np.uint16),
    "has 0 tokens": lambda p: raw(p / "x.bin", TOKENS[:0], np.uint16),
    "token 286 is 501, and model.vocab=500 has ids from 0 to 499; use --config.model.vocab=502": (
        lambda p: raw(p / "x.bin", np.where(np.arange(1000) == 286, 501, 1), np.uint16)
    ),
    "token 3 is -1": lambda p: npy(p / "x.npy", np.where(np.arange(1000) == 3, -1, 0)),
    "has 2,001 bytes, and its 1,001 uint16 tokens need 2,002; it is cut off": (
        lambda p: raw(p / "x.bin", np.frombuffer(bytes(range(87)) * 23, np.uint8), np.uint8)
    ),
    "has 3,022 bytes, and its 1,000 uint16 tokens need 3,024": (
        lambda p: cut(llm_c(p / "x.bin", TOKENS, 20240520, np.uint16), 2)
    ),
    "has float64 [1000]; give an array of integers": lambda p: npy(p / "x.npy", TOKENS / 2),
    "is no .npy file of numbers": lambda p: raw(p / "x.npy", TOKENS, np.uint16),
    "x.bin' cannot be read: No such file": lambda p: remove(megatron(p / "x.bin", TOKENS)),
    "is no index of Megatron's": lambda p: megatron(p / "x.bin", TOKENS, magic=b"TNTIDX\0\0\0"),
    "has dtype code 6, which is of no integers": lambda p: megatron(p / "x.bin", TOKENS, code=6),
    "its 1,000 int32 tokens need 4,000": lambda p: megatron(p / "x.bin", TOKENS, code=4),
    "x.idx' is cut off: 52 bytes, and it needs 82": (
        lambda p: cut(megatron(p / "x.bin", TOKENS).with_suffix(".idx"), 30).with_suffix(".bin")
    ),
    "is neither UTF-8 text nor a token file": lambda p: raw(p / "x", TOKENS, np.uint16),
}


def cut(path, count):
    path.write_bytes(path.read_bytes()[:-count])
    return path


def remove(path):
    path.unlink()
    return path.with_suffix("")


@pytest.mark.parametrize("reason", REFUSED)
def test_invalid_files_are_refused_with_the_reason(reason, tmp_path):
    path = REFUSED[reason](tmp_path)
    with pytest.raises(UserError, match=re.escape(reason)):
        Windows(str(path), 500, 65, 64)


def test_a_late_token_that_is_no_id_is_refused_when_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("maxbench.step.token_files.CHECKED", 1 << 8)
    path = raw(tmp_path / "x.bin", np.where(np.arange(1000) == 700, 500, 1), np.uint16)
    windows = Windows(str(path), 500, 65, 64)
    assert windows[9].max() == 1
    with pytest.raises(UserError, match="token 700 is 500"):
        windows[10]
