"""Attacks of a stranger who reaches the gateway's port: attack.py {bodies,slow,headers,ask} HOST:PORT KEY.

KEY is the public key of a client that was let in, as /admitted/*.key holds it: a stranger may have seen one. The
stranger has no private key, so signatures are made up. Every kind ends with 0 if the gateway did what
docker/gateway.conf says, and with 1 and the answers that it got if not. `ask` is an honest call meanwhile: it must
reach the SuperLink, which refuses its signature. For federations of your own.
"""

import base64
import collections
import contextlib
import datetime
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator

UPLOAD = "/v1/fleet/push-object"
MEBI = 2**20


MADE_UP = base64.b64encode(
    b"-----BEGIN PUBLIC KEY-----\n" + base64.b64encode(bytes(120)) + b"\n-----END PUBLIC KEY-----\n"
).decode()


def signed_headers(key: str) -> str:
    """Header lines in the form of a SuperNode's with this public key, signed by nobody."""
    now = datetime.datetime.now(datetime.UTC).isoformat()
    return (
        f"flwr-public-key: {key}\r\nflwr-timestamp: {now}\r\n"
        f"flwr-signature: {base64.b64encode(bytes(103)).decode()}\r\n"
    )


def head(path: str, *lines: str) -> bytes:
    """The head of an HTTP request, with these header lines."""
    fixed = f"POST {path} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/protobuf\r\n"
    return (fixed + "".join(lines) + "\r\n").encode("ascii")


@contextlib.contextmanager
def connection(address: str, wait: float) -> Iterator[ssl.SSLSocket]:
    """Open a TLS connection to whoever answers at an address; the certificate is not checked."""
    host, port = address.rsplit(":", 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((host, int(port)), wait) as plain, context.wrap_socket(plain) as secure:
        yield secure


def answer(secure: ssl.SSLSocket) -> str:
    """Read the status of an answer, and whether it came from the SuperLink."""
    got = b""
    with contextlib.suppress(OSError):
        while part := secure.recv(4096):
            got += part
            if b"SuperNode" in got or (len(got) > 12 and b"\r\n\r\n" in got and b" 401 " not in got):
                break
    status = got.split(b" ", 2)[1].decode() if got.startswith(b"HTTP/1.") else "cut"
    return status + (" of the SuperLink" if b"Invalid SuperNode authentication" in got else "")


def ask(address: str, key: str) -> str:
    """Make one small honest call; returns the answer's status."""
    with connection(address, 15) as secure:
        secure.sendall(
            head("/v1/fleet/pull-messages", signed_headers(key), "content-length: 0\r\nconnection: close\r\n")
        )
        return answer(secure)


def upload(address: str, size: int, *lines: str) -> str:
    """Upload one object of so many MiB as fast as it is taken, without telling its length; returns the status."""
    length, field = size * MEBI, b"\x22"  # PushObjectRequest.object_content
    while length > 127:
        field, length = field + bytes([length & 127 | 128]), length >> 7
    field += bytes([length])
    with connection(address, 60) as secure:
        with contextlib.suppress(OSError):
            secure.sendall(head(UPLOAD, *lines, "transfer-encoding: chunked\r\n"))
            secure.sendall(b"%x\r\n%b\r\n" % (len(field), field))
            for _ in range(size):
                secure.sendall(b"100000\r\n" + bytes(MEBI) + b"\r\n")
            secure.sendall(b"0\r\n\r\n")
        return answer(secure)


def drip(address: str, seconds: float, *lines: str) -> str:
    """Send a body of which one byte comes every second; returns whether it was answered, cut or kept."""
    end = time.monotonic() + seconds
    with connection(address, 30) as secure:
        with contextlib.suppress(OSError):
            secure.sendall(head(UPLOAD, *lines, "content-length: 1000000\r\n"))
            secure.settimeout(1)
            while time.monotonic() < end:
                secure.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    return "answered" if secure.recv(1) else "cut"
        return "kept" if time.monotonic() >= end else "cut"


def many_headers(address: str, key: str, count: int) -> str:
    """Send one request with so many headers; returns the answer's status."""
    with connection(address, 60) as secure:
        with contextlib.suppress(OSError):
            distinct = (f"x-{number}: b\r\n" for number in range(count))
            secure.sendall(head(UPLOAD, signed_headers(key), *distinct, "content-length: 0\r\n"))
        return answer(secure)


def run_at_once(count: int, what: Callable[[], str]) -> dict[str, int]:
    """Make so many calls at the same time; returns how many had which outcome."""
    outcomes: list[str] = []

    def one() -> None:
        try:
            outcomes.append(what())
        except OSError as error:
            outcomes.append(type(error).__name__)

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(collections.Counter(outcomes))


def try_large_bodies(address: str, key: str) -> bool:
    """Send 16 bodies of 250 MB with and without keys, then 16 that are just allowed; whether the gateway held."""
    without = run_at_once(16, lambda: upload(address, 250))
    made_up = run_at_once(16, lambda: upload(address, 7, signed_headers(MADE_UP)))
    huge = run_at_once(16, lambda: upload(address, 250, signed_headers(key)))
    allowed = run_at_once(16, lambda: upload(address, 7, signed_headers(key)))
    say(f"250 MB without a key: {without}; 7 MB with a made-up one: {made_up}")
    say(f"250 MB with a key that was let in: {huge}; 7 MB: {allowed}")
    return (
        set(without) | set(made_up) <= {"401", "cut", "503"}
        and set(huge) <= {"413", "cut", "503"}
        and set(allowed) == {"401 of the SuperLink"}
    )


def try_slow_bodies(address: str, key: str) -> bool:
    """Send 100 bodies that do not end, with and without keys; whether the gateway held."""
    without = run_at_once(100, lambda: drip(address, 12))
    made_up = run_at_once(100, lambda: drip(address, 12, signed_headers(MADE_UP)))
    known = run_at_once(100, lambda: drip(address, 12, signed_headers(key)))
    say(f"100 slow bodies without a key: {without}; with a made-up one: {made_up}; with one that was let in: {known}")
    return set(without) | set(made_up) <= {"answered", "cut"} and known.get("kept", 0) <= 16


def try_many_headers(address: str, key: str) -> bool:
    """Send 300,000 headers in one request; whether the gateway held and still answers an honest call."""
    got = many_headers(address, key, 300_000)
    say(f"300,000 headers: {got}")
    return got in {"400", "cut"} and ask(address, key) == "401 of the SuperLink"


def try_honest_call(address: str, key: str) -> bool:
    """Make an honest call, and one with a key that was not let in; whether both were answered as they should be."""
    got, made_up = ask(address, key), ask(address, MADE_UP)
    say(f"an honest call: {got}; with a made-up key: {made_up}")
    return got == "401 of the SuperLink" and made_up == "401"


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    kind, where, known_key = sys.argv[1:]
    sys.exit(
        not {"bodies": try_large_bodies, "slow": try_slow_bodies, "headers": try_many_headers, "ask": try_honest_call}[
            kind
        ](where, known_key)
    )
