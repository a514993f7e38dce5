#!/usr/bin/env bash
# Builds the images, brings a federation of three clients up, and shows what docs/deploy.md says of it:
# an unregistered client is refused; clients cannot reach the Control API, and other users of the host cannot use it nor read a
# secret; strangers at the gateway do no harm; rounds train
# on three clients' own records; a locked database costs nothing; a client follows no other client; a client killed in a round
# does not end the run; executor and SuperLink, killed, come back; a resumed run waits for its clients;
# clients that do not trust the server open sums together; clients protect their own patients; a key is renewed, a client
# joins from another host, ledgers are backed up; no secret is in the image and no record of a client on the server.
#
# usage: docker/container_test.sh      with the variables of test_engine.sh
#        CONTAINER_PART=core leaves out faults, attacks, secure sums and operations: what every change is tried with.
#        CONTAINER_RESULT=FILE gets the sizes and the time as JSON.
#        SUPERLINK_COST=PYTHON also measures what clients cost the SuperLink (faults/superlink_cost.py), two minutes more.
set -euo pipefail
cd "$(dirname "$0")/.."
PART=${CONTAINER_PART:-all}
case $PART in all|core) ;; *) echo "CONTAINER_PART must be all or core, got $PART" >&2; exit 2 ;; esac
. docker/test_engine.sh
LIMITS="epsilon-limit=2.0 delta-limit=1e-6"
elsewhere() ( SETTINGS=env.client PROJECT+=-elsewhere; export LACQUER_NODE_CONFIG="$LIMITS"; unset COMPOSE_FILE; compose "$@" )
label() { docker image inspect -f "{{index .Config.Labels \"org.opencontainers.image.$2\"}}" "$1"; }
VERSION=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
for built in "$LACQUER_IMAGE" "$LACQUER_SUPERLINK_IMAGE" "$LACQUER_GATEWAY_IMAGE"; do
  [ "$(docker image inspect -f '{{.Config.User}}' "$built")" = 10001:10001 ] || die "an image runs as root"
  [ "$(label "$built" version) $(label "$built" revision) $(label "$built" base.name)" = "$VERSION $REVISION $BASE" ] || die "labels of $built"
done
docker run --rm --network none "$LACQUER_IMAGE" python -c "from client.models.devices import choose_device; choose_device('cuda')" \
  >"$WORK/cuda.log" 2>&1 && die "a GPU is found where there is none"
grep -q "there is no CUDA device that torch can use here" "$WORK/cuda.log" || { tail -5 "$WORK/cuda.log"; die "no word of the missing GPU"; }
if grep -q "is built without CUDA" "$WORK/cuda.log"; then
  image --build-arg CUDA=1 && die "an image for CUDA is built with torch for CPUs"
  grep -q "CUDA is asked for, but torch" "$WORK/build.log" || { tail -5 "$WORK/build.log"; die "the image for CUDA is not built for another reason"; }
fi
say "labels are right; a GPU that is not there is missed in words"

# --- three clients with records of their own ------------------------------------------------------------------------------
prepare
BEGAN=$SECONDS
compose up -d superlink executor gateway client-1 >"$WORK/up.log" 2>&1 || { cat "$WORK/up.log"; die "compose up"; }

refused() { [ "$(logged client-1 'its key was not let in')" -gt 0 ]; }
await 120 "an unregistered client is refused" refused
say "an unregistered client is refused"
inside executor lacquer admit >"$WORK/admit.log" || { cat "$WORK/admit.log"; die "admit"; }
compose up -d >>"$WORK/up.log" 2>&1
await 180 "three clients are online" online 3
ONLINE=$((SECONDS - BEGAN))
say "three clients are online $ONLINE s after the first up -d"

inside client-1 python - <<'P' || die "a client reaches more than the Fleet API"
import socket, ssl, urllib.error, urllib.request
context = ssl.create_default_context(cafile="/keys/ca.crt")
def status(path):
    try:
        request = urllib.request.Request("https://gateway:8443" + path, data=b"", method="POST")
        return urllib.request.urlopen(request, context=context, timeout=20).status
    except urllib.error.HTTPError as error:
        return error.code
assert status("/v1/fleet/pull-messages") == 401
for path in ("/v1/control/list-runs", "/v1/control/register-node", "/v1/runtime/pull-messages", "/v1/fleet/%70ull-messages",
             "/v1/fleet/../control/list-runs", "/v1/fleet//pull-messages", "/v1/fleet/pull-messages?x=1", "/health", "/docs"):
    assert status(path) == 404, path
try:
    socket.create_connection(("superlink", 8000), 5)
    raise SystemExit("the SuperLink is reachable")
except OSError:
    pass
try:
    urllib.request.urlopen("https://gateway:8443/v1/fleet/get-run", timeout=20)
    raise SystemExit("a certificate of an unknown authority is taken")
except urllib.error.URLError as error:
    assert "CERTIFICATE_VERIFY_FAILED" in str(error), error
P
say "clients reach the Fleet API and nothing else"
LINK=$(docker inspect -f '{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}' "$(container superlink)")
stranger python3 - "$LINK" <<'P' || die "another user of this host commands the SuperLink"
import ssl, sys, urllib.error, urllib.request
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
for path in ("control/list-nodes", "control/start-run", "control/register-node", "runtime/acquire-task", "runtime/pull-task-input"):
    try:
        status = opener.open(urllib.request.Request(f"https://{sys.argv[1]}:8000/v1/{path}", b"", {"content-type": "application/protobuf"}), timeout=20).status
    except urllib.error.HTTPError as error:
        status = error.code
    assert status == 401, (path, status)
P
[ "$(inside superlink ls -1 /keys | tr -d '\r' | xargs)" = "ca.crt operator.key server.crt server.key" ] || die "the SuperLink holds keys that it does not need"
say "other users of this host reach the SuperLink and command nothing; it holds no key that signs"

ends() { docker inspect -f '{{.RestartCount}}' "$(container client-1)" "$(container client-2)" "$(container client-3)" | awk '{n += $1} END {print n}'; }
if [ $PART = all ]; then
# --- strangers at the gateway: each has an address of its own, and at most the public half of a key that was let in -------------------------------------
peak() { inside superlink sh -c 'cat /proc/[0-9]*/status 2>/dev/null' | awk '/^VmHWM/ && $2 > most {most = $2} END {print int(most / 1024)}'; }
restarts() { docker inspect -f '{{.RestartCount}}' "$(container superlink)" "$(container gateway)" | xargs; }
KEY=$(inside executor sh -c 'cat /admitted/*.key | head -1' | tr -d '\r')
[ "$(inside executor sh -c 'cat /admitted/*.key' | grep -c .)" = 3 ] || die "the gateway was not told of three keys"
attack() { docker run -i --rm --network "${PROJECT}_fleet" "$LACQUER_IMAGE" python - "$1" gateway:8443 "$KEY" <docker/attack.py 2>&1; }
honest() { inside client-1 python - ask gateway:8443 "$KEY" <docker/attack.py >"$WORK/ask.log" 2>&1 || { cat "$WORK/ask.log"; die "the gateway answers nobody: $1"; }; }
BEFORE=$(peak) STARTED=$(restarts)
attack headers || die "300,000 headers"
honest "after many headers"
attack bodies || die "large bodies"
honest "after large bodies"
[ "$(peak)" -lt $((BEFORE + 1024)) ] || die "the SuperLink grew from $BEFORE to $(peak) MiB"
attack slow >"$WORK/slow.log" &
slow=$!
for _ in 1 2 3 4; do sleep 3; honest "beside slow bodies"; done
wait $slow || { cat "$WORK/slow.log"; die "slow bodies"; }
cat "$WORK/slow.log"
[ "$(restarts)" = "$STARTED" ] || die "a server was started again: $(restarts)"
online 3 || die "not all clients are online after the attacks"
say "strangers do no harm: the SuperLink's peak was $BEFORE MiB before and is $(peak) MiB"

# --- a line that stands still: Flower gives up for good, and its container is started again --------------------------------------
ENDED=$(ends)
docker pause "$(container gateway)" >/dev/null; sleep 75; docker unpause "$(container gateway)" >/dev/null
await 240 "three clients are online after the line stood still" online 3
say "the line stood still for 75 s, clients were started again $(($(ends) - ENDED)) times, and three are online"
fi

if [ -n "${SUPERLINK_COST:-}" ]; then
  (cd docker && PYTHONPATH=.. "$SUPERLINK_COST" -m simulations.benchmarks faults.superlink_cost --project "$PROJECT" --stack-seconds $ONLINE \
    --seconds 50 --rounds 0 -- "${COMPOSE[@]}") || die "the SuperLink's cost"
fi

# --- the run --------------------------------------------------------------------------------------------------------------
rounds() {
  local count
  count=$(inside executor sh -c 'cat /runs/*/metrics.jsonl 2>/dev/null | grep -vc "\"phase\": \"start\""' 2>/dev/null) || true
  echo "${count:-0}"
}
at_least() { [ "$(rounds)" -ge "$1" ]; }
failed() { inside executor sh -c 'grep -q "\"failed\"" /runs/*/status.json' 2>/dev/null; }
got() { if failed; then inside executor sh -c 'cat /runs/*/status.json'; die "the run failed"; fi; at_least "$1"; }
inside executor lacquer deploy /config/test.toml --set rounds=$([ $PART = all ] && echo 14 || echo 4) >"$WORK/deploy.log" 2>&1 &
deploying=$!   # the engine may be a child of this shell too
touch "$WORK/reading"
while [ -e "$WORK/reading" ]; do
  stranger sh -c 'grep -asE "flwr-(server|client)app" /proc/[0-9]*/cmdline | tr "\0" " " | grep -aoE "flwr-[a-z]+app --runtime-api-address (superlink:8000|127.0.0.1:9094) --token[a-z-]* [^ ]*"' >>"$WORK/commands" || true
  sleep 0.5
done &
await 900 "two rounds" got 2
rm "$WORK/reading"
for app in flwr-serverapp flwr-clientapp; do grep -q "$app --runtime-api-address" "$WORK/commands" || die "no command line of $app was seen"; done
grep -qE -- '--token |[0-9a-f]{64}' "$WORK/commands" && die "a task's token is on a command line"
say "two rounds are trained, and no other user of this host read a token"
if [ $PART = all ]; then
# The SuperLink answers 500 while its database is locked. Nobody may end by that, nor a charged round be lost.
ENDED=$(ends) BEFORE=$(rounds)
charges() { inside executor python -c '
import pathlib
from privacy.ledger.ledger import Ledger
with Ledger.open(next(pathlib.Path("/runs").iterdir()) / "ledger.jsonl", read_only=True) as ledger:
    print(*(event.round for event in ledger.events))'; }
inside superlink python -c "
import sqlite3, time
database = sqlite3.connect('/state/superlink.db', isolation_level=None, timeout=60)
database.execute('BEGIN EXCLUSIVE'); time.sleep(25); database.execute('ROLLBACK')"
[ "$(logged gateway '" 500, ')" -gt 0 ] || die "the lock of the database was not felt"
await 120 "a round after the lock" got $((BEFORE + 2))
[ "$(charges | xargs -n 1 | sort -n | uniq -d)" = "" ] || die "a charged round was lost while the database was locked"
failed && die "the run failed while the database was locked"
[ "$(ends)" = "$ENDED" ] || die "a client ended while the database was locked"
say "the database was locked for 25 s: no client ended, and no round was lost"
# An admitted client speaks in the server's name to another one.
node() { inside executor lacquer clients | grep "$1" | cut -d' ' -f1 | tr -d '\r'; }
NUMBER=$(inside executor sh -c 'cat /runs/*/flower-run.json' | tr -dc 0-9)
inside client-1 python - "$NUMBER" "$(node client-1)" "$(node client-3)" <docker/insider.py >"$WORK/insider.log" 2>&1 &&
  die "the SuperLink takes an instruction from a client"
grep -q "403 Forbidden" "$WORK/insider.log" || { tail -5 "$WORK/insider.log"; die "a client's instruction was refused for another reason"; }
say "an admitted client's message in the server's name is refused"
busy() { [ "$(inside client-2 sh -c 'cat /proc/[0-9]*/cmdline 2>/dev/null | tr "\0" " "' | grep -c 'flwr-clientapp')" -gt 0 ]; }
await 120 "client-2 is in a round" busy
BEFORE=$(rounds)
docker kill "$(container client-2)" >/dev/null
await 300 "the round ends without client-2" got $((BEFORE + 1))
say "client-2 was killed in round $((BEFORE + 1)), and the round has ended"
# The executor ends, and with it the ServerApp. No command starts it again, and the resumed run must find one.
EXECUTOR=$(container executor)
healed() { [ "$(docker inspect -f '{{.RestartCount}} {{.State.Running}}' "$EXECUTOR")" = "1 true" ]; }
inside executor sh -c 'kill -9 $(grep -la server.network.patience /proc/[0-9]*/cmdline | cut -d/ -f3 | sort -n | sed -n 2p)' || true
await 60 "the executor is started again by itself" healed
docker kill "$(container superlink)" >/dev/null
wait $deploying || true
compose up -d >>"$WORK/up.log" 2>&1
await 240 "three clients are online again" online 3
say "executor and server were killed and are back, with all clients"
RUN=$(inside executor sh -c 'ls -d /runs/*' | tr -d '\r')
# Its process died with the executor. Until the SuperLink notices, it takes the run for unfinished and would refuse to resume it.
inside executor lacquer stop "$RUN" >"$WORK/stop.log" 2>&1 || grep -q "nothing to stop" "$WORK/stop.log" ||
  { cat "$WORK/stop.log"; die "the run is not stopped"; }
BEFORE=$(rounds)   # of quick clients more than three, while the executor was looked for
[ "$BEFORE" -ge 3 ] || die "three rounds were trained, and $BEFORE are left"
# Two of three clients are away: the resumed run waits for one of them before it charges anything, and nothing starts beside it.
CHARGES=$(charges)
compose stop client-1 client-3 >>"$WORK/up.log" 2>&1
await 180 "two clients are away" online 1
inside executor lacquer deploy --resume "$RUN" >"$WORK/resume.log" 2>&1 &
deploying=$!
waits() { inside executor grep -q "waiting for nodes: 1 of 3" "$RUN/status.json"; }
await 180 "the resumed run waits for its clients" waits
inside executor lacquer deploy --resume "$RUN" >"$WORK/beside.log" 2>&1 && die "the run is resumed twice"
grep -Eq "a process holds its (ledger|lock)|the SuperLink has a run of this folder" "$WORK/beside.log" || { cat "$WORK/beside.log"; die "a second resume is refused for another reason"; }
waits || die "the resumed run waits no longer, with one client of three"
[ "$(charges)" = "$CHARGES" ] || die "a round was charged although two of three clients were away"
compose start client-1 client-3 >>"$WORK/up.log" 2>&1
await 300 "the run is resumed" got $((BEFORE + 1))
say "the resumed run waited for its clients before anything was charged, and no second one started"
docker kill "$(container superlink)" >/dev/null
compose up -d >>"$WORK/up.log" 2>&1
ended() { inside executor grep -Eq '"state": "(completed|stopped-budget)"' "$RUN/status.json"; }
await 300 "the resumed run outlives the SuperLink" ended
wait $deploying || { tail -20 "$WORK/resume.log"; die "the command did not outlive the SuperLink"; }
[ "$(docker inspect -f '{{.RestartCount}}' "$EXECUTOR")" = 1 ] || die "the executor was started again"
await 120 "three clients are online for the third time" online 3
say "the run was resumed, went on although the SuperLink was killed, and has ended"
else
  wait $deploying || { tail -20 "$WORK/deploy.log"; die "the run did not end well"; }
  RUN=$(inside executor sh -c 'ls -d /runs/*' | tr -d '\r')
fi

# --- what it left -----------------------------------------------------------------------------------------------------------
inside executor python - "$RUN" <<'P' || die "the run folder is not what it should be"
import json, pathlib, sys
from privacy.ledger.ledger import Ledger
from safetensors.torch import load_file
folder = pathlib.Path(sys.argv[1])
records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
rounds = [record["round"] for record in records if record["phase"] != "start"]
status = json.loads((folder / "status.json").read_text())
with Ledger.open(folder / "ledger.jsonl") as ledger:
    charges = [event.round for event in ledger.events]
    assert ledger.not_private is None and ledger.commitment.population == 3
assert status["state"] in ("completed", "stopped-budget"), status
assert rounds == list(range(1, len(rounds) + 1)) and len(rounds) >= 3, rounds
assert set(rounds) <= set(charges) and len(charges) <= 14, (rounds, charges)
assert any(value.abs().max() > 0 for value in load_file(next(folder.rglob("adapter_model.safetensors"))).values())
P
head -1 "$WORK/records/client-1/records.jsonl" | python3 -c 'import json,sys; print(json.load(sys.stdin)["text"][:40])' >"$WORK/phrase"
{ inside executor sh -c 'cat $(find /runs -type f)'; inside superlink sh -c 'cat /state/*'; } 2>/dev/null | grep -aqF -f "$WORK/phrase" && die "a record of client-1 is on the server"
say "ledger, metrics and adapter are right; no record of a client is on the server"
if [ $PART = all ]; then
# --- sums that the clients open together ------------------------------------------------------------------------------------
compose run --rm --user 10001:10001 keys sh -ec '
  for i in 1 2 3; do set -- "$@" --member "$(lacquer identity /keys/client-$i/identity.key)"; done
  lacquer federation /keys/executor/federation.json "$@" --survivors 2 --epsilon 8 --delta 1e-2
  for i in 1 2 3; do cp /keys/executor/federation.json /keys/client-$i/; done' >"$WORK/federation.log" 2>&1 ||
  { cat "$WORK/federation.log"; die "the list of the federation"; }
export LACQUER_NODE_CONFIG='identity="/keys/identity.key" federation="/keys/federation.json" secagg-state="/silo/secagg"'
compose up -d >>"$WORK/up.log" 2>&1
await 240 "three clients are online with identities" online 3
inside executor lacquer deploy /config/test-secagg.toml >"$WORK/secagg.log" 2>&1 || { tail -20 "$WORK/secagg.log"; die "no secure sum"; }
inside executor sh -c 'grep -q "\"completed\"" /runs/secagg-*/status.json' || die "the secure run did not complete"
say "two rounds of sums that only the clients could open"
. docker/operations_test.sh
fi

# --- the image ----------------------------------------------------------------------------------------------------------------
for built in "$LACQUER_IMAGE" "$LACQUER_SUPERLINK_IMAGE"; do
  docker create --network none --name "$PROJECT-scan" "$built" >/dev/null
  docker export "$PROJECT-scan" | python3 docker/scan_image.py || { docker rm "$PROJECT-scan" >/dev/null; die "$built holds secrets"; }
  docker rm "$PROJECT-scan" >/dev/null
  docker run --rm --network none "$built" python -c '
import importlib.metadata, sys
found = {one.metadata["Name"].lower() for one in importlib.metadata.distributions()}
wrong = found & ({"pip", "uv", "hatchling"} | ({"torch", "transformers"} if "superlink" in sys.argv[1] else set()))
sys.exit(f"in the image: {wrong}" if wrong else 0)' "$built" || die "$built brings what it must not"
done
say "no secret is in an image, nothing installs packages, and the SuperLink has no torch"
if command -v syft >/dev/null; then
  docker/bills.sh "$LACQUER_IMAGE" "$LACQUER_SUPERLINK_IMAGE" "$LACQUER_GATEWAY_IMAGE" "$WORK" || die "bills of materials"
  say "bills of materials name what is in the images"
fi
if [ -n "${CONTAINER_RESULT:-}" ]; then
  printf '{"image_bytes": %d, "superlink_bytes": %d, "base_bytes": %d, "seconds": %d, "load": %s, "cores": %d, "commit": "%s"}\n' "$SIZE" "$(size "$LACQUER_SUPERLINK_IMAGE")" \
    "$(size $BASE)" $(($(date +%s) - START)) "$(cut -d' ' -f3 /proc/loadavg)" "$(nproc)" \
    "$(git rev-parse --short=12 HEAD)" >"$CONTAINER_RESULT"
fi
say "passed"
