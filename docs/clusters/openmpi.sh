#!/bin/bash
# Run on all hosts of a host file, one process per host: bash openmpi.sh HOSTFILE FOLDER [ROUNDS]
#
# Start the script on one of these hosts. JAX detects Open MPI 4, and Open MPI 5 only since JAX 0.12
# with mpi4py. The script passes the coordinator and the numbers itself, so it fits both versions.
set -u
hosts=$1
shift

# mpirun numbers its processes in the order of the host file, so process 0 is on the first host.
first=$(awk 'NF && $1 !~ /^#/ {print $1; exit}' "$hosts")
coordinator=$first:8476

# mpirun passes no variables to other hosts but those that -x names.
export JAXFL_CACHE_DIR=${JAXFL_CACHE_DIR:-$HOME/.cache/jaxfl}
export PYTHONPATH=${PYTHONPATH:-}

# Without --bind-to none, mpirun would bind each process to a part of its host's cores.
mpirun --hostfile "$hosts" --map-by ppr:1:node --bind-to none -x JAXFL_CACHE_DIR -x PYTHONPATH \
  bash -c 'exec python -m jaxfl launch --coordinator "$0" --processes "$OMPI_COMM_WORLD_SIZE" \
    --process "$OMPI_COMM_WORLD_RANK" "$@"' "$coordinator" run.py "$@" &

# mpirun kills its processes about one second after SIGTERM, before they have saved. So the script
# sends SIGTERM to the launcher of this host, and then all processes save and stop.
trap 'pkill -TERM -f "^python -m jaxfl launch --coordinator $coordinator "' TERM INT
wait $!
code=$?
# The trap has ended the first wait.
if [ "$code" -gt 128 ]; then
  wait $!
  code=$?
fi
exit "$code"
