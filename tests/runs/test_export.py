"""What a run has trained, loaded where Lacquer is not: adapters, whole models, classifiers; their cards; refusals."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import OfflineModeIsEnabled
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from typer.testing import CliRunner, Result

from client.models.base import load_base
from client.models.export import merged_model
from client.models.lora import adapter_layout, load_peft, merge_adapter, read_spec
from server.evaluation.finished import FinishedRun, read_finished
from server.runs.start import run_in_folder
from simulations.cli.app import app
from simulations.cli.model.export import push, refuse_taken, replace_folder
from simulations.engines.inprocess import run_inprocess
from tests.cases.finished_runs import base_model, finished_run, settings

MakeRun = Callable[[str, str], Path]
TEXTS = [
    "aaaa number 2?",
    "bbbb",
    "a </s> b <s> c",
    "a longer text, which says nothing at all and is cut somewhere behind this place",
]
EXAMPLE = Path(__file__).parents[2] / "docs/examples/two_adapters.py"
ALONE = "import sys; sys.modules.update(dict.fromkeys(('privacy', 'strategies', 'client', 'server', 'simulations')))\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    """A finished run of a task on an architecture, made once."""
    place, runs = tmp_path_factory.mktemp("export"), dict[tuple[str, str], Path]()

    def make(task: str, architecture: str) -> Path:
        if (task, architecture) not in runs:
            folder = place / f"{task}-{architecture}"
            folder.mkdir()
            runs[task, architecture] = finished_run(folder, task, architecture)
        return runs[task, architecture]

    return make


def lacquer(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, words)])


def alone(program: str, *arguments: str | Path, cwd: Path) -> Any:
    """What a program prints as JSON in a process that cannot import Lacquer."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", ALONE + program, *map(str, arguments)], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


CLASSIFY = """
import json
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu")
print(json.dumps(model.encode([tuple(t) if isinstance(t, list) else t for t in json.loads(sys.argv[2])]).tolist()))
"""


def logits_of(run: FinishedRun, texts: list[Any]) -> torch.Tensor:
    """Of the run's own classifier, one text at a time, as its evaluation computes them."""
    base, tokenizer = load_base(run.config.model.name, run.task, len(run.label_names))
    spec = read_spec(run.adapter)
    model = merge_adapter(base, spec, load_peft(run.adapter, adapter_layout(base, spec)))
    rows = []
    for text in texts:
        words = (text, None) if isinstance(text, str) else text
        options = {"truncation": True, "max_length": run.config.model.max_length, "split_special_tokens": True}
        tokens = tokenizer(*words, return_tensors="pt", **options)
        with torch.no_grad():
            rows.append(model(tokens["input_ids"], tokens["attention_mask"]))
    return torch.cat(rows)


@pytest.mark.parametrize(
    "architecture", ["bert", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("roberta", "llama"))]
)
def test_a_classifier_gives_the_runs_logits_where_lacquer_is_not(
    made: MakeRun, architecture: str, tmp_path: Path
) -> None:
    pytest.importorskip("sentence_transformers")
    folder = made("classification", architecture)
    run = read_finished(folder)
    result = lacquer(folder, tmp_path / "out")
    assert result.exit_code == 0, result.output
    found = np.array(alone(CLASSIFY, tmp_path / "out", json.dumps(TEXTS), cwd=tmp_path))
    wanted = logits_of(run, TEXTS).numpy()
    assert np.abs(wanted).max() > 1e-3  # something was learnt
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert not AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)[1]["missing_keys"]
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.library_name, card.data["base_model_relation"]) == ("sentence-transformers", "finetune")
    assert "labels = ['0', '1']" in card.text
    assert card.data.id2label == {0: "0", 1: "1"}
    assert "load_base" not in card.text
    assert "need Lacquer" not in card.text
    assert not [path.name for path in (tmp_path / "out").rglob("*.py")]


def test_plain_transformers_leaves_the_adapter_of_a_classifier_out_as_its_card_says(made: MakeRun) -> None:
    run = read_finished(made("classification", "bert"))
    trained = load_file(run.adapter / "adapter_model.safetensors")
    assert any(values.any() for name, values in trained.items() if "lora_B" in name)
    plain = AutoModelForSequenceClassification.from_pretrained(run.config.model.name, num_labels=2)
    with pytest.warns(UserWarning, match="missing adapter keys"):
        loaded = PeftModel.from_pretrained(plain, str(run.adapter))
    factors = [values for name, values in loaded.state_dict().items() if "lora_B" in name]
    assert factors
    assert not any(values.any() for values in factors)
    card = ModelCard.load(run.adapter / "README.md")
    assert "go on without the trained LoRA weights. `lacquer export RUN my-model` makes" in card.text
    assert card.data.id2label == {0: "0", 1: "1"}
    assert card.data.license is None  # nobody has said under which one the base in this folder is
    found = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert found["accuracy"] == json.loads((run.folder / "results.json").read_text())["test_accuracy"]
    assert found.keys() == {"accuracy", "f1"}
    assert {result.dataset_type for result in card.data.eval_results} == {"jsonl"}  # and not where it lies


def test_the_card_of_a_language_model_has_its_perplexity_and_needs_nothing(made: MakeRun) -> None:
    run = read_finished(made("instruction", "llama"))
    card = ModelCard.load(run.adapter / "README.md")
    (found,) = card.data.eval_results
    assert found.metric_type == "perplexity"
    assert found.metric_value == json.loads((run.folder / "results.json").read_text())["test_perplexity"]
    assert "need Lacquer" not in card.text
    assert "id2label" not in card.data.to_dict()


CHAT = """
import json, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
messages = [{"role": "user", "content": sys.argv[2]}]
tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
with torch.no_grad():
    print(json.dumps([tokens["input_ids"].tolist(), model(**tokens).logits.tolist(), str(model.dtype)]))
"""


def test_a_merged_model_computes_what_the_adapter_computes(made: MakeRun, tmp_path: Path) -> None:
    folder = made("instruction", "llama")
    run = read_finished(folder)
    result = lacquer(folder, tmp_path / "out", "--merged", "--json")
    assert result.exit_code == 0, result.output
    said = {"folder": str(tmp_path / "out"), "form": "merged", "gguf": None, "hub": None}
    assert json.loads(result.stdout) == said
    ids, logits, dtype = alone(CHAT, tmp_path / "out", "aaaa number 2?", cwd=tmp_path)
    with torch.no_grad():
        wanted = run.language_model()(torch.tensor(ids)).logits
        base = run.language_model(adapted=False)(torch.tensor(ids)).logits
    assert dtype == "torch.float32"
    torch.testing.assert_close(torch.tensor(logits), wanted, atol=1e-5, rtol=0)
    assert not torch.allclose(base, wanted, atol=1e-3)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.library_name, card.data["base_model_relation"]) == ("transformers", "finetune")
    assert card.data.privacy["epsilon"] == run.statement["epsilon"]
    assert "# Model of run" in card.text
    assert "peft" not in card.text.lower()
    assert "vllm serve ./out" in card.text
    assert "ollama create" in card.text
    assert json.loads((tmp_path / "out" / "privacy.json").read_text()) == run.statement
    assert (tmp_path / "out" / "generation_config.json").is_file()
    assert not (tmp_path / "out" / "NOT-PRIVATE.txt").exists()
    assert list(tmp_path.glob(".*")) == []


def test_an_adapter_on_a_tied_output_embedding_parts_it_from_the_inputs(tmp_path: Path) -> None:
    folder = finished_run(tmp_path, "causal-lm", "gpt2", **{"model.targets": "c_attn,lm_head"})
    run = read_finished(folder)
    assert load_base(run.config.model.name, run.task)[0].config.tie_word_embeddings  # else it shows nothing
    assert lacquer(folder, tmp_path / "out", "--merged").exit_code == 0
    (tmp_path / "out" / "README.md").read_text().index('tokenizer("a text"')
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
        wanted = run.language_model()(ids).logits
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_an_adapter_is_copied_with_its_guarantee_beside_it(made: MakeRun, tmp_path: Path) -> None:
    folder = made("instruction", "llama")
    (tmp_path / "out").mkdir()  # empty: welcome
    assert lacquer(folder, tmp_path / "out").exit_code == 0
    for name in ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / "adapter" / name).read_bytes()
    assert (tmp_path / "out" / "privacy.json").is_file()
    assert "--enable-lora --lora-modules" in (tmp_path / "out" / "README.md").read_text()


def test_two_exports_are_served_on_one_base_by_the_example_of_the_guide(made: MakeRun, tmp_path: Path) -> None:
    """Each answers as it does alone."""
    folder = made("causal-lm", "llama")
    run, base = read_finished(folder), read_finished(folder).config.model.name
    assert lacquer(folder, tmp_path / "one").exit_code == 0
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    weights = load_file(tmp_path / "one" / "adapter_model.safetensors")
    other = {name: values * (-300.0 if "lora_B" in name else 1.0) for name, values in weights.items()}
    save_file(other, tmp_path / "two" / "adapter_model.safetensors", {"format": "pt"})
    places = [tmp_path / name for name in ("one", "two")]
    done = subprocess.run(
        [sys.executable, EXAMPLE, base, "aaaa number", *places], capture_output=True, text=True, check=True
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["adapter"] for line in said] == ["one", "two"]
    assert {line["guarantee"] for line in said} == {run.statement["sentence"]}
    tokenizer = run.tokenizer()
    tokens = tokenizer("aaaa number", return_tensors="pt")
    for line, place in zip(said, places, strict=True):
        alone = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), place)
        answer = alone.generate(**tokens, max_new_tokens=8, do_sample=False)[0, tokens["input_ids"].shape[1] :]
        assert line["answer"] == tokenizer.decode(answer, skip_special_tokens=True)
    assert said[0]["answer"] != said[1]["answer"]


def test_a_run_without_a_guarantee_says_so_in_every_form(tmp_path: Path) -> None:
    unsafe = {"privacy.non-private": True, "privacy.noise": "insecure-zero"}
    folder = finished_run(tmp_path, "causal-lm", "llama", **unsafe)
    for form in ([], ["--merged"]):
        target = tmp_path / f"out{len(form)}"
        assert lacquer(folder, target, *form).exit_code == 0
        assert "NOT PRIVATE" in (target / "NOT-PRIVATE.txt").read_text()
        assert ModelCard.load(target / "README.md").data.privacy["not_private"]


def test_averaged_adapters_of_several_sites_are_one_when_exported(tmp_path: Path) -> None:
    changed = {"clients": 2, "site.steps": 2, "strategy.aggregation": "fedex", "model.targets": "q_proj,v_proj"}
    base = str(base_model(tmp_path / "base", "llama", "causal-lm"))
    (tmp_path / "run").mkdir()
    run_inprocess(settings(tmp_path, "causal-lm", base, **changed), tmp_path / "run")
    run = read_finished(tmp_path / "run")
    assert read_spec(run.adapter).rank > run.config.model.rank  # what the server added to the base is in it
    assert lacquer(run.folder, tmp_path / "out", "--merged").exit_code == 0
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
        torch.testing.assert_close(found, run.language_model()(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.nightly  # most of a minute
def test_smollm2_keeps_its_type_its_template_and_its_licence(tmp_path: Path) -> None:
    short = {
        "model.targets": "q_proj,v_proj",
        "model.layers": 1,
        "rounds": 1,
        "evaluation.rouge-records": 0,
        "evaluation.examples": 1,
    }
    (tmp_path / "run").mkdir()
    run_in_folder(settings(tmp_path, "instruction", "smollm2", **short), tmp_path / "run")
    assert lacquer(tmp_path / "run", tmp_path / "out", "--merged").exit_code == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    whole = merged_model("smollm2", "instruction", None, tmp_path / "run" / "adapter")
    changed = "model.layers.29.self_attn.q_proj.weight"
    assert torch.equal(weights[changed], whole.state_dict()[changed])
    assert not torch.equal(
        weights[changed], load_base("smollm2", "instruction", dtype=torch.bfloat16)[0].state_dict()[changed]
    )
    ids, logits, dtype = alone(CHAT, tmp_path / "out", "What is a fever?", cwd=tmp_path)
    assert dtype == "torch.bfloat16"
    with torch.no_grad():
        wanted = read_finished(tmp_path / "run").language_model()(torch.tensor(ids)).logits[0, -1]
    assert torch.tensor(logits)[0, -1].argmax() == wanted.argmax()
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.license, card.data.base_model) == ("apache-2.0", "HuggingFaceTB/SmolLM2-135M-Instruct")


def test_ternary_weights_are_refused_and_nothing_is_left(
    made: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("client.models.lora.is_ternary", lambda module: True)
    result = lacquer(made("instruction", "llama"), tmp_path / "out", "--merged")
    assert result.exit_code == 2
    assert "ternary weights, to which no adapter can be added" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_left_alone(made: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    result = lacquer(made("instruction", "llama"), tmp_path / "out")
    assert result.exit_code == 2
    assert "not an empty folder" in result.stderr
    with pytest.raises(ValueError, match="nothing is overwritten"):
        refuse_taken(tmp_path / "out" / "mine")

    def fails() -> None:
        with replace_folder(tmp_path / "new") as draft:
            (draft / "half").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


CONVERTER = """
import argparse, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("model", type=pathlib.Path)
parser.add_argument("--outfile", type=pathlib.Path)
given = parser.parse_args()
assert (given.model / "model.safetensors").is_file() and (given.model / "tokenizer.json").is_file()
if FAILS: sys.exit("this architecture is unknown")
given.outfile.write_bytes(b"GGUF")
"""


def test_llama_cpp_is_asked_where_it_is_and_missed_in_words(
    made: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made("instruction", "llama")
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = lacquer(folder, tmp_path / "out", "--gguf")
    assert missing.exit_code == 2
    assert "not on PATH: git clone" in missing.stderr
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text(CONVERTER.replace("FAILS", "True"))
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    failed = lacquer(folder, tmp_path / "out", "--gguf")
    assert "this architecture is unknown" in failed.stderr
    assert not (tmp_path / "out").exists()
    script.write_text("import no_such_tokenizer.parts")
    unmet = lacquer(folder, tmp_path / "out", "--gguf").stderr
    assert "requirements of its own: pip install no_such_tokenizer" in " ".join(unmet.split())
    script.write_text(CONVERTER.replace("FAILS", "False"))
    assert lacquer(folder, tmp_path / "out", "--gguf").exit_code == 0
    assert (tmp_path / "out" / "out.gguf").read_bytes() == b"GGUF"
    assert "FROM ./out.gguf" in (tmp_path / "out" / "README.md").read_text()
    classes = lacquer(made("classification", "bert"), tmp_path / "other", "--gguf")
    assert "has trained a classifier" in classes.stderr


def test_an_upload_is_private_and_whole_and_refused_in_words_offline(
    made: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    class Hub:
        def create_repo(self, name: str, **options: Any) -> None:
            asked.append((name, options))

        def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> str:
            asked.append((repo_id, {"files": sorted(path.name for path in folder_path.iterdir())}))
            return f"https://hub/{repo_id}"

    folder = made("instruction", "llama")
    assert lacquer(folder, tmp_path / "out").exit_code == 0
    assert push(tmp_path / "out", "me/adapter", Hub()) == "https://hub/me/adapter"
    (first, options), (second, sent) = asked
    assert first == second == "me/adapter"
    assert options["private"]
    assert {"README.md", "privacy.json", "adapter_model.safetensors"} <= set(sent["files"])

    def offline(*_: object, **__: object) -> None:
        raise OfflineModeIsEnabled("offline mode is enabled")

    monkeypatch.setattr(HfApi, "create_repo", offline)
    result = lacquer(folder, tmp_path / "again", "--push-to-hub", "me/adapter")
    assert result.exit_code == 2
    assert "is written, and not uploaded to 'me/adapter': offline mode is enabled" in result.stderr.replace("\n", " ")
    assert (tmp_path / "again" / "README.md").is_file()
