#!/bin/sh
# Starts nginx with what it cannot find out by itself: who resolves names here, and where the SuperLink is. The name is
# asked for again every 10 s, for a SuperLink that starts anew may have another address.
set -eu
resolver=$(awk '$1 == "nameserver" {print ($2 ~ /:/) ? "[" $2 "]" : $2; exit}' /etc/resolv.conf)
printf 'resolver %s valid=10s ipv6=off;\nset $superlink "%s";\n' "$resolver" "${LACQUER_SUPERLINK:-superlink:8000}" >/tmp/upstream.conf
exec nginx -c /etc/lacquer/gateway.conf
