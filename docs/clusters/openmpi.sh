#!/bin/bash
# Run on all hosts of a host file, one process per host: bash openmpi.sh HOSTFILE FOLDER [ROUNDS]
#
# JAX detects Open MPI 4, and Open MPI 5 only since JAX 0.12 with mpi4py. This script passes JAX
# the addresses and numbers itself, so that neither version matters.
set -u
hosts=$1
shift
port=8476

# mpirun numbers its processes in the order of the host file, so process 0 is on the first host.
first=$(awk 'NF && $1 !~ /^#/ {print $1; exit}' "$hosts")

# Without --bind-to none, mpirun binds each process to few of its node's cores.
mpirun --hostfile "$hosts" --map-by ppr:1:node --bind-to none \
  bash -c 'exec python -m jaxfl.launch --coordinator "$0" --processes "$OMPI_COMM_WORLD_SIZE" \
    --process "$OMPI_COMM_WORLD_RANK" "$@"' "$first:$port" run.py "$@"
