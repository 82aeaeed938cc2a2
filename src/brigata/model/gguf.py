"""GGUF files of llama-family models, dequantised: read with the ``gguf`` package, one tensor at a time."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brigata.describe.errors import JobError, one_of
from brigata.describe.model import ModelSpec
from brigata.model.checkpoint import SOURCE_CONFIG, carry_along, tensor_shapes, write_checkpoint
from brigata.model.gguf_tokenizer import build_tokenizer
from brigata.model.huggingface.convert import Progress, refuse_filled
from brigata.model.huggingface.families import FAMILIES
from brigata.model.tensor_files import compare_names

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""``general.architecture`` -> family."""
PERMUTED = {"llama"}
"""Architectures whose files have the rows of q and k in pairs of neighbours, not of halves."""
BLOCK = {
    "attn_norm.weight": "{mixer}.norm.weight",
    "attn_q.weight": "{mixer}.block.project_in.q.weight",
    "attn_k.weight": "{mixer}.block.project_in.k.weight",
    "attn_v.weight": "{mixer}.block.project_in.v.weight",
    "attn_q.bias": "{mixer}.block.project_in.q.bias",
    "attn_k.bias": "{mixer}.block.project_in.k.bias",
    "attn_v.bias": "{mixer}.block.project_in.v.bias",
    "attn_q_norm.weight": "{mixer}.block.mix.q_norm.weight",
    "attn_k_norm.weight": "{mixer}.block.mix.k_norm.weight",
    "attn_output.weight": "{mixer}.block.project_out.weight",
    "ffn_norm.weight": "{mlp}.norm.weight",
    "ffn_gate.weight": "{mlp}.block.project_in.gate.weight",
    "ffn_up.weight": "{mlp}.block.project_in.up.weight",
    "ffn_down.weight": "{mlp}.block.project_out.weight",
}
"""Tensors of one layer: theirs -> ours. Source of their names: the GGUF specification of the ggml project."""
ENDS = {
    "token_embd.weight": "embed.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "head_loss.weight",
}


class GgufFile:
    """A GGUF file: its metadata, and its tensors as fp32.

    Raises:
        JobError: it cannot be read, or the ``gguf`` package is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError:
            raise JobError("reading GGUF files needs the package gguf; pip install 'brigata[gguf]'") from None
        if not path.is_file():
            raise JobError(f"{str(path)!r} is not there; name a .gguf file")
        try:
            reader = gguf.GGUFReader(path)
        except Exception as error:  # the package raises nothing more precise
            raise JobError(f"{str(path)!r} is no GGUF file: {error}") from None
        self.path = path
        self._dequantize: Callable[..., Any] = gguf.quants.dequantize
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the metadata."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        """The same.

        Raises:
            JobError: it is missing.
        """
        value = self.get(key)
        if value is None:
            raise JobError(f"{str(self.path)!r} has no {key!r} in its metadata")
        return value

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's name and shape, outputs first."""
        return {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}

    def load(self, name: str) -> Tensor:
        """One tensor in fp32."""
        tensor = self._tensors[name]
        try:
            values = self._dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise JobError(
                f"{str(self.path)!r}: tensor {name!r} has the type {kind}, which cannot be read"
            ) from None
        return torch.from_numpy(values.copy()).float().view(self.shapes()[name])


def read_gguf_spec(file: GgufFile) -> tuple[str, ModelSpec]:
    """Family and description of the model in ``file``.

    Raises:
        JobError: its architecture is not known, or it has what cannot be expressed.
    """
    name = file.need("general.architecture")
    if name not in ARCHITECTURES:
        raise JobError(f"general.architecture = {name!r} cannot be read; {one_of(ARCHITECTURES)} can")
    family = ARCHITECTURES[name]
    scaling = file.get(f"{name}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in file.shapes():
        raise JobError(
            f"{str(file.path)!r} stretches its rotary frequencies in a way that GGUF does not name exactly; "
            "import the safetensors release instead"
        )
    hidden, heads = int(file.need(f"{name}.embedding_length")), int(file.need(f"{name}.attention.head_count"))
    tensors = file.shapes()
    return family, ModelSpec(
        pattern="*-" * int(file.need(f"{name}.block_count")),
        hidden=hidden,
        heads=heads,
        kv_heads=int(file.get(f"{name}.attention.head_count_kv", heads)),
        head_dim=int(file.get(f"{name}.attention.key_length", hidden // heads)),
        ffn=int(file.need(f"{name}.feed_forward_length")),
        vocab=tensors["token_embd.weight"][0] if "token_embd.weight" in tensors else 2,
        max_positions=int(file.need(f"{name}.context_length")),
        rope_theta=float(file.get(f"{name}.rope.freq_base", 10_000.0)),
        norm_eps=round(float(file.need(f"{name}.attention.layer_norm_rms_epsilon")), 12),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm=family == "qwen3",
        tie_embeddings="output.weight" not in tensors,
    )


def tensor_names(spec: ModelSpec, found: Mapping[str, object]) -> dict[str, str]:
    """Ours -> theirs, for every tensor of the model."""
    names = {ours: theirs for theirs, ours in ENDS.items() if theirs != "output.weight" or theirs in found}
    for layer in range(len(spec.pattern) // 2):
        places = {"mixer": f"units.{2 * layer}", "mlp": f"units.{2 * layer + 1}"}
        for theirs, ours in BLOCK.items():
            names[ours.format(**places)] = f"blk.{layer}.{theirs}"
    ours = tensor_shapes(spec).keys()
    return {name: foreign for name, foreign in names.items() if name in ours}


def import_gguf(path: Path, folder: Path, progress: Progress | None = None) -> ModelSpec:
    """Make our checkpoint in ``folder`` of the GGUF file ``path``, in fp32, with its tokenizer.

    Raises:
        JobError: the file cannot be read or expressed; ``folder`` is not empty.
    """
    file = GgufFile(path)
    family, spec = read_gguf_spec(file)
    refuse_filled(folder)
    shapes, names = tensor_shapes(spec), tensor_names(spec, file.shapes())
    expected = {names[name]: shape for name, shape in shapes.items()}
    compare_names(file.shapes(), expected, repr(str(path)))
    tokenizer = None if (path.parent / "tokenizer.json").is_file() else build_tokenizer(file)

    def ours() -> Iterator[tuple[str, Tensor]]:
        for name in shapes:
            value = file.load(names[name])
            if family in PERMUTED and name.endswith((".q.weight", ".k.weight")):
                value = _halves(value, spec.head_dim)
            yield name, value
            if progress is not None:
                progress(name, len(shapes))

    write_checkpoint(folder, spec, ours())
    config = FAMILIES[family].write(spec) | {"model_type": family}
    for key in ("bos", "eos", "padding"):
        token = file.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            config[f"{key.removesuffix('ding')}_token_id"] = int(token)
    (folder / SOURCE_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if tokenizer is None:
        carry_along(path.parent, folder)
    else:
        (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    template = file.get("tokenizer.chat_template")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return spec


def _halves(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of every head from pairs of neighbours (2i, 2i + 1) to pairs of halves (i, i + head_dim / 2)."""
    pairs = weight.view(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)
