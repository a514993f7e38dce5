# Part of container_test.sh, which defines what is used here: what docs/deploy.md says of sites, of new keys, of clients on
# other hosts and of backups, done with its own commands.

# --- clients that protect their own patients --------------------------------------------------------------------------------
inside executor lacquer deploy /config/test-sites.toml >"$WORK/sites.log" 2>&1 && die "clients with identities answered without secure sums"
[ "$(logged client-1 'this node answers requests for secure sums only')" -gt 0 ] || { tail -20 "$WORK/sites.log"; die "refused for another reason"; }
unset LACQUER_NODE_CONFIG
compose up -d >>"$WORK/up.log" 2>&1
await 240 "three clients are online without identities" online 3
inside executor lacquer deploy /config/test-sites.toml >"$WORK/sites.log" 2>&1 || { tail -20 "$WORK/sites.log"; die "no round of sites"; }
for i in 1 2 3; do
  inside "client-$i" python - <<'P' || die "client-$i has no ledger of its two steps"
from privacy.ledger.ledger import Ledger
with Ledger.open("/silo/ledger.jsonl", read_only=True) as ledger:
    assert ledger.commitment.unit == "group:patient" and len(ledger.charges) == 2, ledger.charges
P
done
inside executor sh -c 'ls /runs/sites-*/ledger.jsonl' >/dev/null 2>&1 && die "the server keeps a ledger for sites"
say "three sites have trained, each with a ledger of its own"

# --- a new key ----------------------------------------------------------------------------------------------------------------
OLD=$(inside executor sh -c 'cat "/admitted/$(lacquer clients | grep client-2 | cut -d" " -f1).key"' | tr -d '\r')
inside executor lacquer expel client-2
turned_away() { [[ $(inside client-1 python - ask gateway:8443 "$OLD" <docker/attack.py 2>&1) == *"an honest call: 401;"* ]]; }
await 30 "the gateway turns an expelled key away by itself" turned_away
compose run --rm keys lacquer certificates /keys --owner 10001 --client client-2 --renew client-2 >"$WORK/renew.log" 2>&1 || { cat "$WORK/renew.log"; die "keys --renew"; }
inside executor lacquer admit >>"$WORK/admit.log"
compose restart client-2 >>"$WORK/up.log" 2>&1
await 120 "client-2 is online with its new key" online 3
[ "$(inside executor lacquer clients | grep client-2 | grep -c unregistered)" = 1 ] || die "the old key is still registered"
say "client-2 has a new key, and the old one is out"

# --- a client on another host ---------------------------------------------------------------------------------------------------
# Another project has networks of its own; it reaches the gateway by the port that is published on this host.
export COMPOSE_FILE=compose.yaml:public.yaml   # named once, as in .env: a plain `up -d` leaves the port open from then on
inside superlink python -c "
import sqlite3
database = sqlite3.connect('/state/superlink.db', isolation_level=None, timeout=60)
database.executescript('CREATE TABLE junk (b BLOB); INSERT INTO junk VALUES (zeroblob(50000000)); DROP TABLE junk')"
state() { inside superlink sh -c 'cat /state/superlink.db* | wc -c'; }
GROWN=$(state); [ "$GROWN" -gt 50000000 ] || die "the database did not grow: $GROWN"
compose up -d superlink gateway >>"$WORK/up.log" 2>&1
HOST=$(docker network inspect "${PROJECT}_public" -f '{{(index .IPAM.Config 0).Gateway}}')
compose run --rm keys lacquer certificates /keys --owner 10001 --address "$HOST" --renew servers >>"$WORK/renew.log" 2>&1 || { cat "$WORK/renew.log"; die "keys --address"; }
compose restart superlink executor gateway >>"$WORK/up.log" 2>&1
mkdir "$WORK/trust"
compose run --rm -T keys cat /keys/authority/ca.crt >"$WORK/trust/ca.crt" 2>/dev/null
export LACQUER_TRUST=$WORK/trust/ca.crt CLIENT_DATA=$WORK/records/client-1 LACQUER_GATEWAY=$HOST:${LACQUER_PORT:-8443}
ELSEWHERE=1
elsewhere run --rm -T keys >"$WORK/clinic.pub" 2>/dev/null
inside executor cat /keys/federation.json >"$WORK/federation.json"
own() { elsewhere run --rm -T keys "$@"; }
own sh -c 'lacquer identity /keys/identity.key && chown 10001:10001 /keys/identity.key' >"$WORK/identity" 2>/dev/null
[ "$(tr -d '\r\n' <"$WORK/identity" | wc -c)" = 64 ] || { cat "$WORK/identity"; die "a client on another host has no identity"; }
own sh -c 'cat > /keys/federation.json && lacquer federation /keys/federation.json' <"$WORK/federation.json" >"$WORK/digest" 2>/dev/null ||
  die "the list of the federation is not put beside a client's key"
inside executor lacquer federation /keys/federation.json >"$WORK/digest-here"
cmp "$WORK/digest" "$WORK/digest-here" || die "the list has another digest on another host"
elsewhere up -d >>"$WORK/up.log" 2>&1
inside executor sh -c 'cat > /tmp/clinic.pub && lacquer admit /tmp/clinic.pub' <"$WORK/clinic.pub" >>"$WORK/admit.log"
compose up -d >>"$WORK/up.log" 2>&1
await 180 "a client of another host is online, after a plain up" online 4
docker inspect -f '{{.Args}}' "$(elsewhere ps -q client)" | grep -cF "$LIMITS]" >/dev/null || die "the client was not told its limits"
[ "$(state)" -lt 10000000 ] || die "the database stays as large as it was: $(state)"
elsewhere down -v -t 1 >>"$WORK/up.log" 2>&1
say "a client joins from outside, with a key that was made there and limits of its own; the database is small again"

# --- certificates that the gateway must not follow ----------------------------------------------------------------------------------
KEY=$(inside executor sh -c 'cat "/admitted/$(lacquer clients | grep client-1 | cut -d" " -f1).key"' | tr -d '\r')
certificate() {
  compose run --rm -T keys python - /keys/superlink /keys/authority "$1" <docker/wrong_certificate.py >>"$WORK/renew.log" 2>&1 || { cat "$WORK/renew.log"; die "no $1 certificate"; }
  compose restart superlink >>"$WORK/up.log" 2>&1
}
gateway_refuses() { inside client-1 python - ask gateway:8443 "$KEY" <docker/attack.py >"$WORK/ask.log" 2>&1; [ "$(logged gateway "$1")" -gt 0 ] && grep -q "an honest call: 502" "$WORK/ask.log"; }
certificate other
await 120 "the gateway refuses a SuperLink with a certificate of another name" gateway_refuses 'upstream SSL certificate does not match "superlink"'
certificate expired
await 120 "the gateway refuses a SuperLink whose certificate has expired" gateway_refuses 'certificate has expired'
certificate right
followed() { inside client-1 python - ask gateway:8443 "$KEY" <docker/attack.py >"$WORK/ask.log" 2>&1; }
await 120 "the gateway follows its SuperLink again" followed
say "the gateway follows no SuperLink whose certificate is of another name or has expired"

# --- backups --------------------------------------------------------------------------------------------------------------------
inside executor tar -C /runs -cz . >"$WORK/runs.tar.gz"
inside superlink python -m server.network.superlink_state copy /state/superlink.db >"$WORK/state.db"
inside client-1 tar -C /silo -cz . >"$WORK/silo.tar.gz"
tar -tzf "$WORK/runs.tar.gz" | grep -c ledger.jsonl >/dev/null || die "the backup holds no ledger"
tar -tzf "$WORK/silo.tar.gz" | grep -c ledger.jsonl >/dev/null || die "the backup of client-1 holds no ledger"
python3 -c 'import sqlite3, sys; assert sqlite3.connect(sys.argv[1]).execute("pragma integrity_check").fetchone() == ("ok",)' "$WORK/state.db" || die "the backup of the state"
say "ledgers and state are backed up"
