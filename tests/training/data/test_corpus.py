"""Corpora: what is read, and what is said when it cannot be."""

import os
from pathlib import Path

import pytest

from fourfold.training.data import corpus
from fourfold.training.data.corpus import CorpusError, Document


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for name in ("b.py", "a/z.py", "a/test/t.py", "site-packages/p.py", "test/q.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n", encoding="utf-8")
    return tmp_path


def test_stdlib_is_sorted_and_leaves_packages_and_suites_out(library):
    assert [document.name for document in corpus.stdlib(library)] == ["a/z.py", "b.py"]


def test_the_running_pythons_library_is_all_utf8():
    documents = corpus.stdlib()
    names = [document.name for document in documents]
    assert "argparse.py" in names
    assert names == sorted(names)
    assert sum(len(text) for text in corpus.texts(documents)) > 5_000_000


def test_no_library_source_says_what_to_do(tmp_path):
    with pytest.raises(CorpusError, match=r"data\.name: text"):
        corpus.stdlib(tmp_path)


def test_patterns_give_each_file_once_and_sorted(library, monkeypatch):
    monkeypatch.chdir(library)
    assert [document.name for document in corpus.files(["b.py", "*.py", "a/*.py"])] == ["a/z.py", "b.py"]


def test_a_pattern_without_a_file_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CorpusError, match=r"'nothing/\*\.txt' matches no file"):
        corpus.files(["nothing/*.txt"])
    (tmp_path / "folder").mkdir()
    with pytest.raises(CorpusError, match=r"is a folder; to take its files say folder/\*\*/\*"):
        corpus.files(["folder/"])


def test_text_that_is_not_utf8_names_file_and_byte(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(CorpusError, match=r"latin\.txt: expected UTF-8 text, found the byte 0xe9 at offset 3"):
        Document("latin.txt", tmp_path / "latin.txt").read()


def test_a_file_that_vanished_is_named(tmp_path):
    with pytest.raises(CorpusError, match=r"gone\.txt: cannot read it"):
        Document("gone.txt", tmp_path / "gone.txt").read()


def test_the_limit_counts_bytes_and_never_cuts_a_character(tmp_path):
    for name, text in (("1", "ab"), ("2", "éé"), ("3", "never")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    documents = [Document(name, tmp_path / name) for name in ("1", "2", "3")]
    assert list(corpus.texts(documents, 5)) == ["ab", "é"]
    assert list(corpus.texts(documents)) == ["ab", "éé", "never"]
    assert os.fsencode("".join(corpus.texts(documents, 6))) == "abéé".encode()
