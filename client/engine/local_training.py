"""The ``[local]`` table of a run: one client's training in one round."""

from typing import Literal

from client.settings import Count, CountOrAuto, Fraction, NonNegative, Positive, Table

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8
"""Of ``"adamw"``: the defaults of `torch.optim.AdamW`."""


class PreferenceLoss(Table):
    """The loss on pairs of answers (``model.task = "preference"``), see :class:`client.models.tasks.Preference`.

    Attributes:
        loss: ``dpo`` compares the model with the one it began as (Rafailov et al. 2023); ``simpo`` needs no other model
            (Meng et al. 2024).
        beta: scale of the margin between the two answers; 0 takes the paper's, 0.1 with ``dpo`` and 2 with ``simpo``.
        gamma: margin that ``simpo`` asks for.
    """

    loss: Literal["dpo", "simpo"] = "dpo"
    beta: NonNegative = 0.0
    gamma: NonNegative = 1.0


class LocalTraining(Table):
    """The work of each client on its records between receiving the adapter and sending its update.

    The loss of a step is the mean over the records of its batch. The optimizers are those of `torch.optim` with the
    same defaults and start fresh in every round.

    Attributes:
        optimizer: optimizer of a client's steps; ``momentum`` is heavy ball, as in `torch.optim.SGD`.
        learning_rate: learning rate of a client's steps, constant over the round.
        batch_size: records in a step; the last step of an epoch takes the rest.
        epochs: passes over the client's records, each in a new order.
        max_steps: most steps of a client in a round; 0 runs all epochs. The default keeps a client with very many
            records from holding up its worker. With 1 a client takes one batch of its records, drawn anew in every
            round, which costs a fraction of the time where they are many.
        momentum: momentum of the optimizer of that name.
        weight_decay: weight decay: L2 added to the gradient (sgd, momentum), decoupled (adamw).
        balance: correction of the loss for the client's label skew: ``prior`` makes it, and is wrong where the test set
            is skewed too. See :class:`client.models.tasks.SequenceClassification`.
    """

    optimizer: Literal["sgd", "momentum", "adamw"] = "sgd"
    learning_rate: Positive = 0.1
    batch_size: Count = 16
    epochs: Count = 1
    max_steps: CountOrAuto = 1000
    momentum: Fraction = 0.9
    weight_decay: NonNegative = 0.0
    balance: Literal["none", "prior"] = "none"
    preference: PreferenceLoss = PreferenceLoss()
