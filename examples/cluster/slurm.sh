#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12
#SBATCH --time=12:00:00 --signal=B:USR1@300 --requeue --open-mode=append
#
# sbatch slurm.sh. train.py has a run_dir that all nodes see, and ends with sys.exit(trainer.fit(...).exit_code).
#
# - Time is up: 300 seconds before, SLURM sends SIGUSR1 to this shell, which passes it on. The ranks save and end with 75; the job goes
#   back into the queue and resumes.
# - A node is lost: SLURM requeues the job by itself (--requeue). It resumes from the newest checkpoint.
# - A rank fails: the job ends with its code, and is not started again.

trap 'kill -USR1 $!' USR1  # before the ranks start: without a trap, the signal would end this shell
srun --kill-on-bad-exit=1 python train.py &
ranks=$!
wait $ranks; code=$?
while kill -0 $ranks 2> /dev/null; do wait $ranks; code=$?; done  # a signal ends the wait, not the ranks

[ $code -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit $code
