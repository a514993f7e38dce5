"""What a stranger who reaches the gateway's port may try: attack.py {bodies,slow,headers} HOST:PORT.

Needs no certificate and no key that was let in; where headers of a SuperNode are needed, they are made up. Every kind
ends with 0 if the gateway did what docker/gateway.conf says, and with 1 and the answers that it got if not. `ask` is an
honest call meanwhile: it must reach the SuperLink, which refuses its made-up signature. For federations of your own.
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


def signed() -> str:
    """Headers in the form of a SuperNode's, signed by nobody."""
    key = b"-----BEGIN PUBLIC KEY-----\n" + base64.b64encode(bytes(120)) + b"\n-----END PUBLIC KEY-----\n"
    now = datetime.datetime.now(datetime.UTC).isoformat()
    return (
        f"flwr-public-key: {base64.b64encode(key).decode()}\r\nflwr-timestamp: {now}\r\n"
        f"flwr-signature: {base64.b64encode(bytes(103)).decode()}\r\n"
    )


def head(path: str, *lines: str) -> bytes:
    """The head of a request."""
    fixed = f"POST {path} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/protobuf\r\n"
    return (fixed + "".join(lines) + "\r\n").encode("ascii")


@contextlib.contextmanager
def line(address: str, wait: float) -> Iterator[ssl.SSLSocket]:
    """A TLS connection to whoever answers there."""
    host, port = address.rsplit(":", 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((host, int(port)), wait) as plain, context.wrap_socket(plain) as secure:
        yield secure


def answer(secure: ssl.SSLSocket) -> str:
    """The status of the answer and, if it came from the SuperLink, that it did."""
    got = b""
    with contextlib.suppress(OSError):
        while part := secure.recv(4096):
            got += part
            if b"SuperNode" in got or (len(got) > 12 and b"\r\n\r\n" in got and b" 401 " not in got):
                break
    status = got.split(b" ", 2)[1].decode() if got.startswith(b"HTTP/1.") else "cut"
    return status + (" of the SuperLink" if b"Invalid SuperNode authentication" in got else "")


def ask(address: str) -> str:
    """An honest small call."""
    with line(address, 15) as secure:
        secure.sendall(head("/v1/fleet/pull-messages", signed(), "content-length: 0\r\nconnection: close\r\n"))
        return answer(secure)


def upload(address: str, size: int, *lines: str) -> str:
    """One object of so many MiB, whose length is not told, as fast as it is taken."""
    length, field = size * MEBI, b"\x22"  # PushObjectRequest.object_content
    while length > 127:
        field, length = field + bytes([length & 127 | 128]), length >> 7
    field += bytes([length])
    with line(address, 60) as secure:
        with contextlib.suppress(OSError):
            secure.sendall(head(UPLOAD, *lines, "transfer-encoding: chunked\r\n"))
            secure.sendall(b"%x\r\n%b\r\n" % (len(field), field))
            for _ in range(size):
                secure.sendall(b"100000\r\n" + bytes(MEBI) + b"\r\n")
            secure.sendall(b"0\r\n\r\n")
        return answer(secure)


def drip(address: str, seconds: float, *lines: str) -> str:
    """A body of which one byte comes every second."""
    end = time.monotonic() + seconds
    with line(address, 30) as secure:
        with contextlib.suppress(OSError):
            secure.sendall(head(UPLOAD, *lines, "content-length: 1000000\r\n"))
            secure.settimeout(1)
            while time.monotonic() < end:
                secure.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    return "answered" if secure.recv(1) else "cut"
        return "kept" if time.monotonic() >= end else "cut"


def many_headers(address: str, count: int) -> str:
    """One request with so many headers."""
    with line(address, 60) as secure:
        with contextlib.suppress(OSError):
            distinct = (f"x-{number}: b\r\n" for number in range(count))
            secure.sendall(head(UPLOAD, signed(), *distinct, "content-length: 0\r\n"))
        return answer(secure)


def together(count: int, what: Callable[[], str]) -> dict[str, int]:
    """How many of so many at the same time had which outcome."""
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


def bodies(address: str) -> bool:
    """16 bodies of 250 MB without a key and with a made-up one, then 16 that are just allowed."""
    without = together(16, lambda: upload(address, 250))
    huge = together(16, lambda: upload(address, 250, signed()))
    allowed = together(16, lambda: upload(address, 7, signed()))
    say(f"250 MB without a key: {without}; with a made-up one: {huge}; 7 MB with a made-up one: {allowed}")
    return (
        set(without) <= {"401", "cut", "503"}
        and set(huge) <= {"413", "cut", "503"}
        and set(allowed) == {"401 of the SuperLink"}
    )


def slow(address: str) -> bool:
    """100 bodies that do not end, without a key and with a made-up one."""
    without = together(100, lambda: drip(address, 12))
    made_up = together(100, lambda: drip(address, 12, signed()))
    say(f"100 slow bodies without a key: {without}; with a made-up one: {made_up}")
    return set(without) <= {"answered", "cut"} and made_up.get("kept", 0) <= 16


def headers(address: str) -> bool:
    """300,000 headers."""
    got = many_headers(address, 300_000)
    say(f"300,000 headers: {got}")
    return got in {"400", "cut"} and ask(address) == "401 of the SuperLink"


def asked(address: str) -> bool:
    """An honest call."""
    got = ask(address)
    say(f"an honest call: {got}")
    return got == "401 of the SuperLink"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    kind, where = sys.argv[1:]
    sys.exit(not {"bodies": bodies, "slow": slow, "headers": headers, "ask": asked}[kind](where))
