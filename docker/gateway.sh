#!/bin/sh
# Starts nginx with what it cannot find out by itself: who resolves names here, where the SuperLink is, and whose keys were
# let in. The name is asked for again every 10 s, for a SuperLink that starts anew may have another address. The keys are
# looked at every 2 s: `lacquer admit` and `lacquer expel` change them.
set -eu
KEYS=${LACQUER_ADMITTED:-/admitted}
LIST=/tmp/admitted.conf
resolver=$(awk '$1 == "nameserver" {print ($2 ~ /:/) ? "[" $2 "]" : $2; exit}' /etc/resolv.conf)
printf 'resolver %s valid=10s ipv6=off;\nset $superlink "%s";\n' "$resolver" "${LACQUER_SUPERLINK:-superlink:8000}" >/tmp/upstream.conf

list() {
  find "$KEYS" -name '*.key' -exec cat {} + 2>/dev/null | sort -u |
    sed -n 's/^LS0tLS1CRUdJTiBQVUJMSUMgS0VZLS0tLS0K[A-Za-z0-9+/]\{100,400\}=\{0,2\}$/"&" 1;/p' >$LIST.new
}

follow() {
  while sleep 2; do
    list
    cmp -s $LIST.new $LIST && continue
    mv $LIST.new $LIST
    echo "gateway: $(grep -c . $LIST) keys are let in" >&2
    nginx -c /etc/lacquer/gateway.conf -s reload
  done
}

list
mv $LIST.new $LIST
follow &
exec nginx -c /etc/lacquer/gateway.conf
