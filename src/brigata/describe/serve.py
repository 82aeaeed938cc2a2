"""What is served, for planning: prompts in, tokens out, how many at a time."""

from typing import Literal

from pydantic import Field

from brigata.describe.section import Section


class ServeSpec(Section):
    """Requests of one kind on one replica: ``tp * pp`` devices, with ``dp`` replicas beside each other."""

    prompt: int = Field(gt=0)
    """Tokens of a prompt."""
    output: int = Field(gt=0)
    """Tokens that a request generates."""
    batch: int = Field(default=1, gt=0)
    """Sequences of a replica that are decoded together."""
    mode: Literal["static", "continuous"] = "static"
    """``static``: a batch is prefilled, then decoded to its end. ``continuous``: a new prompt is prefilled
    whenever a sequence ends, between the steps of the others."""
    weights: Literal["16bit", "int8", "fp8", "fp4"] = "16bit"
    """Format of the weights. ``int8`` is for weights alone, products run in 16 bits."""
    cache: Literal["16bit", "fp8"] = "16bit"
    """Format of keys and values that are kept."""
    memory_share: float = Field(default=0.9, gt=0, le=1)
    """Share of the device's memory that weights and caches may take."""

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight; ``fp4`` with a scale for each 16."""
        return {"16bit": 2.0, "int8": 1.0, "fp8": 1.0, "fp4": 0.5625}[self.weights]

    @property
    def cache_bytes(self) -> float:
        """Bytes of an element of the cache."""
        return 2.0 if self.cache == "16bit" else 1.0

    @property
    def precision(self) -> str:
        """Of the products."""
        return {"16bit": "bf16", "int8": "bf16", "fp8": "fp8", "fp4": "fp4"}[self.weights]
