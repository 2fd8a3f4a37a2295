#!/usr/bin/env bash
# Product and peers in one sitting, in turn, REPEATS times: one JSON line per run.
#   TORCH=v-torch/bin/python FEDJAX=v-fedjax/bin/python PFL=v-pfl/bin/python OURS=python \
#       benchmarks/side_by_side.sh W2 3
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here:$here/peers"
workload=${1:-W2}
for _ in $(seq "${2:-3}"); do
  "${OURS:-python}" "$here/rounds.py" --workload "$workload" --rounds "${ROUNDS:-7}"
  "$TORCH" "$here/peers/torch_loop.py" --workload "$workload" --rounds "${ROUNDS:-7}"
  if [ "$workload" != W3 ]; then # the FedJAX peer has no LSTM
    for backend in jit pmap; do
      "$FEDJAX" "$here/peers/fedjax_peer.py" --workload "$workload" --backend $backend \
        --rounds "${ROUNDS:-7}"
    done
  fi
  "$PFL" "$here/peers/pfl_peer.py" --workload "$workload" --rounds "${ROUNDS:-7}" 2>/dev/null | grep framework
done
