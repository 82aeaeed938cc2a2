from collections.abc import Iterator

import pytest
import torch

from pool import Pool

torch.set_num_threads(1)
"""Tests work on tiny tensors, which a second thread makes slower; those on large ones ask for more."""


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool(4)
    yield workers
    workers.close()
