"""Prepared data: what goes in comes out, parts never meet, the cache is safe to share."""

import inspect
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pandas
import pytest

from client.data.catalog.notes import split
from client.data.prepare import prepare
from client.data.prepared import PARTS, PreparedData
from client.data.spec import DataSpec
from client.models.base import load_tokenizer
from privacy import durable


@pytest.fixture
def spec(tmp_path):
    return DataSpec(
        tokenizer="random:bert",
        clients=12,
        seed=5,
        validation_records=30,
        test_records=30,
        records_per_client=10,
        cache=str(tmp_path / "cache"),
    )


def _texts(records, tokenizer):
    rows = np.split(np.asarray(records.tokens), np.asarray(records.offsets)[1:-1])
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


def test_notes_round_trip(spec):
    data = prepare(spec)
    tokenizer = load_tokenizer(spec.tokenizer)
    train, validation, test = split(120, 30, 30, seed=5)
    for records, notes in ((data.validation, validation), (data.test, test)):
        assert [text[:60] for text in _texts(records, tokenizer)] == [note.text[:60] for note in notes]
        assert records.labels.tolist() == [note.label for note in notes]
    assert (data.num_clients, data.num_labels, data.label_names) == (12, 2, ("routine", "urgent"))
    clients = [data.client(i) for i in range(12)]
    owned = [pair for c in clients if len(c) for pair in zip(_texts(_copy(c), tokenizer), c.labels, strict=True)]
    assert sorted((text[:60], label) for text, label in owned) == sorted((n.text[:60], n.label) for n in train)
    assert data.client_tokens.tolist() == [int(c.lengths.sum()) for c in clients]
    assert data.meta["records"] == {"train": 120, "validation": 30, "test": 30}
    assert data.meta["truncated"]["train"] == sum(len(note.text.encode()) > 126 for note in train) > 0


def _copy(records):
    return records.select(np.arange(len(records)))


def test_client_records_are_views_of_the_file(spec):
    data = prepare(spec)
    biggest = int(np.argmax(data.client_tokens))
    records = data.client(biggest)
    assert np.shares_memory(records.tokens, data.train.tokens)
    assert isinstance(data.train.tokens, np.memmap)
    with pytest.raises(ValueError, match=r"client .*\[0, 12\), got 12"):
        data.client(12)


def test_second_call_opens_and_other_settings_build_anew(spec):
    first = prepare(spec)
    stamp = (first.folder / "meta.json").stat().st_mtime_ns
    first.folder.chmod(0o755)  # as an older version, or a copy, left it
    assert prepare(spec).folder == first.folder
    assert first.folder.stat().st_mode & 0o777 == 0o700
    assert (first.folder / "meta.json").stat().st_mtime_ns == stamp
    for change in ({"seed": 6}, {"max_length": 64}, {"clients": 11}, {"dirichlet_alpha": 2.0}):
        assert prepare(spec.replace(**change)).folder != first.folder
    hidden = [entry.name for entry in first.folder.parent.iterdir() if entry.name.startswith(".")]
    assert hidden == [durable.NAMES_KEY]


def test_whoever_guesses_the_records_cannot_tell_by_the_name_of_their_folder(spec, tmp_path):
    first, elsewhere = prepare(spec), prepare(spec.replace(cache=str(tmp_path / "elsewhere" / "cache")))
    assert first.meta == elsewhere.meta
    assert first.folder.name != elsewhere.folder.name
    digests = [first.meta["digest"], first.meta["source"], *first.meta["files"].values()]
    assert not [digest for digest in digests if digest[:8] in first.folder.name]
    assert (first.folder.parent / durable.NAMES_KEY).stat().st_mode & 0o777 == 0o600
    for folder in (first.folder, elsewhere.folder, elsewhere.folder.parent, elsewhere.folder.parent.parent):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_changed_generator_does_not_find_the_old_data(spec, monkeypatch):
    before = prepare(spec).folder
    source = inspect.getsource

    def edited(module):
        return source(module) + ("# edited" if module.__name__ == "client.data.catalog.notes" else "")

    monkeypatch.setattr(inspect, "getsource", edited)
    assert prepare(spec).folder != before


def test_two_processes_may_build_at_once(spec):
    spec = spec.replace(partition="iid", records_per_client=40)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()

    def build():
        barrier.wait(60)
        results.put(str(prepare(spec).folder))

    running = [context.Process(target=build) for _ in range(2)]
    for process in running:
        process.start()
    folders = {results.get(timeout=60) for _ in running}
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0, 0]
    assert len(folders) == 1
    assert PreparedData.open(folders.pop(), verify=True).num_clients == 12
    assert len(list(Path(spec.cache).glob("*/meta.json"))) == 1


def test_losing_the_race_to_build_takes_the_winners_data(spec, monkeypatch):
    from client.data import prepare as preparing

    write = preparing._write

    def slower(*given):
        monkeypatch.setattr(preparing, "_write", write)
        prepare(spec)  # another process finishes in between
        write(*given)

    monkeypatch.setattr(preparing, "_write", slower)
    assert prepare(spec).num_clients == 12
    assert len(list(Path(spec.cache).glob("*/meta.json"))) == 1


def test_damaged_cache_is_refused(spec):
    folder = prepare(spec).folder
    with (folder / "train_tokens.npy").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    with pytest.raises(ValueError, match=r"train_tokens\.npy .*delete"):
        prepare(spec)
    with pytest.raises(ValueError, match="not a prepared data set"):
        PreparedData.open(folder.parent)


@pytest.fixture
def table(tmp_path):
    words = [f"record number {i}" for i in range(300)]
    frame = pandas.DataFrame(
        {"words": [*words, *words[:20]], "y": ["no", "yes"] * 160, "who": [f"p{i % 25}" for i in range(320)]}
    )
    frame.to_parquet(tmp_path / "train.parquet")
    official = pandas.DataFrame({"words": [*words[:5], "never seen"], "y": ["no", "yes"] * 3})
    official.to_parquet(tmp_path / "official.parquet")
    return tmp_path


def _file_spec(spec, table, **change):
    settings = {"source": f"parquet:{table / 'train.parquet'}", "text_column": "words", "label_column": "y", **change}
    return spec.replace(**settings)


def test_carved_parts_never_meet(spec, table):
    data = prepare(_file_spec(spec, table))
    tokenizer = load_tokenizer(spec.tokenizer)
    train, validation, test = (set(_texts(part, tokenizer)) for part in (data.train, data.validation, data.test))
    assert not train & validation
    assert not train & test
    assert not validation & test
    assert len(data.test) == 30
    assert len(data.validation) == 30 - data.meta["removed"]["validation"]
    assert len(data.train) == 260 - data.meta["removed"]["train"]
    assert data.label_names == ("no", "yes")


def test_any_part_of_the_public_records_is_like_the_others_though_the_source_is_sorted(spec, table):
    frame = pandas.read_parquet(table / "train.parquet").sort_values("y", kind="stable")
    frame.to_parquet(table / "train.parquet")
    labels = prepare(_file_spec(spec, table, validation_records=100)).validation.labels
    assert 0.25 < np.mean(labels[: len(labels) // 2]) < 0.75


def test_short_records_are_left_out_but_of_the_official_test_file(spec, table):
    short = pandas.DataFrame({"words": ["oh no", "no"] * 4, "y": ["no", "yes"] * 4, "who": "p0"})
    pandas.concat([pandas.read_parquet(table / "train.parquet"), short]).to_parquet(table / "train.parquet")
    official = f"parquet:{table / 'official.parquet'}"
    every, long = (prepare(_file_spec(spec, table, test_source=official, least_words=words)) for words in (0, 3))
    tokenizer = load_tokenizer(spec.tokenizer)
    assert {"oh no", "no"} <= {*_texts(every.train, tokenizer), *_texts(every.validation, tokenizer)}
    assert all(len(text.split()) == 3 for part in (long.train, long.validation) for text in _texts(part, tokenizer))
    assert _texts(long.test, tokenizer) == _texts(every.test, tokenizer)
    assert "never seen" in _texts(long.test, tokenizer)
    assert long.meta["removed"]["empty"] == 8


def test_official_test_file_is_only_the_test_set(spec, table):
    data = prepare(_file_spec(spec, table, test_source=f"parquet:{table / 'official.parquet'}"))
    tokenizer = load_tokenizer(spec.tokenizer)
    assert _texts(data.test, tokenizer) == [*(f"record number {i}" for i in range(5)), "never seen"]
    others = {*_texts(data.train, tokenizer), *_texts(data.validation, tokenizer)}
    assert not others & set(_texts(data.test, tokenizer))
    assert data.meta["removed"]["train"] + data.meta["removed"]["validation"] >= 10


def test_public_records_of_their_own_leave_every_client_to_train_on(spec, table):
    public = [f"public number {i}" for i in range(30)] + ["record number 7", "record number 8"]
    pandas.DataFrame({"words": public, "y": ["no", "yes"] * 16}).to_parquet(table / "public.parquet")
    tokenizer, place = load_tokenizer(spec.tokenizer), f"parquet:{table / 'public.parquet'}"
    whole, fewer, again, other = (
        prepare(_file_spec(spec, table, validation_source=place, validation_records=most, seed=seed))
        for most, seed in ((1000, 0), (9, 0), (9, 0), (9, 1))
    )
    shown = _texts(whole.validation, tokenizer)
    assert sorted(shown) == sorted(set(public) - set(_texts(whole.test, tokenizer)))
    assert shown != public[: len(shown)], "the first may be trained on: the order is drawn"
    assert _texts(fewer.validation, tokenizer) == _texts(again.validation, tokenizer)
    assert _texts(fewer.validation, tokenizer) != _texts(other.validation, tokenizer)
    assert not set(_texts(whole.train, tokenizer)) & set(public), "what is public is nobody's to protect"
    assert whole.meta["read"]["validation-source"] == 32
    assert len(whole.train) + len(whole.test) + whole.meta["removed"]["train"] == 320
    kept = prepare(_file_spec(spec, table))
    assert "validation_source" not in kept.meta["spec"], "older prepared data keep their names"


def test_a_limited_test_set_is_a_part_of_the_official_one_and_the_same_for_every_seed(spec, table):
    official = f"parquet:{table / 'official.parquet'}"
    tokenizer = load_tokenizer(spec.tokenizer)
    limited = [prepare(_file_spec(spec, table, test_source=official, test_limit=3, seed=seed)) for seed in (0, 1)]
    first, second = (_texts(data.test, tokenizer) for data in limited)
    assert first == second
    assert len(first) == 3
    assert set(first) < set(_texts(prepare(_file_spec(spec, table, test_source=official)).test, tokenizer))


def test_natural_clients_are_held_out_whole(spec, table):
    with pytest.raises(ValueError, match=r"clients = 12, but .* names (\d+) clients .*set clients = \1"):
        prepare(_file_spec(spec, table, partition="natural", client_column="who"))
    data = prepare(_file_spec(spec, table, partition="natural", client_column="who", clients=19))
    tokenizer = load_tokenizer(spec.tokenizer)
    frame = pandas.read_parquet(table / "train.parquet")
    owner = frame.groupby("words")["who"].agg(set)
    people = [
        {who for text in set(_texts(part, tokenizer)) for who in owner[text]} for part in (data.validation, data.test)
    ]
    assert len(people[0]) + len(people[1]) == 6  # 3 clients of 12 or 13 records each reach 30 records
    sizes = frame[~frame["who"].isin(people[0] | people[1])].groupby("who").size()
    assert [len(data.client(i)) for i in range(19)] == (sizes.sort_index() - _repeats(frame, people)).tolist()


def _repeats(frame, people):
    """Per remaining client, records whose text a held-out client has too."""
    held = set(frame[frame["who"].isin(people[0] | people[1])]["words"])
    rest = frame[~frame["who"].isin(people[0] | people[1])]
    return rest["words"].isin(held).groupby(rest["who"]).sum().sort_index()


def test_language_model_data_has_no_labels_and_ends_every_record_that_is_not_cut(spec, table):
    lm = _file_spec(spec, table, task="causal-lm", partition="iid", tokenizer="random:llama", max_length=12)
    data = prepare(lm)
    assert data.num_labels == 0
    assert data.train.labels is None
    assert data.client(3).labels is None
    end = load_tokenizer("random:llama").eos_token_id
    assert end not in np.asarray(data.train.tokens)
    assert data.train.lengths.max() == 12
    assert data.meta["truncated"]["train"] == len(data.train)
    whole = prepare(lm.replace(max_length=128))
    assert whole.meta["truncated"]["train"] == 0
    assert set(np.asarray(whole.train.tokens)[np.asarray(whole.train.offsets)[1:] - 1]) == {end}


def test_the_name_does_not_depend_on_what_the_process_prepared_before(spec):
    first = prepare(spec).folder
    prepare(spec.replace(max_length=9))  # leaves its truncation in the tokenizer, which is kept
    assert prepare(spec).folder == first


def test_pairs_share_one_record(spec, table):
    frame = pandas.read_parquet(table / "train.parquet")
    frame["second"] = "premise of " + frame["words"]
    frame.to_parquet(table / "train.parquet")
    data = prepare(_file_spec(spec, table, text_pair_column="second"))
    first = _texts(_copy(data.test), load_tokenizer(spec.tokenizer))[0]
    assert "premise of record number" in first


def test_a_pair_is_known_by_both_its_texts(spec, table):
    """The same premise may stand in two parts with other hypotheses; the same pair may not."""
    train = pandas.read_parquet(table / "train.parquet")
    train["second"] = [f"hypothesis {row}" for row in range(len(train))]
    held = train.iloc[[0, 1]].copy()
    held.loc[held.index[1], "second"] = "another hypothesis"
    train.to_parquet(table / "train.parquet")
    held.to_parquet(table / "held.parquet")
    sources = {"test_source": f"parquet:{table / 'held.parquet'}", "text_pair_column": "second"}
    data = prepare(_file_spec(spec, table, **sources))
    parts = {part: set(_texts(_copy(getattr(data, part)), load_tokenizer(spec.tokenizer))) for part in PARTS}
    assert not parts["test"] & (parts["train"] | parts["validation"])
    assert not parts["train"] & parts["validation"]
    assert data.meta["removed"]["train"] + data.meta["removed"]["validation"] == 1


def test_clients_of_few_labels(spec):
    few = spec.replace(partition="pathological", partition_options={"num-classes-per-partition": 1})
    data = prepare(few)
    assert data.num_clients == spec.clients
    assert {len(np.unique(data.client(i).labels)) for i in range(data.num_clients)} == {1}
    assert prepare(few.replace(partition="shard", partition_options={"shard-size": 4})).folder != data.folder
    with pytest.raises(
        ValueError, match=r"partition-options\.shard-size is no option of data\.partition = 'dirichlet'"
    ):
        prepare(spec.replace(partition_options={"shard-size": 4}))


def test_a_million_overlapping_clients_for_speed_tests(spec):
    data = prepare(spec.replace(partition="repeated", clients=1_000_000, records_per_client=2))
    assert data.num_clients == 1_000_000
    assert len(data.train) == 2000
    assert len(data.client(999_999)) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clients": 0}, r"clients = 0 takes .* data\.partition must be .natural."),
        ({"dirichlet_alpha": 0.0}, "dirichlet_alpha = 0.0: .* greater than 0"),
        ({"max_length": 3}, "max_length = 3: .* greater than or equal to 4"),
        ({"partition": "shards"}, "partition = .shards.: .* or .repeated."),
        ({"label_column": ""}, r"data\.label-column must be set"),
        ({"label_column": "text"}, r"data\.label-column = 'text' is a column of texts; name that of the labels"),
        ({"source": "csv:x.csv", "partition": "natural"}, r"needs data\.client-column"),
        ({"task": "causal-lm"}, "a language model has none; take 'iid'"),
        ({"test_limit": 3}, r"data\.test-limit = 3 .* set data\.test-source"),
        (
            {"validation_source": "csv:x.csv"},
            r"data\.validation-source = 'csv:x\.csv': generated notes bring their own",
        ),
        ({"least_words": 3}, r"data\.least-words must be 0 for generated notes"),
        ({"source": "csv:/no/such.csv"}, r"there is no file /no/such\.csv"),
    ],
)
def test_bad_settings_are_refused(spec, change, message):
    with pytest.raises(ValueError, match=message):
        prepare(spec.replace(**change))


def test_a_label_that_only_the_test_file_has_is_a_fault_of_the_test_file(spec, table):
    pandas.DataFrame({"words": ["new one"], "y": ["perhaps"]}).to_parquet(table / "official.parquet")
    official = f"parquet:{table / 'official.parquet'}"
    with pytest.raises(ValueError, match=r"^data\.test-source = .*official.*'y'.*'perhaps'"):
        prepare(_file_spec(spec, table, test_source=official))


def test_a_label_that_only_the_public_file_has_is_a_fault_of_the_public_file(spec, table):
    pandas.DataFrame({"words": ["new one"] * 2, "y": ["perhaps", "no"]}).to_parquet(table / "public.parquet")
    with pytest.raises(ValueError, match=r"^data\.validation-source = .*public.*'y'.*'perhaps'"):
        prepare(_file_spec(spec, table, validation_source=f"parquet:{table / 'public.parquet'}"))


def test_more_held_out_records_than_there_are(spec, table):
    with pytest.raises(ValueError, match=r"320 records.* 330 .*data\.validation-records"):
        prepare(_file_spec(spec, table, validation_records=300))
