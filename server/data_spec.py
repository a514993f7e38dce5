"""The data set a configuration describes, as the clients' room knows it."""

from collections.abc import Sequence

from client.data import DataSpec
from client.own_data import Reading
from client.sources import NOTES
from server.config import RunConfig


def data_spec(config: RunConfig) -> DataSpec:
    """What :func:`client.data.prepare` needs; refuses nothing itself.

    Where the nodes hold the records, what the public source has beyond the validation and the test set is not used.
    """
    data = config.data
    return DataSpec(
        tokenizer=config.model.name,
        clients=1 if config.deployed else config.clients,
        seed=config.seed,
        source=data.source,
        test_source=data.test_source,
        text_column=data.text_column,
        text_pair_column=data.text_pair_column,
        label_column=data.label_column,
        client_column=data.client_column,
        unit_column="" if config.deployed else data.unit_column,
        task=config.model.task,
        least_words=0 if config.deployed and data.source == NOTES else data.least_words,
        whole_units=config.privacy.unit == "group" and not config.alone,
        partition="iid" if config.deployed else data.partition,
        dirichlet_alpha=data.dirichlet_alpha,
        validation_records=data.validation_records,
        test_records=data.test_records,
        test_limit=data.test_limit,
        train_records=data.train_records,
        records_per_client=data.records_per_client,
        canaries=data.canaries,
        canary_kind=data.canary_kind,
        canary_copies=data.canary_copies,
        sensitive=data.sensitive,
        detector=data.detector,
        mask=data.mask,
        other_weight=data.other_weight,
        max_length=config.model.max_length,
        cache=data.cache,
    )


def reading(config: RunConfig, labels: Sequence[str]) -> Reading | None:
    """How nodes read records of their own; None where the server's host holds everybody's."""
    if not config.deployed:
        return None
    data, classifies = config.data, config.model.task == "classification"
    return Reading(
        task=config.model.task,
        max_length=config.model.max_length,
        text_column=data.text_column,
        text_pair_column=data.text_pair_column,
        label_column=data.label_column if classifies else "",
        unit_column=data.unit_column,
        least_words=data.least_words,
        labels=tuple(labels) if classifies else (),
    )
