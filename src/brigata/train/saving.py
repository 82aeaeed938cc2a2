"""The weights of a run, whole, whatever the layout they were trained in."""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from brigata.describe.job import Job
from brigata.model.checkpoint import SOURCE_CONFIG, carry_along, write_checkpoint
from brigata.parallel.apply import ParallelModel
from brigata.parallel.sharding import whole_tensor
from brigata.train.tokenizer import tokenizer_path


def save_weights(model: ParallelModel, job: Job, folder: Path, writes: bool) -> None:
    """Write a checkpoint of ``model`` into ``folder``; every rank takes part, the one that ``writes`` writes.

    Memory holds one whole tensor beside a rank's own shares, and the shard that is being written.
    """
    kept = model.module.state_dict().keys()
    named = [
        *model.module.named_parameters(),
        *((n, b) for n, b in model.module.named_buffers() if n in kept),
    ]

    def whole() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named:
            yield name, whole_tensor(tensor)

    if not writes:
        for _ in whole():
            pass
        return
    write_checkpoint(folder, job.model, whole())
    tokenizer = tokenizer_path(job)
    if job.model.path is not None:
        carry_along(Path(job.model.path), folder, {SOURCE_CONFIG: SOURCE_CONFIG})
    if tokenizer is not None and not (folder / "tokenizer.json").exists():
        carry_along(tokenizer.parent, folder, {tokenizer.name: "tokenizer.json"})
