"""``python -m simulations.tools.advisories LOCK [FOLDER]``: pip-audit over a lock, without a network too.

With FOLDER, which holds advisories in OSV's format (one JSON file each, such as OSV's export of the ecosystem PyPI),
pip-audit asks a server on this machine that knows these only; else it asks PyPI. Exit code 1 means vulnerable, or not
audited.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version


def is_affected(affected: dict[str, Any], version: Version) -> bool:
    """Whether a version is one of an advisory's entry: listed by itself, or within one of its ranges."""
    if str(version) in affected.get("versions", []):
        return True
    for spans in affected.get("ranges", []):
        if spans["type"] != "ECOSYSTEM":
            continue
        inside = False
        order = {"introduced": 0, "fixed": 1, "last_affected": 2}
        events = [(Version(at), order[kind], kind) for event in spans["events"] for kind, at in event.items()]
        for at, _, kind in sorted(events):
            if at < version or (at == version and kind != "last_affected"):
                inside = kind == "introduced"
        if inside:
            return True
    return False


def read_advisories(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The advisories of a folder by the package's name; ValueError if there is none, or one cannot be read."""
    known: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            advisory = json.loads(path.read_text(encoding="utf-8"))
            names = {
                entry["package"]["name"] for entry in advisory["affected"] if entry["package"]["ecosystem"] == "PyPI"
            }
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no advisory in OSV's format: {error!r}; export the folder anew") from error
        for name in names:
            known.setdefault(canonicalize_name(name), []).append(advisory)
    if not known:
        raise ValueError(f"{folder} holds no advisory about a package of PyPI; give a folder of OSV's JSON files")
    return known


@contextmanager
def serve_advisories(folder: Path) -> Iterator[str]:
    """The address of a server on loopback that answers OSV's query by what a folder holds."""
    known = read_advisories(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            name, version = canonicalize_name(query["package"]["name"]), Version(query["version"])
            found = [
                advisory
                for advisory in known.get(name, [])
                if any(
                    canonicalize_name(e["package"]["name"]) == name and is_affected(e, version)
                    for e in advisory["affected"]
                )
            ]
            body = json.dumps({"vulns": found} if found else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a line for every package says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
        server.shutdown()


def audit(lock: Path, folder: Path | None) -> int:
    """The exit code of pip-audit over a lock."""
    command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--require-hashes", "--progress-spinner", "off"]
    command += ["-r", str(lock)]
    if folder is None:
        return subprocess.run(command, check=False).returncode
    with serve_advisories(folder) as address:
        return subprocess.run([*command, "-s", "osv", "--osv-url", address], check=False).returncode


if __name__ == "__main__":
    lock, *folder = sys.argv[1:]
    try:
        sys.exit(audit(Path(lock), Path(folder[0]) if folder else None))
    except ValueError as error:
        sys.exit(str(error))
