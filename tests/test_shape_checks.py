"""The shapes that annotations promise are checked while tests run."""

import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation, BeartypeCallHintReturnViolation
from jaxtyping import Float, jaxtyped
from torch import Tensor

from privacy.clipping.norms import FlatClip


def test_a_wrong_shape_is_caught():
    clip = FlatClip(1.0, 3)
    assert clip.encode(torch.ones(2, 3)).shape == (2, 3)
    with pytest.raises(BeartypeCallHintParamViolation, match="rows"):
        clip.encode(torch.ones(3))


def test_the_checks_can_be_put_aside(unchecked_shapes):
    with pytest.raises(ValueError, match="rows"):
        FlatClip(1.0, 3).encode(torch.ones(3))


def test_another_result_for_shapes_that_have_passed_is_caught():
    results = [torch.ones(2), torch.ones(2), torch.ones(3), torch.ones(2), torch.ones(2, dtype=torch.int64)]

    @jaxtyped(typechecker=None)
    def the_next(like: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return results.pop(0)

    for result in list(results):
        if result.dtype.is_floating_point and len(result) == 2:
            assert the_next(torch.zeros(2)) is result
        else:
            with pytest.raises(BeartypeCallHintReturnViolation):
                the_next(torch.zeros(2))
    results.append(torch.ones(2))
    with pytest.raises(BeartypeCallHintParamViolation):
        the_next(torch.zeros(2, 1))
