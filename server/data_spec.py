"""The data set a configuration describes, as the clients' room knows it."""

from client.data import DataSpec
from server.config import RunConfig


def data_spec(config: RunConfig) -> DataSpec:
    """What :func:`client.data.prepare` needs; refuses nothing itself."""
    data = config.data
    return DataSpec(
        tokenizer=config.model.name,
        clients=config.clients,
        seed=config.seed,
        source=data.source,
        test_source=data.test_source,
        text_column=data.text_column,
        text_pair_column=data.text_pair_column,
        label_column=data.label_column,
        client_column=data.client_column,
        unit_column=data.unit_column,
        task=config.model.task,
        partition=data.partition,
        dirichlet_alpha=data.dirichlet_alpha,
        validation_records=data.validation_records,
        test_records=data.test_records,
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
