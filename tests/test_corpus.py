"""What is read, what is left out, and that held-out text is never trained on."""

import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from brigata.describe import JobError
from brigata.train.corpus import Corpus, load_corpus


def folder_of(root: Path, files: dict[str, bytes]) -> Path:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return root


def many_files(root: Path, n: int = 200) -> Path:
    return folder_of(root, {f"part{i % 7}/file{i}.txt": f"<{i}> line of file {i}".encode() for i in range(n)})


def text_of(corpus: Corpus) -> bytes:
    return corpus.train.tobytes() + b"\n\n" + corpus.held_out.tobytes()


def test_standard_library_is_the_default() -> None:
    corpus = load_corpus(None, 256)
    assert corpus.train.dtype == corpus.held_out.dtype == np.uint8
    assert 5e6 < len(corpus.train) + len(corpus.held_out) < 40e6
    assert 0.01 < len(corpus.held_out) / len(corpus.train) < 0.12
    text = text_of(corpus)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    assert (stdlib / "argparse.py").read_bytes() in text
    assert "standard library" in corpus.source
    assert " files, " in corpus.source


@pytest.mark.parametrize(
    "path",
    [
        "site-packages/numpy/core.py",
        "dist-packages/apt.py",
        "test/test_os.py",
        "unittest/test/case.py",
        "distutils/tests/case.py",
        "idlelib/idle_test/case.py",
        "lib2to3/pytree.py",
        "json/__pycache__/decoder.py",
        "LICENSE.txt",
    ],
)
def test_standard_library_goes_without_tests_and_packages(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {"os.py": b"import sys\n" * 9, "json/decoder.py": b"import re\n" * 9}
    folder_of(tmp_path, {**sources, path: b"SECRET"})
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    corpus = load_corpus(None, 16)
    assert b"SECRET" not in text_of(corpus)
    assert "2 files" in corpus.source


def test_held_out_files_are_whole_and_about_one_in_twenty(tmp_path: Path) -> None:
    corpus = load_corpus(str(many_files(tmp_path, 600)), 16)
    files = {path.read_bytes() for path in tmp_path.rglob("*.txt")}
    train, held_out = (set(side.tobytes().split(b"\n\n")) for side in (corpus.train, corpus.held_out))
    assert train | held_out == files
    assert not train & held_out
    assert 600 / 40 < len(held_out) < 600 / 10


def test_split_is_the_same_wherever_the_folder_lies(tmp_path: Path) -> None:
    here, there = (load_corpus(str(many_files(tmp_path / name)), 16) for name in ("here", "there/below"))
    assert here.train.tobytes() == there.train.tobytes()
    assert here.held_out.tobytes() == there.held_out.tobytes()


def test_split_of_a_file_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    before = load_corpus(str(many_files(tmp_path)), 16)
    folder_of(tmp_path, {f"new{i}.txt": b"x%d" % i for i in range(50)})
    after = load_corpus(str(tmp_path), 16)
    for old, new in ((before.train, after.train), (before.held_out, after.held_out)):
        assert set(old.tobytes().split(b"\n\n")) <= set(new.tobytes().split(b"\n\n"))


def test_exact_copy_of_a_file_is_read_once(tmp_path: Path) -> None:
    many_files(tmp_path)
    for path in list(tmp_path.rglob("*.txt")):
        (tmp_path / f"copy-of-{path.name}").write_bytes(path.read_bytes())
    corpus = load_corpus(str(tmp_path), 16)
    assert "200 files" in corpus.source
    assert not set(corpus.train.tobytes().split(b"\n\n")) & set(corpus.held_out.tobytes().split(b"\n\n"))


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("picture.png", b"\x89PNG\r\n\x1a\n\xff\xfe SECRET"),
        ("latin.txt", "é SECRET".encode("latin-1")),
        ("zeros.bin", b"\0\0 SECRET"),
        (".hidden", b"SECRET"),
        (".git/config", b"SECRET"),
        ("below/.env", b"SECRET"),
    ],
)
def test_binary_and_hidden_files_are_skipped(path: str, content: bytes, tmp_path: Path) -> None:
    corpus = load_corpus(str(folder_of(many_files(tmp_path), {path: content})), 16)
    assert b"SECRET" not in text_of(corpus)
    assert ("1 binary left out" in corpus.source) == (content != b"SECRET")


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    outside = folder_of(tmp_path / "outside", {"secret.txt": b"SECRET", "below/secret.txt": b"SECRET too"})
    inside = many_files(tmp_path / "inside")
    (inside / "link.txt").symlink_to(outside / "secret.txt")
    (inside / "linked").symlink_to(outside)
    (inside / "round").symlink_to(inside)
    (inside / "broken").symlink_to(tmp_path / "nothing")
    os.mkfifo(inside / "pipe")
    corpus = load_corpus(str(inside), 16)
    assert b"SECRET" not in text_of(corpus)
    assert "200 files" in corpus.source


def test_list_reads_its_files_and_folders(tmp_path: Path) -> None:
    folder = many_files(tmp_path / "folder")
    single = folder_of(tmp_path, {"single.txt": b"the single file"}) / "single.txt"
    corpus = load_corpus([str(single), str(folder)], 16)
    assert b"the single file" in text_of(corpus)
    assert b"line of file 199" in text_of(corpus)
    assert "201 files" in corpus.source


@pytest.mark.parametrize("size", [34, 35, 200, 5000])
def test_end_of_a_single_file_is_held_out(size: int, tmp_path: Path) -> None:
    text = bytes(32 + i % 90 for i in range(size))
    folder_of(tmp_path, {"one.txt": text})
    for data in (str(tmp_path), str(tmp_path / "one.txt"), [str(tmp_path / "one.txt")]):
        corpus = load_corpus(data, 16)
        assert corpus.train.tobytes() + corpus.held_out.tobytes() == text
        assert len(corpus.held_out) == max(17, size // 20)


def test_never_trains_on_the_smaller_part(tmp_path: Path) -> None:
    for i in range(60):
        big = folder_of(tmp_path / str(i), {f"big{i}.txt": b"b" * 9000, "small.txt": b"s" * 900})
        corpus = load_corpus(str(big), 16)
        assert len(corpus.train) > len(corpus.held_out)


def test_too_little_text_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    name = str(folder_of(tmp_path, {"short.txt": b"x" * 33}))
    with pytest.raises(JobError, match=r"train\.data = .* has 33 bytes .*seq_len = 16 needs at least 34"):
        load_corpus(name, 16)
    with pytest.raises(JobError, match=r"seq_len = 15 or less"):
        load_corpus(name, 16)
    load_corpus(name, 15)


def test_empty_data_is_refused(tmp_path: Path) -> None:
    empty = str(folder_of(tmp_path, {"empty.txt": b""}))
    for data in (empty, [], [empty]):
        with pytest.raises(JobError, match=r"has 0 bytes .* name more text$"):
            load_corpus(data, 16)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"train\.data = .*nothing.* cannot be read: No such file"):
        load_corpus(str(tmp_path / "nothing"), 16)
    folder_of(tmp_path, {"picture.png": b"\xff\0" * 900})
    with pytest.raises(JobError, match=r"picture\.png' is no UTF-8 text; name a text file"):
        load_corpus([str(tmp_path / "picture.png")], 16)
