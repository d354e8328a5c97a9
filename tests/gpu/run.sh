#!/usr/bin/env bash
# All tests that need a GPU: those of correctness in eight processes and memcheck beside them, then those that time, alone. Ten minutes at most.
#
#     bash tests/gpu/run.sh LOGS
set -uo pipefail
cd "$(dirname "$0")/../.."
logs=$(realpath -m "${1:?the folder for the logs}")
mkdir -p "$logs"
python3 -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'no GPU: every test would be skipped')" || exit 1
run() { # a name, a limit in seconds, a command
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    timeout "$limit" "$@" >"$logs/$name.log" 2>&1
    echo "$name: exit status $?, $((SECONDS - start)) s: $(tail -n 1 "$logs/$name.log")"
}
tests=(python3 -m pytest -q --tb=short -m gpu -p no:cacheprovider --durations=15)
timed=(tests/gpu/test_decoder_gpu.py tests/gpu/test_chunks_gpu.py tests/test_prefix_gpu.py)
export OMP_NUM_THREADS=2
{
    run memcheck 240 compute-sanitizer --tool memcheck python3 tests/gpu/memcheck.py &
    run correctness 240 "${tests[@]}" -n 8 tests "${timed[@]/#/--ignore=}" &
    wait
    run timed 350 "${tests[@]}" -s "${timed[@]}"
} | tee "$logs/summary"
grep -hE "^(FAILED|ERROR) " "$logs"/*.log | cut -c1-200
! grep -qv "exit status 0" "$logs/summary"
