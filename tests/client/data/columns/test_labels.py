"""Labels: the same class on the server and on every node, whatever the format of the file; missing ones are refused."""

import json

import pandas
import pytest

from client.data.columns.labels import class_ids, class_names, count_missing
from client.data.local import label_ids
from client.data.sources import read
from client.data.spec import Reading


def test_classes_are_numbered_in_sorted_order():
    assert class_names(["no", "yes", "no"], "here") == ["no", "yes"]
    assert class_ids(["yes", "no"], ["no", "yes"], "here").tolist() == [1, 0]
    assert class_names([10, 2, 2.0], "here") == ["2", "10"]
    assert class_names([True, False], "here") == ["false", "true"]
    assert class_names(["yes", "no ", " yes", "no"], "here") == ["no", "yes"]
    assert class_ids([" yes", "no "], ["no", "yes"], "here").tolist() == [1, 0]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, None], "1 of 2 rows have no label"),
        ([0.0, float("nan")], "1 of 2 rows have no label"),
        (["a", " ", "b", ""], "2 of 4 rows have no label"),
        (["0", "1", "NA"], "1 of 3 rows have no label"),
        ([0, -1], "label -1 is negative; this looks like an unlabelled test file"),
        ([0.5, 1.0], "must be integers or strings, got 2 different fractions in 2 rows"),
        (["0.5", "1.0", "2.25"], "must be integers or strings, got 3 different fractions in 3 rows"),
        ([1, 1], "there are 1 different labels"),
    ],
)
def test_bad_labels_are_refused(labels, message):
    with pytest.raises(ValueError, match=message):
        class_names(labels, "data.source = 'x'")


def test_labels_of_no_class_are_refused():
    with pytest.raises(ValueError, match=r"^there: .*'c'.* training data"):
        class_ids(["a", "c"], ["a", "b"], "there")
    assert class_ids(["True", "1.0"], ["1", "true"], "spelled otherwise").tolist() == [1, 0]


def test_names_of_nothing_are_missing_only_beside_numbers():
    assert count_missing(["7", "NA", "nan", ""]) == 3
    assert count_missing(["NA", "DE", ""]) == 1  # Namibia
    assert count_missing(["NA", "NA"]) == 2
    assert count_missing(["3", "4.5", "nan"]) == 1


def test_a_node_may_have_records_of_one_class_only():
    assert label_ids(["NA", "NA"], ("DE", "NA")).tolist() == [1, 1]


def _read(folder, kind, name, labels):
    frame = pandas.DataFrame({"text": [f"record {row}" for row in range(len(labels))], "label": labels})
    path = folder / f"{name}.{kind}"
    match kind:
        case "csv":
            frame.to_csv(path, index=False)
        case "parquet":
            frame.to_parquet(path)
        case _:
            path.write_text("".join(json.dumps(row) + "\n" for row in frame.to_dict("records")))
    return read(f"{kind}:{path}", Reading(text_column="text", label_column="label")).labels


FORMATS = ("csv", "parquet", "jsonl")


@pytest.mark.parametrize("there", FORMATS)
@pytest.mark.parametrize("here", FORMATS)
@pytest.mark.parametrize(
    ("all_labels", "own", "names", "ids"),
    [
        ([1, 0, 10, 2, 11], [10, 1], ["0", "1", "2", "10", "11"], [3, 1]),
        ([1.0, 0.0, 10.0, 2.0], [10.0], ["0", "1", "2", "10"], [3]),
        ([0, 1], [1.0, 0.0], ["0", "1"], [1, 0]),
        ([True, False], [False], None, [0]),
        (["V58", "038", "401"], ["038"], ["038", "401", "V58"], [0]),
        (["V58", "038", "401"], ["401"], ["038", "401", "V58"], [1]),
        (["250.10", "V58", "250.00"], ["250.10", "250.00"], ["250.00", "250.10", "V58"], [1, 0]),
    ],
)
def test_files_of_every_format_agree(tmp_path, here, there, all_labels, own, names, ids):
    classes = class_names(_read(tmp_path, here, "all", all_labels), "here")
    assert names is None or classes == names
    node = _read(tmp_path, there, "own", own)
    assert label_ids(node, tuple(classes)).tolist() == ids
    assert class_ids(node, classes, "a test file").tolist() == ids


def test_a_node_refuses_rows_without_a_label():
    with pytest.raises(ValueError, match=r"data: 1 of 2 .*label"):
        label_ids(["a", " "], ("a", "b"))
