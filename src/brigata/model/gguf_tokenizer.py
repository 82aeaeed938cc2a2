"""The tokenizer inside a GGUF file as a ``tokenizer.json``: byte-level BPE, as in GPT-2 and its heirs."""

from typing import Any, Protocol

from brigata.describe.errors import JobError, one_of

CONTROL, USER_DEFINED = 3, 4
"""Kinds of tokens that are never split: marks, and words that were added. Source: the GGUF specification."""
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 cuts text before merging. Source: its tokenizer.json."""
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
"""Qwen 2 likewise, with single digits."""
WORDS = {
    "llama-bpe": LLAMA3_WORDS,
    "llama3": LLAMA3_WORDS,
    "qwen2": QWEN2_WORDS,
    "deepseek-r1-qwen": QWEN2_WORDS,
}
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "exaone")
PLAIN = ("gpt-2", "default", "olmo")


class Metadata(Protocol):
    """What is asked of a GGUF file."""

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the metadata."""
        ...

    def need(self, key: str) -> Any:
        """A value that must be there."""
        ...


def build_tokenizer(file: Metadata) -> str:
    """The content of a ``tokenizer.json``.

    Raises:
        JobError: the tokenizer is of another kind, or cuts text in a way that is not known.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models

    kind = file.need("tokenizer.ggml.model")
    way_out = "put the model's tokenizer.json beside the file"
    if kind != "gpt2":
        raise JobError(f"tokenizer.ggml.model = {kind!r} cannot be rebuilt, only 'gpt2' can; {way_out}")
    tokens, kinds = file.need("tokenizer.ggml.tokens"), file.need("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in file.need("tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _cut(file.get("tokenizer.ggml.pre", "default"), way_out)
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        (token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)
    ]
    for token, kind in added:
        mark = AddedToken(token, special=kind == CONTROL, normalized=False)
        (tokenizer.add_special_tokens if kind == CONTROL else tokenizer.add_tokens)([mark])
    return str(tokenizer.to_str(pretty=True))


def _cut(name: str, way_out: str) -> Any:
    """How text is cut into words before merging."""
    from tokenizers import Regex, pre_tokenizers

    if name in PLAIN:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name in WORDS:
        words = pre_tokenizers.Split(Regex(WORDS[name]), "isolated")
        return pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    known = one_of([*PLAIN, *SINGLE_DIGITS, *WORDS])
    raise JobError(f"tokenizer.ggml.pre = {name!r} is not known, only {known} are; {way_out}")
