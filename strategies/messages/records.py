"""Reading Flower records that somebody else wrote: what is wrong is named, and nothing of it is repeated."""

import io
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict


class BadMessage(ValueError):
    """A message that does not have the form it must have."""


def exactly(records: RecordDict, *names: str) -> None:
    """Refuse a message that holds other records than these: what nobody asked for is not carried along."""
    if len(records) != len(names) or set(records) != set(names):
        raise BadMessage(f"message must hold the records {sorted(names)} and no others")


def config_of(records: RecordDict) -> ConfigRecord:
    """The record of settings."""
    config = records.config_records.get("config")
    if config is None:
        raise BadMessage("message has no record 'config'")
    return config


def arrays_of(records: RecordDict) -> ArrayRecord:
    """The record of arrays."""
    arrays = records.array_records.get("arrays")
    if arrays is None:
        raise BadMessage("message has no record 'arrays'")
    return arrays


def read_setting(config: ConfigRecord, name: str, kind: type) -> Any:
    """A setting of exactly this type."""
    value = config.get(name)
    if type(value) is not kind:
        raise BadMessage(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    return value


def vector(records: RecordDict, name: str, dtype: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """A vector that says of itself what it is: the bytes are compared with the one header it can have, not parsed."""
    array = arrays_of(records).get(name)
    if array is None:
        raise BadMessage(f"message has no array {name!r}")
    if array.dtype != dtype or array.stype != "numpy.ndarray" or len(array.shape) != 1 or array.shape[0] < 0:
        raise BadMessage(f"array {name!r} must be a vector of {dtype}")
    if shape is not None and tuple(array.shape) != shape:
        raise BadMessage(f"array {name!r} must have shape {shape}, it has another")
    header = _npy_header(int(array.shape[0]), dtype)
    if len(array.data) != len(header) + int(array.shape[0]) * np.dtype(dtype).itemsize:
        raise BadMessage(f"array {name!r} does not hold as many bytes as its shape says")
    if not array.data.startswith(header):
        raise BadMessage(f"array {name!r} is not what its header says")
    return np.frombuffer(array.data, dtype, offset=len(header)).copy()


def model_arrays(adapter: np.ndarray, residual: np.ndarray | None) -> dict[str, Array]:
    """The global model as it is sent: the adapter, and what the base's weights are moved by if they are."""
    arrays = {"adapter": Array(adapter.astype(np.float32))}
    return arrays if residual is None else arrays | {"residual": Array(residual.astype(np.float32))}


def residual_of(records: RecordDict) -> np.ndarray | None:
    """Read the residual that :func:`model_arrays` sent; None if there is none."""
    return vector(records, "residual", "float32") if "residual" in arrays_of(records) else None


def _npy_header(length: int, dtype: str) -> bytes:
    """What numpy writes before the values of a vector (format 1.0; Flower's arrays are .npy files)."""
    header = io.BytesIO()
    description = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(header, description)
    return header.getvalue()
