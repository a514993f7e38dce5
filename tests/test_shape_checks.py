"""The shapes that annotations promise are checked while tests run."""

import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation

from privacy.clipping.norms import FlatClip


def test_a_wrong_shape_is_caught():
    clip = FlatClip(1.0, 3)
    assert clip.encode(torch.ones(2, 3)).shape == (2, 3)
    with pytest.raises(BeartypeCallHintParamViolation, match="rows"):
        clip.encode(torch.ones(3))


def test_the_checks_can_be_put_aside(unchecked_shapes):
    with pytest.raises(ValueError, match="rows"):
        FlatClip(1.0, 3).encode(torch.ones(3))
