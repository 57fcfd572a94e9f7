#!/bin/sh
# ci/performance.sh [NAME]: run the benchmark, gate it; the exit code is the gate's. PULL_REQUEST: its number, if any
set -u
cd "$(dirname "$0")/.." || exit
results=results/${1:-$(date -u +%Y-%m-%d_%H-%M-%S)}
[ ! -e "$results" ] || { echo "$results exists already; give another name" >&2; exit 2; }

mbridge run --system-config system.toml --tests-dir test_defs --test-scenario scenario.toml \
  --output-dir "$results"
ran=$?
[ "$ran" -le 1 ] || exit "$ran"     # 1: a point failed, and the gate says which

mbridge gate "$results"/*/ --policy ci/policy.toml --confirm 3 \
  --markdown "$results/gate.md" --junit "$results/gate.xml"
gated=$?
[ -n "${PULL_REQUEST:-}" ] || mbridge history import "$results"/*/ || exit  # only what was merged
[ "$gated" -ne 17 ] || exit "$ran"  # 17: no baseline has been promoted yet, so good runs are enough
exit "$gated"
