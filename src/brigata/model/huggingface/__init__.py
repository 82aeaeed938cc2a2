"""Checkpoints of Hugging Face's transformers: read into our parts, and written from them."""

from brigata.model.huggingface.convert import export_checkpoint, import_checkpoint
from brigata.model.huggingface.families import FAMILIES

__all__ = ["FAMILIES", "export_checkpoint", "import_checkpoint"]
