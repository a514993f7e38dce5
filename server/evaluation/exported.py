"""The files that describe an exported folder: the card in its library's form, the guarantee, the stamp.

The adapter's card is the source: what a model guarantees and how good it is does not change with its form.
"""

import json
import pprint
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import ModelCard

from client.models.export import copy_licenses
from client.models.files import hub_id
from privacy.errors import CorruptRun
from server.evaluation.card import (
    BASE_LICENSES,
    CLASSIFIER_NEEDS_LACQUER,
    MODEL_NEEDS_LACQUER,
    NOT_ON_THE_HUB,
    privacy_block,
)
from server.evaluation.finished import FinishedRun
from server.run_folder.names import PRIVACY_FILE, STAMP_FILE
from server.run_folder.verify import head_of

Form = Literal["adapter", "merged", "classifier"]

_TITLES = {"adapter": "Adapter", "merged": "Model", "classifier": "Classifier"}
_CODE = re.compile(r"^```python\n.*?\n```$", re.DOTALL | re.MULTILINE)


def describe(run: FinishedRun, folder: Path, form: Form, gguf: str = "") -> None:
    """Write card, privacy.json and, where the run has one, its stamp into the folder of an export.

    Args:
        folder: holds the export; its name stands in the commands of the card.
        gguf: name of the GGUF file in it, if it has one.
    """
    (folder / PRIVACY_FILE).write_text(json.dumps(dict(run.statement), indent=2) + "\n", encoding="utf-8")
    for source in (run.folder / STAMP_FILE, run.adapter / STAMP_FILE):
        if source.is_file():
            shutil.copyfile(source, folder / STAMP_FILE)
    if not (folder / STAMP_FILE).is_file() and run.statement.get("not_private") is not None:
        (folder / STAMP_FILE).write_text(f"{run.statement['sentence']}\n", encoding="utf-8")
    licenses = [] if form == "adapter" else copy_licenses(run.config.model.name, folder)
    card = _verified_card(run)
    if form != "adapter":
        data = card.data
        data.library_name = "transformers" if form == "merged" else "sentence-transformers"
        data.base_model_relation = "finetune"
        data.tags = [tag for tag in data.tags or [] if tag != "lora"]
        if name := BASE_LICENSES.get(run.config.model.name):
            data.license = name  # the card of an older run does not say it
    text = card.text.replace("# Adapter of", f"# {_TITLES[form]} of", 1)
    code = _code(run, folder, form)
    if code:
        text = _CODE.sub(lambda _: code, text, count=1)
        for sentences in (CLASSIFIER_NEEDS_LACQUER, MODEL_NEEDS_LACQUER):
            text = text.replace(f"{sentences}\n\n", "")
    parts = [text.rstrip(), proof_text(run), *_serving(run, folder, form, gguf)]
    if form != "adapter":
        parts.append(_license_text(run, licenses))
    header = card.data.to_yaml()
    (folder / "README.md").write_text(f"---\n{header}\n---\n\n" + "\n\n".join(parts) + "\n", encoding="utf-8")


def _verified_card(run: FinishedRun) -> Any:  # the hub types no field of a card
    """Load the adapter's card, which must say of the guarantee what the ledger does.

    Raises:
        CorruptRun: it says something else, or is gone.
    """
    path = run.adapter / "README.md"
    if not path.is_file():
        raise CorruptRun(f"{path} is missing, though the run has ended; restore it")
    card: Any = ModelCard.load(path)
    stated, said = (run.verified.written or {})["sentence"], privacy_block(run.statement)
    block = card.data.to_dict().get("privacy")
    if stated not in card.text or not isinstance(block, dict) or block.get("epsilon") != said.get("epsilon"):
        raise CorruptRun(f"{path} does not say what {PRIVACY_FILE} and the ledger do of the guarantee; restore it")
    card.text = card.text.replace(stated, run.statement["sentence"])
    card.data.privacy = said
    return card


def proof_text(run: FinishedRun) -> str:
    """The paragraph of a card on what of the guarantee an exported folder can prove by itself."""
    head = head_of(run.statement)
    where = "the sites' own ledgers" if head is None else f"the run's ledger, whose last line is `{str(head)[:24]}`"
    return (
        f"The guarantee is that of {where}, as verified when this folder was written. It has no ledger: by itself it "
        "proves nothing of epsilon, and does not show whether its privacy.json was edited. Whoever has the folder of "
        "the run can verify it: `lacquer report RUN`."
    )


def _license_text(run: FinishedRun, files: Sequence[str]) -> str:
    base = hub_id(run.config.model.name)
    where = f"its files are here: {', '.join(files)}" if files else "its own page has the text"
    return f"The weights come of `{base}` and stay under its licence; {where}."


def _code(run: FinishedRun, folder: Path, form: Form) -> str:
    """Python code that uses the export; "" where the adapter's card has it already."""
    place = json.dumps(folder.name)
    if form == "adapter":
        return ""
    if form == "classifier":
        labels = pprint.pformat(list(run.label_names), width=108, compact=True)
        text = '("a text", "the text it is paired with")' if run.config.data.text_pair_column else '"a text"'
        lines = [
            "from sentence_transformers import SentenceTransformer",
            "",
            f"model = SentenceTransformer({place})",
            f"labels = {labels}",
            f"print(labels[model.encode([{text}])[0].argmax()])  # encode gives the logits",
        ]
        return "\n".join(["```python", *lines, "```"])
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({place})",
        f"model = AutoModelForCausalLM.from_pretrained({place})",
    ]
    if run.task == "instruction":
        lines += [
            'messages = [{"role": "user", "content": "a question"}]',
            "options = dict(add_generation_prompt=True, return_dict=True, return_tensors='pt')",
            "tokens = tokenizer.apply_chat_template(messages, **options)",
        ]
    else:
        tail = "\\nSummary:" if run.task == "summarisation" else ""
        lines.append(f'tokens = tokenizer("a text{tail}", return_tensors="pt")')
    lines += [
        f"answer = model.generate(**tokens, max_new_tokens={run.most_tokens})",
        'print(tokenizer.decode(answer[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]
    return "\n".join(["```python", *lines, "```"])


def _serving(run: FinishedRun, folder: Path, form: Form, gguf: str) -> list[str]:
    """Commands that serve the export with vLLM and Ollama, as paragraphs of its card."""
    name, base = run.config.name, hub_id(run.config.model.name)
    if form == "classifier":
        return []
    if form == "adapter":
        if run.config.model.name.startswith(NOT_ON_THE_HUB) or run.label_names:
            return []
        command = f"vllm serve {base} --enable-lora --lora-modules {name}=./{folder.name}"
        return [f"With vLLM:\n\n```sh\n{command}\n```"]
    model = f"./{gguf}" if gguf else "."
    ollama = f'cd {folder.name}\necho "FROM {model}" > Modelfile\nollama create {name}\nollama run {name}'
    return [f"With vLLM:\n\n```sh\nvllm serve ./{folder.name}\n```", f"With Ollama:\n\n```sh\n{ollama}\n```"]
