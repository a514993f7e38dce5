"""What all tests of the clients' room share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def no_compilation():
    """transformers compiles BitNet's roundings, which takes longer than these tests."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")
