"""From text to windows, through the tokenizer and the cache."""

from pathlib import Path

import numpy as np
import pytest

from fourfold.config.schema import TextFiles, TokenFiles
from fourfold.training.data import CorpusError, cache, prepare, tokenizer


@pytest.fixture
def words(tmp_path: Path) -> Path:
    for index in range(12):
        text = f"file {index}: the quick brown fox — jumps over the lazy dog\n" * (index + 5)
        (tmp_path / f"{index:02}.txt").write_text(text, encoding="utf-8")
    return tmp_path


def settings(folder: Path, **more) -> TextFiles:
    return TextFiles(files=(f"{folder}/*.txt",), cache=str(folder / "cache"), sequence=8, vocabulary=300, **more)


def opened(folder: Path, **more):
    return prepare(settings(folder, **more), rows=4, seed=1)


def test_what_is_tokenized_reads_back_as_the_text(words):
    data = opened(words, held_out=0.0)
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(words.glob("*.txt")))
    assert data.tokenizer is not None
    assert data.tokenizer.decode(data.source.train.tolist(), skip_special_tokens=True) == text
    end = data.tokenizer.token_to_id(tokenizer.END)
    assert int((np.asarray(data.source.train) == end).sum()) == 12
    assert data.source.train.dtype == np.uint16


def test_held_out_and_training_text_are_disjoint_documents_and_lose_nothing(words):
    whole, data = opened(words, held_out=0.0), opened(words, held_out=0.3)
    assert len(data.source.train) + len(data.source.held) == len(whole.source.train)
    assert 0.1 < len(data.source.held) / len(whole.source.train) < 0.6
    assert data.tokenizer is not None
    held = data.tokenizer.decode(data.source.held.tolist())
    trained = data.tokenizer.decode(data.source.train.tolist())
    names = [{line.split(":")[0] for line in part.splitlines()} for part in (held, trained)]
    assert not names[0] & names[1]


def test_the_second_time_nothing_is_tokenized(words, monkeypatch):
    first = opened(words)
    monkeypatch.setattr(tokenizer, "train", lambda *_: pytest.fail("tokenized again"))
    second = opened(words)
    assert np.array_equal(first.source.train, second.source.train)
    assert isinstance(second.source.train, np.memmap)


def test_changed_text_is_tokenized_again(words):
    opened(words)
    entries = set((words / "cache" / "corpus").iterdir())
    (words / "00.txt").write_text("other text altogether\n" * 9, encoding="utf-8")
    opened(words)
    assert len(set((words / "cache" / "corpus").iterdir()) - entries) == 1


def test_a_damaged_cache_is_made_again(words):
    before = opened(words).source.train.tolist()
    (place,) = (words / "cache" / "corpus").iterdir()
    for damage in (lambda content: content[:-2], lambda content: content[:-1] + b"\xff"):
        damaged = place / "train.bin"
        damaged.write_bytes(damage(damaged.read_bytes()))
        assert cache.load(place) is None
        assert opened(words).source.train.tolist() == before
    assert [path.name for path in (words / "cache" / "corpus").iterdir()] == [place.name]


def test_an_empty_corpus_and_a_short_one_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(CorpusError, match="the corpus is empty"):
        opened(tmp_path)
    (tmp_path / "a.txt").write_text("hi")
    with pytest.raises(CorpusError, match=r"fewer than the 9 of one window"):
        opened(tmp_path, held_out=0.0)


def test_a_cache_that_cannot_be_written_is_named(words):
    blocked = words / "blocked"
    blocked.write_text("a file where a folder should be")
    config = settings(words).model_copy(update={"cache": str(blocked)})
    with pytest.raises(CorpusError, match=r"cannot write the token cache .*set data\.cache"):
        prepare(config, rows=4, seed=1)


def test_a_model_may_bring_its_own_tokenizer(words):
    own = tokenizer.train(["the quick brown fox " * 50], 270)
    (words / "tokenizer.json").write_text(own.to_str())
    data = prepare(settings(words, held_out=0.0), rows=4, seed=1, tokenizer_file=words / "tokenizer.json")
    assert data.vocabulary == own.get_vocab_size()
    assert data.source.train[:5].tolist() == own.encode("file 0: the quick").ids[:5]
    (words / "tokenizer.json").write_text("{}")
    with pytest.raises(CorpusError, match=r"expected a tokenizer\.json"):
        prepare(settings(words, held_out=0.0), rows=4, seed=1, tokenizer_file=words / "tokenizer.json")


def test_token_files_are_checked_and_kept_in_order(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(50, dtype=np.int32))
    np.save(tmp_path / "b.npy", np.arange(50, 90, dtype=np.uint8))
    config = TokenFiles(name="tokens", files=(f"{tmp_path}/*.npy",), sequence=4, vocabulary=90, held_out=0.1)
    data = prepare(config, rows=2, seed=0)
    assert data.source.train.tolist() == list(range(81))
    assert data.source.held.tolist() == list(range(81, 90))
    assert data.tokenizer is None
    with pytest.raises(CorpusError, match=r"b\.npy: expected ids from 0 to 69, found 50 to 89"):
        prepare(config.model_copy(update={"vocabulary": 70}), rows=2, seed=0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (np.zeros((2, 2), dtype=np.int64), r"one-dimensional array of integers, found int64 of shape \(2, 2\)"),
        (np.zeros(4), "found float64"),
        (np.array([1, None], dtype=object), "expected a .npy file"),
        (b"text", "expected a .npy file"),
        (b"", "expected a .npy file"),
    ],
)
def test_other_arrays_are_refused(tmp_path, content, said):
    if isinstance(content, bytes):
        (tmp_path / "a.npy").write_bytes(content)
    else:
        np.save(tmp_path / "a.npy", content, allow_pickle=True)
    with pytest.raises(CorpusError, match=said):
        prepare(TokenFiles(name="tokens", files=(f"{tmp_path}/a.npy",)), rows=1, seed=0)
