#!/bin/sh
# Runs a command that says nothing itself: talk.sh WHAT COMMAND … says what it does, and every 4 seconds that it still does.
printf '%s\n' "$1"
what=$1
shift
(
    seconds=0
    trap 'kill "$nap" 2>/dev/null; exit' TERM
    while :; do
        sleep 4 &
        nap=$!
        wait "$nap"
        seconds=$((seconds + 4))
        printf '  … %s s: %s\n' "$seconds" "$what"
    done
) &
clock=$!
trap 'kill "$clock" 2>/dev/null' EXIT
trap 'exit 130' INT TERM
"$@"
