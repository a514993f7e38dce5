"""Look for secrets in the files of an image: docker export CONTAINER | python docker/scan_image.py.

Refused are private keys, access tokens of the usual services, version control, environments and settings that hold
passwords, and what a run keeps to itself (its ledger, the secret of its cohorts). Test keys that published packages
bring along are named in :data:`PUBLISHED`. Needs nothing but Python.
"""

import fnmatch
import re
import sys
import tarfile
from collections.abc import Iterator
from typing import IO

NAMES = (
    "*/.git/*",
    "*/.git",
    "*/.env",
    "*/.netrc",
    "*/.pypirc",
    "*/pip.conf",
    "*/uv.toml",
    "*/.aws/*",
    "*/.ssh/*",
    "*/.docker/config.json",
    "*/id_rsa",
    "*/id_ecdsa",
    "*/id_ed25519",
    "*/ledger.jsonl",
    "*/sampling.key",
    "*/credentials.json",
    "run/secrets/*",
)
CONTENTS = {
    "private key": (b"PRIVATE KEY-----", rb"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----\s+[A-Za-z0-9+/=]{40}"),
    "AWS key": (b"AKIA", rb"\bAKIA[0-9A-Z]{16}\b"),
    "GitHub token": (b"ghp_", rb"\bghp_[A-Za-z0-9]{36}\b"),
    "GitHub access token": (b"github_pat_", rb"\bgithub_pat_[A-Za-z0-9_]{40}"),
    "Hugging Face token": (b"hf_", rb"\bhf_[A-Za-z]{34}\b"),
    "PyPI token": (b"pypi-AgEIcHlwaS5vcmc", rb"pypi-AgEIcHlwaS5vcmc[A-Za-z0-9_-]{20}"),
    "Slack token": (b"xoxb-", rb"\bxoxb-[0-9A-Za-z-]{20}"),
    "password in a URL": (b"@", rb"\bhttps?://[A-Za-z0-9_.-]+:(?!/)[^\s/@:'\"{}<>$%*]{6,}@[a-z0-9-]+\.[a-z]"),
}
"""What to look for: bytes that must occur, which is fast to say, and the pattern."""

PUBLISHED = ("*/site-packages/Crypto/SelfTest/*", "*/urllib3/util/url.py", "usr/lib/*/libgnutls.so.*")
"""Patterns of files that packages publish with test keys or made-up tokens in them."""

LARGEST = 4 * 2**20
"""Most bytes of a file that is looked at; larger files are libraries and weights."""

COMPILED = (".pyc", ".so")
"""Endings of files that are made of what is looked at itself, or hold no text."""


def problems(image: IO[bytes]) -> Iterator[str]:
    """Find what is wrong with an image, given as a tar stream; one line for every finding."""
    with tarfile.open(fileobj=image, mode="r|") as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            if any(fnmatch.fnmatchcase(f"/{name}", pattern) or fnmatch.fnmatchcase(name, pattern) for pattern in NAMES):
                yield f"{name}: has no place in an image"
            if not member.isfile() or member.size > LARGEST or name.endswith(COMPILED):
                continue
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in PUBLISHED):
                continue
            file = archive.extractfile(member)
            assert file is not None
            content = file.read()
            for what, (sign, text) in CONTENTS.items():
                if sign in content and re.search(text, content):
                    yield f"{name}: holds a {what}"


if __name__ == "__main__":
    found = list(problems(sys.stdin.buffer))
    sys.stdout.write("".join(f"{line}\n" for line in found))
    sys.exit(bool(found))
