#!/usr/bin/env bash
# SGLang's router before two servers. vLLM's Rust router takes the same flags as `vllm-router`.
#   pip install sglang-router && examples/deploy/sglang-router/start.sh http://host1:8000 http://host2:8000
set -euo pipefail
[ "$#" -ge 1 ] || { echo "usage: $0 URL..." >&2; exit 2; }
exec python -m sglang_router.launch_router \
    --host 127.0.0.1 --port 8001 \
    --worker-urls "$@" \
    --policy cache_aware \
    --cache-threshold 0.3 \
    --balance-abs-threshold 32 --balance-rel-threshold 1.5
