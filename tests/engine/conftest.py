"""What the tests of models and engines share."""

import pytest
import torch

from tests.cases.disk import disk  # noqa: F401
from tests.cases.identity import identity  # noqa: F401
from tests.cases.node import deployed  # noqa: F401


@pytest.fixture(autouse=True)
def no_compilation():
    """transformers compiles BitNet's roundings, which takes longer than these tests."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")
