r"""FedSVD: train B only, and turn A towards what was learned by a singular value decomposition after every round.

    U S V^T = svd(B A),    A <- V_r^T,    B <- U_r S_r            B A unchanged, A A^T = I

Reference: Lee et al., "FedSVD" (arXiv 2505.12805); there record-level DP-SGD in each client, here client-level.
Guarantee: what is released is the sum of the clipped updates of B and the heads, sensitivity C; the decomposition is
post-processing of it.
Deviations and remarks: the start (B = 0) is rewritten too, so that A has orthonormal rows from the first round on;
where B A has less than full rank, its right singular vectors are completed to r orthonormal rows of the span of A.
The decomposition never leaves that span: training B alone moves B A inside it. So FedSVD chooses the coordinates in
which B is trained, and with an optimizer that does not care about them (SGD locally, FedAvg or FedAvgM on the server)
it equals FFA-LoRA with an orthonormal A, up to rounding and to the draw of the noise; a test shows it. It differs
under local or server Adam, and from FFA-LoRA with the usual A, whose rows are shorter than 1 and not orthogonal.

The state of the server optimizer has the coordinates of B and moves along: R = A A'^T gives B' = B R, first moments
become m R and second moments v (R o R), exact for momentum and for isotropic second moments.

Cost: QR of A^T and B and a svd of ``[r, r]`` in float64 per pair; the product B A is never formed.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from strategies.adapter.layout import AdapterLayout
from strategies.aggregations.aggregation import Rewritten
from strategies.aggregations.factors import Ffa


@dataclass(frozen=True)
class FedSvd(Ffa):
    """Train B, as :class:`Ffa` does; rewrite A and B by the decomposition of their product."""

    def rewritten(self, adapter: Float[Tensor, " size"], layout: AdapterLayout) -> Rewritten | None:
        """Rewrite A and B by the decomposition of B A; ValueError if a layer is smaller than the rank: it has no
        ``rank`` orthonormal directions.
        """
        result, turns = adapter.clone(), {}
        a = {entry.pair: entry for entry in layout.entries if entry.factor == "A"}
        for entry in layout.entries:
            if entry.factor == "B":
                old_a = a[entry.pair].of(adapter).double()
                new_b, new_a = by_singular_values(entry.of(adapter).double(), old_a)
                a[entry.pair].of(result).copy_(new_a)
                entry.of(result).copy_(new_b)
                turns[entry.pair] = (old_a @ new_a.T).to(adapter.dtype)
        return Rewritten(result, turns)


def by_singular_values(
    b: Float[Tensor, "out r"], a: Float[Tensor, "r in"]
) -> tuple[Float[Tensor, "out r"], Float[Tensor, "r in"]]:
    """B' = U S and A' = V^T of B A = U S V^T, in descending order of singular values; A' has orthonormal rows."""
    rank = a.shape[0]
    if rank > min(b.shape[0], a.shape[1]):
        raise ValueError(
            f"rank {rank} is above the {min(b.shape[0], a.shape[1])} rows or columns of an adapted layer: fedsvd needs "
            "as many orthonormal directions as ranks; lower model.rank"
        )
    left, left_triangle = torch.linalg.qr(b)
    right, right_triangle = torch.linalg.qr(a.T)
    u, singular, v = torch.linalg.svd(left_triangle @ right_triangle.T)
    return left @ (u * singular), v @ right.T
