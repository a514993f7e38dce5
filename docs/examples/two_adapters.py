"""Serve several exported adapters on one base model: python two_adapters.py BASE PROMPT ADAPTER ADAPTER ...

Needs PEFT and not Lacquer. The base is loaded once; a request chooses one of the small adapters. vLLM does the same:
vllm serve BASE --enable-lora --max-lora-rank 16 --lora-modules one=./one two=./two
"""

import json
import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base, prompt, *folders = sys.argv[1:]
names = {Path(folder).name: folder for folder in folders}
first, *others = names
tokenizer = AutoTokenizer.from_pretrained(names[first])
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), names[first], adapter_name=first)
for name in others:
    model.load_adapter(names[name], adapter_name=name)

tokens = tokenizer(prompt, return_tensors="pt")
for name in names:
    model.set_adapter(name)
    with torch.no_grad():
        answer = model.generate(**tokens, max_new_tokens=8, do_sample=False)
    text = tokenizer.decode(answer[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
    guarantee = json.loads((Path(names[name]) / "privacy.json").read_text())["sentence"]
    print(json.dumps({"adapter": name, "answer": text, "guarantee": guarantee}))
