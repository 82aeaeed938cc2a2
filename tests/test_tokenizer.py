"""Text to tokens and back, and what training does with another tokenizer than bytes."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from brigata.describe import JobError, parse_job
from brigata.train.corpus import load_corpus
from brigata.train.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer, tokenize

TEXT = "def größe(x):\n    return x + 1\n\n" * 60 + "class Naïve:\n    pass\n\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A byte-level BPE of 300 tokens, learned here."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def job(tokenizer: str | None, vocab: int = 320) -> object:
    model = {"pattern": "*-", "hidden": 16, "heads": 2, "vocab": vocab}
    workload = {"seq_len": 8, "global_batch": 1}
    return parse_job(
        {"version": 1, "model": model, "workload": workload, "layout": {}, "train": {"tokenizer": tokenizer}}
    )


def test_text_survives_both_ways(path: Path) -> None:
    for tokenizer in (ByteTokenizer(), FileTokenizer(path)):
        tokens = tokenizer.encode(TEXT.encode())
        assert tokenizer.decode([int(token) for token in tokens]) == TEXT
        assert tokens.max() < tokenizer.size


def test_long_texts_are_cut_between_paragraphs_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FileTokenizer(path).encode(TEXT.encode())
    monkeypatch.setattr("brigata.train.tokenizer.PIECE_BYTES", 50)
    pieces = FileTokenizer(path).encode(TEXT.encode())
    assert FileTokenizer(path).decode(pieces.tolist()) == FileTokenizer(path).decode(whole.tolist()) == TEXT
    assert len(pieces) <= len(whole) * 1.02


def test_a_corpus_in_tokens_is_shorter_and_says_so(path: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text(TEXT + str(i))
    corpus = load_corpus(str(text), 8)
    tokens = tokenize(corpus, FileTokenizer(path), 8)
    assert len(tokens.train) < len(corpus.train) / 2
    assert tokens.train.dtype == np.int32
    assert "M tokens" in tokens.source
    assert tokenize(corpus, ByteTokenizer(), 8) is corpus


def test_the_jobs_tokenizer_is_used_and_must_fit(path: Path, tmp_path: Path) -> None:
    assert load_tokenizer(job(None)).unit == "byte"
    assert load_tokenizer(job("bytes")).unit == "byte"
    assert load_tokenizer(job(str(path))).size == 290
    with pytest.raises(JobError, match=r"has 290 tokens, and model.vocab = 256 cannot hold them"):
        load_tokenizer(job(str(path), vocab=256))
    with pytest.raises(JobError, match=r"name a tokenizer.json"):
        load_tokenizer(job(str(tmp_path / "none.json")))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(JobError, match=r"is no tokenizer.json"):
        load_tokenizer(job(str(tmp_path / "bad.json")))


def test_too_few_tokens_are_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text(TEXT[:200])
    corpus = load_corpus(str(tmp_path / "short.txt"), 50)
    with pytest.raises(JobError, match=r"needs 51"):
        tokenize(corpus, FileTokenizer(path), 50)
