"""A transcript from conversations in a file to answers where Lacquer is not installed: run, and written down.

    python docs/tools/chat_transcript.py docs/results/chat-transcript.md

Takes about ten minutes on two cores. The conversations are generated (:mod:`simulations.tools.sample_records`); the
answers are those of plain transformers in a virtual environment of its own.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from client.data.catalog import consultations
from simulations.tools.sample_records import write_records

USERS = 8000
ASKED = 3
"""Public prompts: consultations of a seed that neither the records nor the run uses."""

ASK = """\
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
for line in open(sys.argv[2]):
    asked = [{"role": "user", "content": json.loads(line)}]
    inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=64, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    print(f"> {asked[0]['content']}\\n\\n{tokenizer.decode(answer, skip_special_tokens=True)}\\n")
"""

TRAIN = "lacquer run chat --set data.source=jsonl:conversations.jsonl --set data.client-column=user --set clients=0"
QUESTION = "I notice sudden loss of speech. Is that serious?"
MADE_HERE = (TRAIN, f'lacquer generate RUN --prompt "{QUESTION}"', "lacquer export RUN my-model --merged")
"""From the file to a model; RUN stands for the folder of the run."""


def used_elsewhere() -> tuple[str, ...]:
    """The commands from the model to answers, where Lacquer is not installed."""
    libraries = " ".join(f"{package}=={version(package).partition('+')[0]}" for package in ("torch", "transformers"))
    return (
        f"python3 -m venv elsewhere && elsewhere/bin/pip install -q {libraries}",
        "elsewhere/bin/python ask.py my-model prompts.jsonl",
    )


PAGE = """\
# Chat: a transcript

Three commands take you from a file of conversations to a model: train, ask, export. Two more load it where Lacquer is
not installed. [Fine-tune a chat model privately](../chat.md) explains the settings.

The {users:,} users are invented and have one conversation each. Every user is protected. `conversations.jsonl` holds
lines like this:

```json
{record}
```

## 1. Train

{train}

## 2. Ask

{generate}

## 3. Export

{export}

## Where Lacquer is not installed

`prompts.jsonl` holds questions that were not trained on. `ask.py` needs transformers only:

```python
{ask}```

{environment}

{answers}

---

Training takes five to nine minutes on two free cores, longer on a busy machine.
Made by `python docs/tools/chat_transcript.py docs/results/chat-transcript.md`.
"""


def write(page: Path, users: int) -> None:
    """Run the commands in a temporary folder and write them to `page` with what they printed.

    Raises:
        subprocess.CalledProcessError: a command failed; its output was shown.
    """
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        (records,) = write_records(work, 1, users, chat=True)
        records.rename(work / "conversations.jsonl")
        prompts = [one.question for one in consultations.generate(ASKED, 1, seed=2)]
        (work / "prompts.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts), encoding="utf-8")
        (work / "ask.py").write_text(ASK, encoding="utf-8")
        train, printed = _command(work, TRAIN)
        run = printed.partition("run folder: ")[2].partition(";")[0]
        generate, export = (_command(work, line.replace("RUN", run))[0] for line in MADE_HERE[1:])
        environment, answers = (_command(work, line)[0] for line in used_elsewhere())
        record = (work / "conversations.jsonl").read_text(encoding="utf-8").partition("\n")[0]
    blocks = {"train": train, "generate": generate, "export": export, "environment": environment, "answers": answers}
    page.write_text(PAGE.format(users=users, record=record, ask=ASK, **blocks), encoding="utf-8")


def _command(folder: Path, line: str) -> tuple[str, str]:
    """Run one line of shell; the block that shows it, and what it printed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PATH": path}
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, line)
    told = [text for text in done.stdout.splitlines() if not re.match(r"round +\d+/\d+ +clip", text)]
    printed = "\n".join(told).strip()
    return f"```console\n$ {line}\n{printed}\n```" if printed else f"```console\n$ {line}\n```", done.stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python docs/tools/chat_transcript.py")
    parser.add_argument("page", type=Path)
    parser.add_argument("--users", type=int, default=USERS)
    given = parser.parse_args()
    write(given.page.resolve(), given.users)
