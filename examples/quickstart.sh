#!/usr/bin/env bash
# From nothing to an answer: install, quantize the bundled model to W4A16, serve it, ask it a question.
set -euo pipefail
cd "$(dirname "$0")/.."
. tests/environment.sh

work=$(mktemp -d)
server=""
finish() {
    [ -z "$server" ] || { kill "$server" 2>/dev/null && wait "$server"; } || true
    rm -rf "$work"
}
trap finish EXIT

echo "== Quantize examples/models/docs-5m to 4 bits"
# A small model and a first try: fewer calibration windows than the defaults.
qserve quantize examples/models/docs-5m --output "$work/docs-5m-w4a16" --scheme w4a16-sym \
    --samples 32 --sequence-length 512

echo "== Serve it"
qserve serve "$work/docs-5m-w4a16" --served-model-name docs-5m --port 0 >"$work/serve.log" 2>&1 &
server=$!
url=""
for _ in $(seq 600); do
    url=$(sed -n 's/^Serving .* on \(http:.*\)$/\1/p' "$work/serve.log")
    [ -z "$url" ] || break
    kill -0 "$server" 2>/dev/null || { cat "$work/serve.log" >&2; exit 1; }
    sleep 0.2
done
[ -n "$url" ] || { echo "the server did not start:" >&2; cat "$work/serve.log" >&2; exit 1; }
echo "$url is up"

echo "== Ask it"
python examples/ask.py "$url" "What is ownership in Rust?"

echo "== Stop it"
kill -TERM "$server"
wait "$server"
server=""
