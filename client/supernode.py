"""Flower's SuperNode, ended when it no longer reaches its server, so that what started it can start it anew.

    python -m client.fork_server flower-supernode ...

starts this in the place of ``flower-supernode``. Flower 1.41 repeats a call that cannot connect or gets 502, 503, 504,
for as long as it takes. It gives its connection up after an HTTP 500, which a SuperLink answers whose database is
locked, and after an error whose text names TLS, such as a handshake that timed out. Here both are repeated for
:data:`PATIENCE` seconds (:func:`repeat_calls`; `server.network.patience` does so for the server).

Where Flower gives up, it leaves a process behind that answers its own health check and does nothing else. Here the
process ends, with exit code :data:`GONE`,

- where Flower has given up, or anything else has ended its main thread;
- where for :data:`LIMIT` seconds the server has answered no heartbeat, or no request for messages, which Flower makes
  every three seconds while the node has nothing to do. A node that works on a message has its heartbeats to show.

Both are seen in the log of httpx, the library that makes Flower's calls. When the server last answered
is the time of a file (``LACQUER_ALIVE``, by default ``lacquer-alive`` in the folder for temporary files);

    python -m client.supernode --healthy

ends with 0 if that was within :data:`HEALTHY` seconds: the health check of a container, also of the server's executor.

In one more thing Flower's loop is changed, see :func:`in_step`. And no secret stands on a command line, which every
user of a host may read: :func:`secret_file`.

    python -m client.supernode --executor --runtime-api-address ...

is ``flower-superexec``, which a SuperNode starts to have its messages worked on, with the same care.
"""

import contextlib
import importlib
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

if TYPE_CHECKING:  # else a health check would import Flower every few seconds
    from flwr.supercore.retry import RetryInvoker

VARIABLE = "LACQUER_ALIVE"
LIMIT = 180.0
"""Seconds. Flower's server counts a node as gone after 60."""
HEALTHY = 90.0
PATIENCE = 300.0
"""Seconds for which a call is repeated whose failure may pass, without one answer between."""
RETURN = 75.0
"""Seconds for which a node asks to be taken in: what the SuperLink takes to see that an earlier process is gone."""
EARLIER = "either an earlier process of this node counts as connected for a minute, or its key was not let in"
GONE = 75
"""Of ``sysexits.h``: a failure that may pass."""

REFUSED = (
    "the federation does not take this node's calls (401). Either its key was not let in (`lacquer admit` on the "
    "server) or was expelled, or the clocks of this host and of the SuperLink differ by more than 5 s"
)

FLEET = "/v1/fleet/"
POLL, BEAT = f"{FLEET}pull-messages", f"{FLEET}send-node-heartbeat"

log = logging.getLogger(__name__)


class Watch(logging.Handler):
    """The time at which the server last answered, from what httpx logs of every call.

    Args:
        mark: file that is touched when all is well.
        limit: seconds without an answer.
        clock: seconds.
    """

    def __init__(self, mark: Path, limit: float = LIMIT, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.INFO)
        self._mark, self._limit, self._clock = mark, limit, clock
        self._polled = self._beat = clock()
        self._working = self._refused = False

    def emit(self, record: logging.LogRecord) -> None:
        """``HTTP Request: POST https://... "HTTP/1.1 200 OK"``, whose parts are the record's arguments."""
        arguments = record.args if isinstance(record.args, tuple) else ()
        if len(arguments) > 3 and isinstance(arguments[3], int):
            self.note_answer(urlsplit(str(arguments[1])).path, arguments[3])

    def note_answer(self, path: str, status: int) -> None:
        """The server has answered a call."""
        if not path.startswith(FLEET):
            return
        if path != BEAT:
            self._working = path != POLL  # between two polls Flower fetches a message, waits for the work, and replies
        if status == 401 and not self._refused:
            self._refused = True
            log.error(REFUSED)
        if status != 200:
            return
        if path == POLL:
            self._polled = self._clock()
        if path == BEAT:
            self._beat = self._clock()
        if path == (BEAT if self._working else POLL):
            self._mark.touch()

    def overdue(self) -> str:
        """The call that the server has not answered for too long; empty if all is well."""
        now = self._clock()
        if now - self._beat > self._limit:
            return f"no heartbeat was answered for {self._limit:g} s"
        if not self._working and now - self._polled > self._limit:
            return f"no request for messages was answered for {self._limit:g} s"
        return ""


def watch_server(watch: Watch, end: Callable[[str], None], every: float = 5.0) -> threading.Thread:
    """A thread that calls ``end`` with the reason once something is overdue."""

    def look() -> None:
        while not (reason := watch.overdue()):
            time.sleep(every)
        end(reason)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    return thread


def end(reason: str) -> NoReturn:
    """End the process whatever other threads do: Flower's own server thread would keep it."""
    log.error("this SuperNode ends, with exit code %d, to be started anew: %s", GONE, reason)
    logging.shutdown()
    os._exit(GONE)


def in_step(flower: Any) -> None:
    """Make a SuperNode stay with a message until that one is answered.

    Flower 1.41 pulls a message, then sends whatever reply there is, once. If a run is stopped in the moment in which a
    node takes its message, that message is worked on all the same, and its reply is left over. It is sent (and ignored)
    in the place of the next one, which waits in turn for a message after it: in every later round the server would wait
    for this node until ``engine.round-timeout``, and the node take part in none.

    Args:
        flower: Flower's module ``flwr.supernode.start_client_internal``, whose loop calls these two by name.
    """
    pull, push = flower._pull_and_store_message, flower._push_messages
    taken, answered = "", ""

    def pulled(receive: Callable[[], Any], **others: Any) -> Any:
        def noted() -> Any:
            nonlocal taken
            found = receive()
            if found is not None:
                taken = found[0].metadata.message_id
            return found

        return pull(receive=noted, **others)

    def pushed(send: Callable[..., Any], **others: Any) -> None:
        def noted(message: Any, *more: Any) -> Any:
            nonlocal answered
            answered = message.metadata.reply_to_message_id
            return send(message, *more)

        push(send=noted, **others)
        while answered != taken:
            push(send=noted, **others)

    flower._pull_and_store_message, flower._push_messages = pulled, pushed


def is_passing(error: Exception) -> bool:
    """Whether an error may pass and Flower would not wait for that."""
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == httpx.codes.INTERNAL_SERVER_ERROR
    text = str(error).lower()
    return ("ssl" in text or "tls" in text) and "certificate" not in text


def repeat_calls(
    invoker: "RetryInvoker", limit: float = PATIENCE, clock: Callable[[], float] = time.monotonic
) -> "RetryInvoker":
    """Make an invoker of Flower's give up only after so many seconds of errors that may pass, and return it.

    Args:
        invoker: waits between its calls as it did.
        limit: seconds.
        clock: seconds.
    """
    gives_up, succeeded = invoker.should_giveup, invoker.on_success
    failing_since: float | None = None

    def should_giveup(error: Exception) -> bool:
        nonlocal failing_since
        if not is_passing(error):
            return gives_up is not None and gives_up(error)
        failing_since = clock() if failing_since is None else failing_since
        lasted, said = clock() - failing_since, str(error).partition("\n")[0]
        log.warning("the SuperLink fails (%s), for %.0f s now; it is asked again for %g s", said, lasted, limit)
        return lasted >= limit

    def on_success(state: object) -> None:
        nonlocal failing_since
        failing_since = None
        if succeeded is not None:
            succeeded(state)  # type: ignore[arg-type]

    invoker.should_giveup, invoker.on_success = should_giveup, on_success
    return invoker


class Completing:
    """A mixin for a client of Flower's API: what was carried out although its answer was lost can be sent again.

    A reply whose sending was cut short is known to the SuperLink, and its server may have taken it already and wait for
    its objects. Sent again it is refused in silence: the SuperLink asks for none of its objects, and the round waits in
    vain. An object that is sent again is "not stored", which Flower takes for the end of its message. Here all objects
    of such a message are sent, for whichever session waits for them, and an object that is there counts as stored.
    """

    def PushMessages(self, request: Any) -> Any:
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        response = super().PushMessages(request)  # type: ignore[misc]
        wanted = set(response.objects_to_push)
        again = [tree for tree in request.message_object_trees if tree.object_id not in wanted]
        if again:
            response.session_id = ""  # the SuperLink looks for one that waits for the object
            wanted |= {node.object_id for tree in again for node in iterate_object_tree(tree)}
            response.objects_to_push[:] = sorted(wanted)
        return response

    def PushObject(self, request: Any) -> Any:
        from flwr.proto.message_pb2 import PullObjectRequest

        push = super().PushObject  # type: ignore[misc]
        response = push(request)
        if not request.session_id:
            while response.stored:  # until no further session waits for it
                response = push(request)
            response.stored = True
        elif not response.stored:
            asked = PullObjectRequest(node=request.node, run_id=request.run_id, object_id=request.object_id)
            response.stored = self.PullObject(asked).object_available or push(request).stored  # type: ignore[attr-defined]
        return response


class Returning:
    """A mixin for a client of Flower's Fleet API: a node that is restarted waits until it is taken in again.

    The SuperLink counts the process before as connected until a minute after its last heartbeat, and activates no
    second one. Flower's node ends then, with exit code 305.
    """

    pause = 2.0
    """Seconds between two requests."""

    def ActivateNode(self, request: Any) -> Any:
        import httpx

        ends = time.monotonic() + RETURN
        while True:
            try:
                return super().ActivateNode(request)  # type: ignore[misc]
            except httpx.HTTPStatusError as error:
                refused = error.response.status_code == httpx.codes.PRECONDITION_FAILED
                if not refused or time.monotonic() + self.pause > ends:
                    raise
            log.warning("the SuperLink does not take this node in yet; it is asked again for %g s: %s", RETURN, EARLIER)
            time.sleep(self.pause)


def patient(flower: Any) -> None:
    """Make a SuperNode repeat its calls and heartbeats as its clients of Flower's API and :func:`repeat_calls` do.

    Args:
        flower: Flower's module ``flwr.supernode.fleet_http_connection``, which makes its connection by these names.
    """
    invoker, sender = flower.make_simple_http_retry_invoker, flower.HeartbeatSender

    def forgiving(beat: Callable[[], bool]) -> Any:
        def beaten() -> bool:
            import httpx

            try:
                return beat()
            except httpx.HTTPStatusError as error:
                if not is_passing(error):
                    raise
                return False  # Flower sends the next one, at first at once; an error would end its thread

        return sender(beaten)

    flower.make_simple_http_retry_invoker = lambda: repeat_calls(invoker())
    flower.HeartbeatSender = forgiving
    flower.FleetHttpClient = type("FleetClient", (Returning, Completing, flower.FleetHttpClient), {})


@contextlib.contextmanager
def secret_file(secret: bytes) -> Iterator[tuple[str, int]]:
    """A file without a name that holds a secret: its path for a child process, and the descriptor to pass on."""
    with tempfile.TemporaryFile() as file:
        file.write(secret)
        file.seek(0)  # where a system opens /dev/fd/N by duplicating N, its reader begins here
        yield f"/dev/fd/{file.fileno()}", file.fileno()


def hide_tokens() -> None:
    """Make Flower's executor hand each task its token in a file; Flower 1.41 puts it on the command line."""
    launcher: Any = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")

    class Hiding:
        DEVNULL = subprocess.DEVNULL

        @staticmethod
        def Popen(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
            option = command.index("--token")
            with secret_file(command[option + 1].encode()) as (path, descriptor):
                hidden = [*command[:option], "--token-file", path, *command[option + 2 :]]
                return subprocess.Popen(hidden, pass_fds=[descriptor], **options)

    launcher.subprocess = Hiding


def close_executor(flower: Any, api: Any) -> None:
    """Make a SuperNode hand its work to its own executor only; Flower 1.41 hands it to any user of the host.

    Args:
        flower: Flower's module ``flwr.supernode.start_client_internal``, which starts the executor.
        api: Flower's module ``flwr.supernode.main``, which makes what answers the executor.
    """
    key, create_app = secrets.token_bytes(32), api.create_app

    class Trusting:
        @staticmethod
        def Popen(command: list[str]) -> "subprocess.Popen[bytes]":
            with secret_file(key) as (path, descriptor):
                own = [sys.executable, "-m", "client.supernode", "--executor", *command[1:]]
                return subprocess.Popen([*own, "--superexec-auth-secret-file", path], pass_fds=[descriptor])

    flower.subprocess = Trusting
    api.create_app = lambda **settings: create_app(**{**settings, "superexec_auth_secret": key})


def execute(arguments: list[str]) -> None:
    """``flower-superexec`` with these arguments."""
    from flwr.supercore.cli import flower_superexec

    hide_tokens()
    sys.argv = ["flower-superexec", *arguments]
    flower_superexec()


def main(arguments: list[str]) -> None:
    """Flower's command with these arguments, until it ends or is ended."""
    from flwr.supernode import fleet_http_connection, start_client_internal
    from flwr.supernode import main as api
    from flwr.supernode.cli import flower_supernode

    close_executor(start_client_internal, api)
    in_step(start_client_internal)
    patient(fleet_http_connection)
    calls, watch = logging.getLogger("httpx"), Watch(mark())
    calls.addHandler(watch)
    calls.setLevel(logging.INFO)
    calls.propagate = False  # a line for every poll is of no use to people
    watch_server(watch, end)
    sys.argv = ["flower-supernode", *arguments]
    try:
        flower_supernode()
    except SystemExit as ended:  # Flower's own ends, with its own words
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
    except BaseException:
        traceback.print_exc()
        end("Flower's main thread failed")
    end("Flower has given up its connection to the SuperLink")


def mark() -> Path:
    """The file whose time says when the server last answered."""
    return Path(os.environ.get(VARIABLE) or Path(tempfile.gettempdir()) / "lacquer-alive")


def healthy() -> str:
    """Explain why this process does not reach its server; empty if it does."""
    try:
        since = abs(time.time() - mark().stat().st_mtime)  # behind the clock or, where that was put back, before it
    except OSError:
        return "the server has not answered since this process was started"
    return f"the server has last answered {since:.0f} s ago" if since > HEALTHY else ""


if __name__ == "__main__":
    if sys.argv[1:] == ["--healthy"]:
        sys.exit(healthy() or 0)
    os.umask(0o077)
    if sys.argv[1:2] == ["--executor"]:
        execute(sys.argv[2:])
        sys.exit()
    shown = logging.StreamHandler()  # of this file's own words; Flower prints its own
    shown.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(shown)
    log.propagate = False
    main(sys.argv[1:])
