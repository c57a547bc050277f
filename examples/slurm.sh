#!/bin/bash
# One run on all GPUs of a node: sbatch examples/slurm.sh
# Many independent runs need no such file: sparring sweep FILE --launcher slurm
#SBATCH --job-name=sparring
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=240
#SBATCH --requeue
#SBATCH --open-mode=append
# This script gets USR1 90 seconds before the end of its time, and TERM where Slurm ends or requeues the job itself.
#SBATCH --signal=B:USR1@90

# The run saves at TERM. A requeued job gives the same command again, and --resume continues the run.
trap 'kill -TERM $run; wait $run; scontrol requeue $SLURM_JOB_ID' USR1
trap 'kill -TERM $run; wait $run' TERM
torchrun --standalone --nproc-per-node 4 -m sparring train fat-cifar10-resnet18 --out runs/four-gpus --resume &
run=$!
wait $run
