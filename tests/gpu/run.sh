#!/usr/bin/env bash
# All tests that need a GPU, five to ten minutes on an H200: those of correctness side by side, memcheck beside them, then those that time, alone.
#
#     bash tests/gpu/run.sh LOGS
set -uo pipefail
cd "$(dirname "$0")/../.."
logs=$(realpath -m "${1:?the folder for the logs}")
mkdir -p "$logs"
run() { # a name, a limit in seconds, a command
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    timeout "$limit" "$@" >"$logs/$name.log" 2>&1
    echo "$name: exit status $?, $((SECONDS - start)) s: $(tail -n 1 "$logs/$name.log")"
}
tests=(python3 -m pytest -q --tb=short -m gpu -p no:cacheprovider --durations=6)
export OMP_NUM_THREADS=2
{
    run concurrency 200 "${tests[@]}" tests/gpu/test_concurrency_gpu.py &
    run faults 200 "${tests[@]}" tests/gpu/test_faults_gpu.py &
    run graph 200 "${tests[@]}" tests/gpu/test_graph_gpu.py &
    run lifetime 200 "${tests[@]}" tests/gpu/test_lifetime_gpu.py tests/gpu/test_values_gpu.py &
    run panel 200 "${tests[@]}" tests/gpu/test_panel_gpu.py &
    run batched 200 "${tests[@]}" tests/test_batched.py tests/test_streaming.py &
    run facts 200 "${tests[@]}" tests/test_facts.py tests/test_models.py tests/test_decoder.py &
    run memcheck 200 compute-sanitizer --tool memcheck python3 tests/gpu/memcheck.py &
    wait
    run decoder 120 "${tests[@]}" -s tests/gpu/test_decoder_gpu.py
    run chunks 90 "${tests[@]}" -s tests/gpu/test_chunks_gpu.py
    run prefix 150 "${tests[@]}" -s tests/test_prefix_gpu.py
} | tee "$logs/summary"
grep -hE "^(FAILED|ERROR) " "$logs"/*.log | cut -c1-200
! grep -qv "exit status 0" "$logs/summary"
