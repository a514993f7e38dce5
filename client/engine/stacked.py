"""Adapters of many clients on one frozen base: the rows of a micro-batch meet the parameters of their own client.

    y = x W^T + b + s (x A_k^T) B_k^T          for the rows of client k

The frozen weight multiplies all rows at once; only the thin adapter products are batched by client. Three products are
enough, forwards and backwards, because B is kept transposed (`[rank, out]`), like A (`[rank, in]`):

    project(x, F) = x F^T        expand(u, F) = u F        outer(u, x) = u^T x   (added to the client's gradient)

Gradients are written into the stacked buffers at once: no gradient tensor per client, no zeroing pass per module, and
frozen layers save nothing for the backward pass. The same code gives per-record gradients: there every row owns a
gradient buffer while all rows share one adapter.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from client.models.frozen.kernels import FrozenWeight, add_shared_expansion, shared_product


@dataclass(frozen=True)
class Rows:
    """The parameters and the gradient buffer that each row of a micro-batch uses.

    The rows come in `groups` of equal size, one after the other; group `g` belongs to `slots[g]`.

    Attributes:
        slots: int64 `[groups]`; None where all rows share one adapter.
        first: set if the slots are `first, first + 1, ...`: then a slice does, without gathering.
        own_gradient: the gradient of group g goes to buffer g, not to that of its slot.
    """

    count: int
    groups: int
    slots: Tensor | None = None
    first: int | None = None
    own_gradient: bool = False

    @staticmethod
    def share_adapter(count: int) -> "Rows":
        """All rows use the one shared adapter; no gradients."""
        return Rows(count, 1)

    @staticmethod
    def per_record(count: int, slots: Tensor | None = None) -> "Rows":
        """The gradient of row i goes to buffer i; parameters are shared, or those of `slots` (one per row)."""
        return Rows(count, count, slots, own_gradient=True)

    @staticmethod
    def of_slots(slots: Tensor, whole: bool) -> "Rows":
        """Rows of several slots; `slots` (int64, one per row, on the CPU) must be sorted.

        `whole`: every slot has as many rows as the others and all of them here, so that one product serves each.
        """
        count = len(slots)
        if whole:
            owners = torch.unique_consecutive(slots)
            low, high = int(owners[0]), int(owners[-1])
            return Rows(count, len(owners), owners, low if high - low + 1 == len(owners) else None)
        return Rows(count, count, slots)

    def to(self, device: torch.device) -> "Rows":
        if self.slots is None or self.slots.device == device:
            return self
        return replace(self, slots=self.slots.to(device))

    def pick(self, stacked: Float[Tensor, "slots out in"]) -> Float[Tensor, "groups out in"]:
        """The factor of each group's client."""
        if self.first is not None:
            return stacked[self.first : self.first + self.groups]
        assert self.slots is not None
        return stacked.index_select(0, self.slots)


def project(x: Tensor, factor: Tensor, rows: Rows) -> Tensor:
    """Multiply the rows by the factor: `x F^T`.

    X `[tokens, in]`, F `[out, in]` shared or `[slots, out, in]` stacked -> `[tokens, out]`.
    """
    if factor.dim() == 2:
        return shared_product(x, factor.to(x.dtype))
    grouped = x.view(rows.groups, -1, x.shape[-1])
    return torch.bmm(grouped, rows.pick(factor).to(x.dtype).transpose(1, 2)).view(-1, factor.shape[1])


def add_expansion(y: Tensor, u: Tensor, factor: Tensor, rows: Rows) -> None:
    """`y += u F`, in place; u `[tokens, out]`, F as in `project`, y `[tokens, in]`."""
    if factor.dim() == 2:
        add_shared_expansion(y, u, factor.to(y.dtype))
        return
    grouped = u.view(rows.groups, -1, u.shape[-1])
    y.view(rows.groups, -1, y.shape[-1]).baddbmm_(grouped, rows.pick(factor).to(y.dtype))


class Gradient:
    """The buffer that takes the gradient of one factor: `values` `[slots or records, out, in]`.

    `fresh` buffers hold nothing yet: the first product overwrites them, which spares filling them with zeros.
    """

    def __init__(self, values: Tensor, *, fresh: bool = False) -> None:
        self.values = values
        self.fresh = fresh

    def add_outer(self, u: Tensor, x: Tensor, rows: Rows) -> None:
        """`values[k] += u_k^T x_k` over the rows of each slot k, in the dtype of the buffer."""
        values = self.values
        u, x = u.to(values.dtype), x.to(values.dtype)
        left, right = u.view(rows.groups, -1, u.shape[-1]).transpose(1, 2), x.view(rows.groups, -1, x.shape[-1])
        if rows.own_gradient:
            if self.fresh:
                torch.bmm(left, right, out=values[: rows.groups])
            else:
                values[: rows.groups].baddbmm_(left, right)
            self.fresh = False
        elif rows.first is not None:
            values[rows.first : rows.first + rows.groups].add_(torch.bmm(left, right))
        else:
            assert rows.slots is not None
            values.index_add_(0, rows.slots, torch.bmm(left, right))


class Adapted(nn.Module):
    """A frozen Linear with a stacked adapter. `a`, `b` (transposed B) and their gradients are set by the engine."""

    def __init__(self, weight: FrozenWeight, scale: float, context: "Context") -> None:
        super().__init__()
        self.weight_ = weight
        self.scale = scale
        self.context = context
        self.a = self.b = torch.empty(0)
        self.gradient_a: Gradient | None = None
        self.gradient_b: Gradient | None = None

    def forward(self, x: Tensor) -> Tensor:
        count, flat = self.context.rows.count, x.dim() == 2 and x.shape[0] == self.context.tokens
        if x.shape[0] != count and not flat:
            # An adapter of each client's own cannot act on what all records share, such as a table of positions.
            raise ValueError(
                f"model.targets names a layer that this model also uses on {tuple(x.shape)}, which is not of the "
                f"{count} records it is given; name other layers"
            )
        arguments = x, self.context.anchor, self, self.context.rows
        result: Tensor = _AdaptedFunction.apply(*arguments)  # type: ignore[no-untyped-call]
        return result


class TrainedHead(nn.Module):
    """A Linear trained in full, one copy per client: `weight` `[slots, out, in]`, `bias` `[slots, 1, out]`."""

    def __init__(self, context: "Context") -> None:
        super().__init__()
        self.context = context
        self.weight_ = torch.empty(0)
        self.bias_: Tensor | None = None
        self.gradient_weight: Gradient | None = None
        self.gradient_bias: Gradient | None = None

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _HeadFunction.apply(x, self.context.anchor, self, self.context.rows)  # type: ignore[no-untyped-call]
        return result


class Context:
    """The facts the engine tells its modules before each forward pass: its rows, and how many tokens they have, padding
    too.

    `anchor` makes autograd run the backward pass.
    """

    def __init__(self, device: torch.device) -> None:
        self.anchor = torch.zeros(0, device=device, requires_grad=True)
        self.rows, self.tokens = Rows.share_adapter(0), 0


class _AdaptedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: Adapted, rows: Rows) -> Tensor:
        y = layer.weight_.forward(x)
        flat = x.reshape(-1, x.shape[-1]).to(y.dtype)  # behind an activation x may be bfloat16, see `frozen`
        u = project(flat, layer.a, rows).mul_(layer.scale)
        add_expansion(y.view(-1, y.shape[-1]), u, layer.b, rows)
        ctx.save_for_backward(flat if layer.gradient_a is not None else None, u)
        ctx.layer, ctx.rows = layer, rows
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, u = ctx.saved_tensors
        layer, rows = ctx.layer, ctx.rows
        flat = dy.reshape(-1, dy.shape[-1])
        if layer.gradient_b is not None:
            layer.gradient_b.add_outer(u, flat, rows)
        needs_dx = ctx.needs_input_grad[0]
        if not needs_dx and layer.gradient_a is None:
            return None, None, None, None
        du = project(flat, layer.b, rows).mul_(layer.scale)
        if layer.gradient_a is not None:
            layer.gradient_a.add_outer(du, x, rows)
        if not needs_dx:
            return None, None, None, None
        dx = layer.weight_.backward(dy).to(dy.dtype)
        add_expansion(dx.view(-1, dx.shape[-1]), du, layer.a, rows)
        return dx, None, None, None


class _HeadFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, head: TrainedHead, rows: Rows) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        y = project(flat, head.weight_, rows)
        if head.bias_ is not None:
            bias = head.bias_.to(y.dtype)
            if bias.dim() == 2:
                y.add_(bias)
            else:
                y.view(rows.groups, -1, y.shape[-1]).add_(rows.pick(bias))
        ctx.save_for_backward(flat)
        ctx.head, ctx.rows = head, rows
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        head, rows = ctx.head, ctx.rows
        flat = dy.reshape(-1, dy.shape[-1])
        if head.gradient_weight is not None:
            head.gradient_weight.add_outer(flat, x, rows)
        if head.gradient_bias is not None:
            head.gradient_bias.add_outer(flat.new_ones(len(flat), 1), flat, rows)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        dx = torch.zeros_like(x)
        add_expansion(dx, flat, head.weight_, rows)
        return dx.view(*dy.shape[:-1], -1), None, None, None
